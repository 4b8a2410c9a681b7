"""What the first pages tell a newcomer, typed as it stands: clone, demo, a policy of one's own.

A script of one's own is in test_readme_own_script.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest

from hermes_ops.stack import processes

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
README, CONTRIBUTING = "README.md", "CONTRIBUTING.md"
ADDRESS = "ADDRESS"
FREE_PORTS = "--airflow-port 0 --mlflow-port 0"
OF_AN_OUTER_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "SLOTS")


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)


def environment() -> dict[str, str]:
    """As a new shell has it: nothing of this checkout, and no way to install anything."""
    dropped = (*OF_AN_OUTER_MAKE, "HERMES_HOME", "PYTHONPATH", "VIRTUAL_ENV")
    own = {k: v for k, v in os.environ.items() if k not in dropped}
    return {**own, "UP": FREE_PORTS, "UV_OFFLINE": "1", "PIP_NO_INDEX": "1"}


def typed(lines: list[str], folder: Path) -> str:
    """What the lines printed, typed in that folder; they are ended if this is."""
    shell = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate()
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGTERM)  # the demo stops its services then
            shell.wait(timeout=120)
    assert shell.returncode == 0, said
    return said


def furnish(checkout: Path) -> None:
    """Give the checkout what `make demo` would install: the packages that are installed here.

    They are found by a path and nothing is written to them; the code that runs is the checkout's.
    """
    own = checkout / ".venv"
    venv.create(own, symlinks=True)
    packages = own / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    here = sysconfig.get_path("purelib")
    (packages / "packages.pth").write_text(f"{checkout}\n{here}\n")
    _, _, script = (Path(sys.executable).parent / "hermes").read_text().partition("\n")
    hermes = own / "bin" / "hermes"
    hermes.write_text(f"#!{own / 'bin' / 'python'}\n{script}")
    hermes.chmod(0o755)
    (own / ".ready").touch()


def cloned(lines: list[str], folder: Path) -> Path:
    """The checkout that the lines lead to, made in that folder and furnished."""
    assert lines[0].startswith(f"git clone {ADDRESS} ")
    here = [lines[0].replace(ADDRESS, str(ROOT)), *lines[1:], "pwd"]
    checkout = Path(typed(here, folder).splitlines()[-1])
    furnish(checkout)
    which = "import hermes_ops; print(hermes_ops.__file__)"
    ours = typed([f".venv/bin/python -P -c '{which}'"], checkout).strip()
    assert Path(ours).is_relative_to(checkout)
    return checkout


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose name is short, as the stack's sockets are to lie below it."""
    return tmp_path_factory.mktemp("new")


def test_from_a_clone_to_the_first_result_by_the_commands_of_the_readme(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun_s = time.monotonic()
    *arriving, demo = blocks(README, "sh")[0].splitlines()
    checkout = cloned(arriving, place)
    assert "pip" not in typed([f"{demo} --dry-run"], checkout)  # nothing is installed anew

    home = checkout / ".hermes"
    try:
        said = typed([demo], checkout)
        left = processes.members(home)
    finally:
        if processes.members(home):
            typed([f".venv/bin/hermes down --home {home}"], checkout)

    assert "16/16 trials ended" in said
    assert len(re.findall(r"^\d+ +finished ", said, re.M)) == 16
    assert re.search(r"^Best: trial \d+ \(\d", said, re.M)
    assert re.search(r"time to best, s │ +[\d.]+ │ +[\d.]+ │", said)  # and of its replay
    assert "Everything is stopped; no process is left." in said
    assert left == []
    sweep = re.search(r"^(\d+) s, at most 2 of 2 GPUs in use at once$", said, re.M)
    assert sweep is not None
    with capsys.disabled():
        took_s = time.monotonic() - begun_s
        print(f"\nClone to first result, packages installed: {took_s:.0f} s, sweep {sweep[1]} s")


def test_a_policy_of_eight_lines_is_known_to_the_command_line_of_the_checkout(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = cloned(blocks(README, "sh")[0].splitlines()[:-1], place)
    begun_s = time.monotonic()
    module, line = blocks(CONTRIBUTING, "python")
    (compare,) = (b for b in blocks(CONTRIBUTING, "sh") if "shortest" in b)
    policies = checkout / "hermes_ops" / "policies"
    (policies / "shortest.py").write_text(module)
    table = (policies / "__init__.py").read_text()
    added = re.sub(r"^(_BUILTIN: .* = {\n)", rf"\1{line}", table, flags=re.M)
    own_import = "from hermes_ops.policies.shortest import Shortest\n"
    (policies / "__init__.py").write_text(
        added.replace("from hermes_ops.policies.slaq", f"{own_import}from hermes_ops.policies.slaq")
    )

    told = json.loads(typed([f"{compare.strip()} --json"], checkout))

    mean_s = {p: f["mean_completion_seconds"]["mean"] for p, f in told["policies"].items()}
    assert f"({mean_s['fifo'] / mean_s['shortest']:.1f} times)" in (ROOT / CONTRIBUTING).read_text()
    with capsys.disabled():
        print(f"\nA policy added and compared: {time.monotonic() - begun_s:.0f} s")

"""What the first pages tell a newcomer, typed as it stands: clone, add a policy, compare it.

A script of one's own is in test_readme_own_script.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
README, CONTRIBUTING = "README.md", "CONTRIBUTING.md"
ADDRESS = "ADDRESS"


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)


def environment() -> dict[str, str]:
    """As a new shell has it: nothing of this checkout, and no way to install anything."""
    dropped = ("HERMES_HOME", "PYTHONPATH", "VIRTUAL_ENV")
    own = {k: v for k, v in os.environ.items() if k not in dropped}
    return {**own, "UV_OFFLINE": "1", "PIP_NO_INDEX": "1"}


def typed(lines: list[str], folder: Path) -> str:
    """What the lines printed, typed in that folder."""
    shell = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert shell.returncode == 0, shell.stdout
    return shell.stdout


def furnish(checkout: Path) -> None:
    """Give the checkout what make would install: the packages that are installed here.

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


def test_a_policy_of_eight_lines_is_known_to_the_command_line_of_the_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = cloned(blocks(README, "sh")[0].splitlines()[:-1], tmp_path)
    begun_s = time.monotonic()
    module, line = blocks(CONTRIBUTING, "python")
    (compare,) = (b for b in blocks(CONTRIBUTING, "sh") if "shortest" in b)
    policies = checkout / "hermes_ops" / "policies"
    (policies / "shortest.py").write_text(module)
    table = (policies / "__init__.py").read_text()
    added = re.sub(r"^(POLICIES: .* = {\n)", rf"\1{line}", table, flags=re.M)
    own_import = "from hermes_ops.policies.shortest import Shortest\n"
    (policies / "__init__.py").write_text(
        added.replace("from hermes_ops.policies.slaq", f"{own_import}from hermes_ops.policies.slaq")
    )

    told = json.loads(typed([f"{compare.strip()} --json"], checkout))

    mean_s = {p: f["mean_completion_seconds"]["mean"] for p, f in told["policies"].items()}
    assert f"({mean_s['fifo'] / mean_s['shortest']:.1f} times)" in (ROOT / CONTRIBUTING).read_text()
    with capsys.disabled():
        print(f"\nA policy added and compared: {time.monotonic() - begun_s:.0f} s")

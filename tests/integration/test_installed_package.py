"""A policy and a sampler of another package, installed, tested by its own suite, and used live."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import CALM

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "package"
SWEEP = {
    "name": "even",
    "objective": {"metric": "val_loss", "direction": "minimize"},
    "search": {
        "algorithm": "halton",
        "seed": 3,
        "max_trials": 3,
        "space": {
            "rate": {"type": "loguniform", "low": 0.001, "high": 0.1},
            "units": {"type": "integer", "low": 8, "high": 64},
        },
    },
    "budget": {"max_epochs": 2},
}
SCRIPT = """
import sys
for step in (1, 2):
    print(f"val_loss={1 / step + float(sys.argv[1])} step={step}", flush=True)
"""

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built and installed into a folder of its own."""
    place = tmp_path_factory.mktemp("site")
    build = ("--no-deps", "--no-build-isolation", "--no-index")
    command = ["uv", "pip", "install", "--quiet", "--python", sys.executable, *build]
    done = _run([*command, "--target", str(place), str(EXAMPLE)], {})
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture(scope="module")
def home(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A stack in whose environment the package is installed."""
    place = tmp_path_factory.mktemp("stack") / "home"
    place.mkdir()
    (place / "hermes.toml").write_text(CALM)
    ports = ("--airflow-port", "0", "--mlflow-port", "0")
    up = _hermes(site, "up", "--home", place, "--slots", "1", *ports)
    assert up.returncode == 0, up.stderr
    yield place
    assert _hermes(site, "down", "--home", place).returncode == 0


def _run(
    command: list[str], environment: dict[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        command,
        env={**os.environ, "PATH": path, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def _hermes(site: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("hermes")), *map(str, arguments)]
    return _run(command, {"PYTHONPATH": str(site)})


def test_the_contract_tests_of_the_example_pass_in_its_own_project(
    site: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    suite = str(EXAMPLE / "tests")
    own = [f"--rootdir={tmp_path}", f"--basetemp={tmp_path / 'pytest'}"]
    done = _run([*command, *own, suite], {"PYTHONPATH": str(site)}, tmp_path)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


def test_an_installed_policy_and_sampler_serve_a_real_sweep(
    site: Path, home: Path, tmp_path: Path
) -> None:
    chosen = _hermes(
        site, "policy", "most-progress", "--option", "unknown_steps=50", "--home", home
    )
    assert chosen.returncode == 0, chosen.stderr
    wrong = _hermes(site, "policy", "most-progress", "--option", "unknown_steps=0", "--home", home)
    assert wrong.returncode != 0
    assert "unknown_steps is at least 1" in wrong.stderr + wrong.stdout

    (tmp_path / "train.py").write_text(SCRIPT)
    trial = {"command": ["python", "train.py", "{rate}"], "directory": str(tmp_path)}
    file = tmp_path / "sweep.yaml"
    file.write_text(json.dumps({**SWEEP, "trial": trial}))
    checked = _hermes(site, "sweep", "check", file, "--json")
    assert checked.returncode == 0, checked.stderr
    run = _hermes(site, "sweep", "run", file, "--follow", "--home", home)
    assert run.returncode == 0, run.stdout + run.stderr

    shown = _hermes(site, "sweep", "show", "even", "--json", "--home", home)
    trials = json.loads(shown.stdout)["trials"]
    assert [trial["state"] for trial in trials] == ["finished"] * 3
    drawn = json.loads(checked.stdout)["first_trials"]
    assert [trial["config"] for trial in trials] == drawn

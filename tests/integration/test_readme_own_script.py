"""The README's way to sweep a script of one's own, run from the README itself."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

README = Path(__file__).parents[2] / "README.md"
COMMAND = ".venv/bin/hermes "
SCRIPT = """\
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float)
parser.add_argument("--dropout", type=float)
parser.add_argument("--optimizer", choices=["adam", "sgd"])
asked = parser.parse_args()
for epoch in range(1, 4):
    loss = (0.1 - asked.learning_rate) ** 2 + asked.dropout + 1 / epoch
    print(f"{epoch=} val_loss={loss + (asked.optimizer == 'sgd')}")
"""


@pytest.fixture(scope="module")
def section() -> str:
    """What the README says between that heading and the next."""
    found = re.search(r"^## Sweep your own script\n(.*?)^## ", README.read_text(), re.S | re.M)
    assert found is not None
    return found[1]


def _commands(section: str) -> list[list[str]]:
    """The commands of the section, in order, without the program."""
    blocks = re.findall(r"```sh\n(.*?)```", section, re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    assert all(line.startswith(COMMAND) for line in lines)
    return [shlex.split(line.removeprefix(COMMAND)) for line in lines]


def test_the_commands_of_the_readme_sweep_a_script_that_knows_nothing_of_hermes(
    section: str, stack: Any, harness: Any, lab: Any, tmp_path: Path
) -> None:
    (sweep_file,) = re.findall(r"```yaml\n(.*?)```", section, re.S)
    (tmp_path / "sweep.yaml").write_text(sweep_file)
    (tmp_path / "train.py").write_text(SCRIPT)
    up, check, run = _commands(section)
    assert up[0] == "up"  # the shared stack is up already, with as many slots
    assert up[up.index("--slots") + 1] == "2"

    checked = _typed(stack, check, tmp_path)
    told = json.loads(_typed(stack, [*run, "--json"], tmp_path))

    assert "val_loss" in checked
    assert told["state"] == "finished"
    assert [trial["state"] for trial in told["trials"]] == ["finished"] * 12
    values = {trial["number"]: trial["final"] for trial in told["trials"]}
    assert told["best"]["number"] == min(values, key=values.__getitem__)
    (run,) = harness.Sweep(lab, told["sweep"]).runs()[0]
    assert run["tags"]["hermes.steps"] == "3"


def _typed(stack: Any, command: list[str], folder: Path) -> str:
    """What the command printed, run in the folder as a person would."""
    said = stack.hermes(*command, timeout_s=300, folder=folder)
    assert said.returncode == 0, said.stdout + said.stderr
    return str(said.stdout)

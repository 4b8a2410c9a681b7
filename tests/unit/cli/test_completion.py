from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hermes_ops.cli import assemble
from hermes_ops.trial.checkpoint_store.store import safe_name


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder with two sweeps, the older one of three trials."""
    monkeypatch.setenv("HERMES_HOME", str(tmp_path))
    for at_s, name in ((100, "digits-1"), (200, "digits-2"), (150, "other-1")):
        folder = tmp_path / "sweeps" / name
        (folder / "trials").mkdir(parents=True)
        os.utime(folder, (at_s, at_s))
    for number in (0, 2, 10):
        (tmp_path / "sweeps" / "digits-1" / "trials" / str(number)).mkdir()
    os.utime(tmp_path / "sweeps" / "digits-1", (100, 100))
    return tmp_path


def offered(words: str) -> list[str]:
    """What bash offers after these words; the last one is still being typed."""
    environment = {
        "_HERMES_COMPLETE": "complete_bash",
        "COMP_WORDS": f"hermes {words}",
        "COMP_CWORD": str(len(words.split(" "))),
    }
    said = CliRunner().invoke(assemble(), [], env=environment, prog_name="hermes")
    return said.stdout.split()


def test_commands_and_options_are_completed() -> None:
    assert {"extend", "resume", "run", "stop"} <= set(offered("sweep "))
    assert offered("sweep ex") == ["extend"]
    assert offered("sweep extend digits-1 --tr") == ["--trials"]


def test_sweeps_are_completed_the_newest_first() -> None:
    assert offered("sweep resume ") == ["digits-2", "other-1", "digits-1"]
    assert offered("sweep watch dig") == ["digits-2", "digits-1"]
    assert offered("sweep stop nothing") == []


def test_trials_are_completed_behind_their_sweep() -> None:
    assert offered("explain oth") == ["other-1/"]
    assert offered("explain digits-1/") == ["digits-1/0", "digits-1/2", "digits-1/10"]
    assert offered("explain digits-1/1") == ["digits-1/10"]


def test_a_sweep_in_a_group_is_completed_by_its_id_and_not_by_its_folder(home: Path) -> None:
    sweep = "mine:group:manual__1"
    folder = home / "sweeps" / safe_name(sweep)
    (folder / "trials" / "4").mkdir(parents=True)
    assert offered("sweep watch mine") == [folder.name]  # nothing has been decided of it yet
    (folder / "decisions.jsonl").write_text(json.dumps({"sweep": sweep, "trial": 4}) + "\n")
    assert offered("sweep watch mine") == [sweep]
    assert offered(f"explain {sweep}/") == [f"{sweep}/4"]


def test_policies_are_completed_by_name() -> None:
    assert offered("policy front") == ["frontrunner"]
    assert "gandiva" not in offered("policy ")  # it runs in simulations only


def test_a_state_folder_that_is_not_there_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_HOME", "/nowhere/at/all")
    assert offered("sweep watch ") == []
    assert offered("explain digits-1/") == []

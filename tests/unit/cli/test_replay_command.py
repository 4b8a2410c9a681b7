from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hermes_ops import cli
from tests.unit.simulator.recorded_sweeps import Mlflow


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mlflow:
    """The MLflow that the command reaches: one sweep, its second trial cut short."""
    found = Mlflow(second="cancelled")
    monkeypatch.setattr("hermes_ops.cli.connection.connect_tracker", lambda home: found)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    return found


def hermes(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and error output of `hermes replay ARGUMENTS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hermes", "replay", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    code: Any = ended.value.code
    return (code or 0, *capsys.readouterr())


def told(capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    code, out, _ = hermes(capsys, "digits-1", "--policy", "fifo", *options, "--json")
    assert code == 0
    return json.loads(out)


def test_the_document_has_what_was_measured_and_bounds_for_what_is_replayed(
    mlflow: Mlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys)
    assert found["measured"]["time_to_best_seconds"] == 12.5
    assert (found["trials"], found["cut_short"], found["gpus"]) == (4, [1, 2, 3], 1)
    assert found["needed"] == [1, 2, 3]
    assert set(found["replayed"]) == {
        "time_to_best_seconds",
        "gpu_hours",
        "preemptions",
        "makespan_seconds",
    }
    for bounds in found["replayed"].values():
        assert bounds["low"] <= bounds["high"]
    assert (
        found["replayed"]["makespan_seconds"]["low"] < found["replayed"]["makespan_seconds"]["high"]
    )


def test_a_unique_beginning_of_the_id_is_enough(
    mlflow: Mlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = hermes(capsys, "dig", "--policy", "fifo", "--json")
    assert (code, json.loads(out)["sweep"]) == (0, "digits-1")
    code, _, err = hermes(capsys, "other", "--policy", "fifo")
    assert code == 1
    assert "'other' is the beginning of 2 sweeps: other-1, other-2: write more of the id" in err
    assert "knows no sweep 'else'" in hermes(capsys, "else", "--policy", "fifo")[2]


def test_the_options_reach_the_replay(mlflow: Mlflow, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--gpus", "2", "--no-guards", "--switch-seconds", "7")
    assert (found["gpus"], found["guards"]) == (2, False)
    assert (found["switch"]["measured"], found["switch"]["startup_seconds"]) == (False, 7.0)
    assert told(capsys)["switch"]["handover_seconds"] > 0


def test_the_table_says_what_was_cut_short_and_what_of_it_was_needed(
    mlflow: Mlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = hermes(capsys, "digits-1", "--policy", "fifo")
    assert code == 0
    assert "time to best, s" in out
    assert " to " in out
    assert "Cut short: 3 trials (1, 2, 3)." in out
    assert "the figures are bounds" in out


def test_each_simulation_leaves_its_files_in_the_folder(
    mlflow: Mlflow, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = told(capsys, "--out", "there")
    assert json.loads((tmp_path / "there" / "replay.json").read_text()) == found
    names = {path.name for path in (tmp_path / "there").iterdir()} - {"replay.json"}
    assert names == {
        f"{completion}-{file}"
        for completion in ("at-once", "slow-and-better", "slow-and-flat")
        for file in ("events.jsonl", "jobs.csv", "gpus.png")
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("digits-2", "--policy", "fifo"), "knows no sweep 'digits-2'"),
        (("digits-1", "--policy", "fastest"), "fastest"),
        (("digits-1", "--policy", "fifo", "--policy-option", "x"), "NAME=VALUE"),
        (("digits-1", "--policy", "fifo", "--policy-option", "x=1"), "policy.fifo.x"),
    ],
)
def test_a_mistake_is_said_in_words(
    mlflow: Mlflow, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    code, out, error = hermes(capsys, *arguments)
    assert (code, out) == (1, "")
    assert said in error
    assert "Traceback" not in error

"""What is deleted on a machine's disk once sweeps have ended, by what MLflow tells."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.control.cleanup.janitor import KEEP_FILE
from hermes_ops.airflow.folders import TrialFolder, sweep_folder
from hermes_ops.airflow.machines import SWEEP_NOTE, note_sweep
from hermes_ops.airflow.sweep.machine_cleanup import clean_up, machine_cleanup_dag
from hermes_ops.errors import Unavailable
from tests.unit.airflow.builders import NO_SWEEP_FILES, SWEEP, sweep_file

NOW_S = 1_000.0
KEEP_S = 100.0


@dataclass
class FakeMlflow:
    """MLflow with one sweep, or none."""

    state: str = "finished"
    trials_: dict[int, str] = field(default_factory=dict)
    is_known: bool = True
    is_away: bool = False
    uri = "http://mlflow"
    files: dict[str, bytes] = field(default_factory=dict)  # by sweep

    def find_sweep(self, sweep: str, experiment: str | None = None) -> Any:
        if self.is_away:
            raise Unavailable("MLflow did not answer")
        return SimpleNamespace(sweep_id=sweep, parent_run_id=sweep) if self.is_known else None

    def sweep(self, ref: Any) -> Any:
        return SimpleNamespace(state=self.state)

    def trials(self, ref: Any) -> Any:
        return [SimpleNamespace(number=n, state=s) for n, s in self.trials_.items()]

    @property
    def artifacts(self) -> Any:
        rules = {"keep_seconds": KEEP_S}
        text = json.dumps(sweep_file(checkpoints=rules)).encode()
        return SimpleNamespace(fetch=lambda run, path: self.files.get(run, text))


def trained(*numbers: int) -> None:
    note_sweep(SWEEP)
    for number in numbers:
        checkpoints = TrialFolder.from_sweep(SWEEP, number).checkpoints
        checkpoints.mkdir(parents=True)
        (checkpoints / "state.json").write_text("{}")


def left() -> list[int]:
    found = sweep_folder(SWEEP).glob("trials/*/checkpoints")
    return sorted(int(path.parent.name) for path in found)


def cleaned(mlflow: FakeMlflow, now_s: float = NOW_S) -> list[str]:
    tracker: Any = mlflow
    return clean_up(tracker, now_s)


def test_checkpoints_of_trials_that_cannot_go_on_are_deleted_and_others_are_kept_for_a_time(
    home: Path,
) -> None:
    trained(0, 1, 2)
    mlflow = FakeMlflow(trials_={0: "finished", 1: "cancelled", 2: "stopped_early"})
    assert cleaned(mlflow) == [SWEEP]
    assert left() == [1]
    assert json.loads((sweep_folder(SWEEP) / KEEP_FILE).read_text())["until_s"] == NOW_S + KEEP_S
    assert cleaned(mlflow, NOW_S + KEEP_S / 2) == []
    assert left() == [1]
    assert cleaned(mlflow, NOW_S + KEEP_S) == [SWEEP]
    assert left() == []


def test_a_sweep_that_runs_keeps_everything_though_its_time_is_over(home: Path) -> None:
    trained(0)
    cleaned(FakeMlflow(trials_={0: "cancelled"}))
    resumed = FakeMlflow("running", {0: "running"})
    assert cleaned(resumed, NOW_S + 10 * KEEP_S) == []
    assert left() == [0]


def test_what_mlflow_does_not_know_stays_and_while_it_is_away_nothing_is_deleted(
    home: Path,
) -> None:
    trained(0)
    assert cleaned(FakeMlflow(is_known=False)) == []
    with pytest.raises(Unavailable):
        cleaned(FakeMlflow(is_away=True))
    assert left() == [0]


def test_a_note_that_cannot_be_read_hinders_no_other_sweep(home: Path) -> None:
    trained(0)
    other = home / "sweeps" / "another"
    other.mkdir()
    (other / SWEEP_NOTE).write_text("{")
    assert cleaned(FakeMlflow(trials_={0: "finished"})) == [SWEEP]


@pytest.mark.parametrize("file", NO_SWEEP_FILES.values(), ids=NO_SWEEP_FILES)
def test_whatever_somebody_has_put_in_mlflow_for_a_sweep_file_hinders_no_other_sweep(
    home: Path, file: bytes
) -> None:
    trained(0)
    note_sweep("a-forged-one")
    TrialFolder.from_sweep("a-forged-one", 0).checkpoints.mkdir(parents=True)
    mlflow = FakeMlflow(trials_={0: "finished"}, files={"a-forged-one": file})
    assert cleaned(mlflow) == [SWEEP]
    assert TrialFolder.from_sweep("a-forged-one", 0).checkpoints.exists()


def test_each_machine_has_a_task_on_its_own_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_MACHINES", "node-a=2,node.b=1")
    dag = machine_cleanup_dag()
    queues = {task.task_id: task.queue for task in dag.tasks}
    assert queues == {"clean_node-a": "gpu-node-a", "clean_node.b": "gpu-node.b"}

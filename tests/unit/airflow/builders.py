"""Builders of the records and rows that the controller reads, and what stands in for services."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.control.apply import Applier
from hermes_ops.airflow.control.decisions import DecisionLog
from hermes_ops.airflow.control.faults import RequestPool
from hermes_ops.airflow.control.sweep_state import SweepSpec, SweepState
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.metadata_rows import RunRow, TaskInstanceRow, TaskRank
from hermes_ops.airflow.records import (
    HELD_POOL_SLOTS,
    CloseRecord,
    Lease,
    SegmentRecord,
    StopFlag,
    SweepRecord,
    encode,
)
from hermes_ops.errors import Unavailable

SWEEP = "digits-1"


NO_SWEEP_FILES = {
    "deep": b"[" * 5_000,
    "open": b"name: [",
    "latin": b"name: caf\xe9",
    "endless": b"&a [*a, *a]",
    "number": b"7",
    "large": b"x" * (1 << 23),
}
"""Texts that are no sweep file, such as a person may leave in MLflow."""


def ti_id(number: int) -> str:
    return str(UUID(int=number + 1))


def row(number: int = 0, state: str | None = "scheduled", **changes: Any) -> TaskInstanceRow:
    facts: dict[str, Any] = {
        "id": ti_id(number),
        "run_key": 1,
        "number": number,
        "state": state,
        "pool": "gpus",
        "pool_slots": HELD_POOL_SLOTS,
        "priority_weight": 1,
        "try_number": 1,
    }
    return TaskInstanceRow(**{**facts, **changes})


def lease(epoch: int = 1, gpus: tuple[int, ...] = (0,), **changes: Any) -> Lease:
    facts: dict[str, Any] = {
        "granted_s": 90.0,
        "run_id": "run-0",
        "config": {"rate": 0.1},
        "command": ("python", "train.py"),
        "directory": "/",
        "max_failures": 2,
    }
    return Lease(epoch=epoch, gpus=gpus, **{**facts, **changes})


def segment(epoch: int = 1, running: bool = True, **changes: Any) -> SegmentRecord:
    return SegmentRecord(epoch=epoch, running=running, **{"started_s": 100.0, **changes})


def flag(epoch: int = 1, final: str | None = None, *, resize: bool = False) -> StopFlag:
    return StopFlag(epoch, "another trial converges faster", 120.0, final, resize)


def pending(number: int) -> TrialRecords:
    return TrialRecords(row(number), None, None, None)


def retrying(number: int) -> TrialRecords:
    """A trial whose task could not start."""
    return TrialRecords(row(number, "up_for_retry"), None, None, None)


def running(number: int, *gpus: int) -> TrialRecords:
    own = lease(gpus=gpus, run_id=f"run-{number}")
    return TrialRecords(row(number, "running"), own, None, segment(gpus=gpus))


def waiting(number: int) -> TrialRecords:
    own = lease(run_id=f"run-{number}")
    return TrialRecords(row(number), own, None, segment(running=False, ended_s=110.0))


def starting(number: int, *gpus: int) -> TrialRecords:
    return TrialRecords(row(number), lease(gpus=gpus, run_id=f"run-{number}"), None, None)


def resizing(number: int, slots: int, *gpus: int) -> TrialRecords:
    """A trial whose task has kept its slots after a segment on these GPUs."""
    own = lease(gpus=gpus, run_id=f"run-{number}")
    ended = segment(running=False, ended_s=110.0, gpus=gpus, resizing=True)
    return TrialRecords(row(number, "running", pool_slots=slots), own, flag(resize=True), ended)


def sweep_file(budget: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "budget": {"max_epochs": 20, **(budget or {})},
        "name": "digits",
        "objective": {"metric": "val_loss", "direction": "minimize"},
        "search": {
            "algorithm": "random",
            "seed": 7,
            "max_trials": 8,
            "space": {"rate": {"type": "loguniform", "low": 0.001, "high": 0.1}},
        },
        "trial": {"command": ["python", "train.py", "--rate", "{rate}"], "directory": "/"},
        **changes,
    }


def sweep_record(**changes: Any) -> dict[str, Any]:
    return encode(SweepRecord(sweep_file(**changes), 8, "trial", "parent", "7", "digits"))


def run_row(**changes: Any) -> RunRow:
    return RunRow(1, "hermes_sweep", SWEEP, "plan", "running", 50.0, sweep_record(**changes))


def sweep_with(
    *trials: TrialRecords, close: CloseRecord | None = None, **changes: Any
) -> SweepState:
    spec = SweepSpec.from_run(run_row(**changes))
    assert spec is not None
    return SweepState(spec, trials, close)


class DictStore(dict[str, Any]):
    """A task's state store."""

    def set(self, key: str, value: Any, *, retention: Any = None) -> None:
        self[key] = value

    def delete(self, key: str) -> None:
        self.pop(key, None)


@dataclass
class FakeFeed:
    """The way to MLflow; keeps what it was told."""

    said: list[Any] = field(default_factory=list)

    def start(self) -> None:
        self.said.append("start")

    def pump_once(self, *, ended: bool = False) -> None:
        self.said.append("pump")

    def end_segment(self) -> None:
        self.said.append("end segment")

    def finish(self, ending: Any, record: SegmentRecord) -> None:
        self.said.append(ending)

    def close(self) -> None:
        self.said.append("close")


@dataclass
class Journal:
    """Airflow, its database and MLflow, as one list of what was asked of them, in order."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    mlflow_away: bool = False
    most_slots: int = 1_000  # that a task may grow to
    refusal: Exception | None = None
    opened: dict[int, dict[str, Any]] = field(default_factory=dict)
    unwritten: dict[int, dict[str, Any]] = field(default_factory=dict)  # of what was opened

    credentials = SimpleNamespace(url="http://airflow")

    # Airflow's REST interface

    def put_state(self, task: TaskKey, key: str, value: Mapping[str, Any]) -> None:
        self.calls.append(("put", task.map_index, key, dict(value)))

    def skip(self, tasks: Iterable[TaskKey]) -> None:
        self.calls.append(("skip", [t.map_index for t in tasks]))

    def mark(self, tasks: Iterable[TaskKey], state: str) -> None:
        self.calls.append(("mark", [t.map_index for t in tasks], state))

    def note(self, task: TaskKey, text: str) -> None:
        self.calls.append(("note", task.map_index, text))

    # Airflow's database

    def rerank(self, ranks: Iterable[TaskRank]) -> int:
        ranks = list(ranks)
        for rank in ranks:
            number = UUID(rank.id).int - 1
            self.calls.append(("rank", number, rank.priority_weight, rank.pool_slots))
        return len(ranks)

    def change_slots(self, row: TaskInstanceRow, slots: int) -> bool:
        self.calls.append(("slots", row.number, slots))
        return slots <= max(row.pool_slots, self.most_slots)

    # MLflow

    def _mlflow(self) -> None:
        if self.mlflow_away:
            raise Unavailable("MLflow did not answer")
        if self.refusal is not None:
            raise self.refusal

    def trials(self, ref: Any) -> Sequence[Any]:
        self._mlflow()
        return [
            SimpleNamespace(
                number=n,
                config=c,
                run_id=f"run-{n}",
                tags={},
                is_open=True,
                unwritten=self.unwritten.get(n, {}),
            )
            for n, c in self.opened.items()
        ]

    def open_trial(
        self,
        ref: Any,
        number: int,
        config: Any,
        tags: Any,
        *,
        unseen: bool = False,
        params: bool = True,
    ) -> str:
        self._mlflow()
        self.calls.append(("open", number, dict(config), unseen))
        if params:
            self.add_params(f"run-{number}", config)
        return f"run-{number}"

    def add_params(self, run_id: str, config: Mapping[str, Any]) -> None:
        self._mlflow()
        self.calls.append(("params", run_id, dict(config)))

    def reopen(self, run_id: str, drop: Sequence[str] = ()) -> None:
        self._mlflow()
        self.calls.append(("reopen", run_id))

    def set_aside(self, trial: Any, reason: str) -> None:
        self._mlflow()
        self.calls.append(("set aside", trial.run_id))

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._mlflow()
        self.calls.append(("tag", run_id, dict(tags)))

    def finish(self, run_id: str, state: str, tags: Mapping[str, str]) -> None:
        self._mlflow()
        self.calls.append(("finish", run_id, state))

    def record_decisions(self, parent: str, chunk: int, lines: Sequence[str]) -> None:
        self._mlflow()
        self.calls.append(("decisions", chunk, list(lines)))

    def applier(self, requests: int = 1) -> Applier:
        outside: Any = self
        log = DecisionLog(outside)
        return Applier(outside, outside, outside, log, "hermes", {}, requests=RequestPool(requests))

    def of(self, *kinds: str) -> list[tuple[Any, ...]]:
        """What was asked, by kind, without the tags of the sweep's run."""
        return [c for c in self.calls if c[0] in kinds]

    def forget(self) -> None:
        self.calls.clear()

"""Rows of Airflow's metadata tables, as the controller and the pages read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hermes_ops.airflow.identity import sweep_id

OCCUPYING = ("running", "queued", "deferred")
"""States in which a task holds slots; `deferred` in pools that say so, as ours do."""

ENDED_TASK_STATES = ("success", "failed", "skipped", "removed", "upstream_failed")
"""States of a task that has ended."""


def state_in_group(report: str | None) -> str:
    """Return Airflow's state of a sweep in a task group, by that of its report task."""
    if report not in ENDED_TASK_STATES:
        return "running"
    return report if report in ("success", "skipped") else "failed"


@dataclass(frozen=True, slots=True)
class RunRow:
    """A DAG run that holds a sweep.

    `triggered_by` is the Airflow user who triggered it, empty for a scheduled run; `dag_owners` is
    what the DAG names as its owners, with commas. `paused` is True as well if Airflow has no file
    of the DAG any more.
    """

    run_key: int
    dag_id: str
    run_id: str
    plan_task: str
    state: str
    started_s: float
    sweep: dict[str, Any]
    paused: bool = False
    triggered_by: str = ""
    dag_owners: str = ""
    most_tasks: int = 0  # of the run that Airflow runs at once, not counting deferred ones

    @property
    def sweep_id(self) -> str:
        """Return the sweep's id."""
        return sweep_id(self.dag_id, self.run_id, self.plan_task)


@dataclass(frozen=True, slots=True)
class PastRun:
    """A DAG run that holds a sweep, whether it has ended or not; `ended_s` is None until then.

    Of `past_sweeps` the record lacks the fields that lie in pieces, as they may be large.
    """

    run: RunRow
    ended_s: float | None


@dataclass(frozen=True, slots=True)
class TaskInstanceRow:
    """A trial's mapped task instance."""

    id: str
    run_key: int
    number: int
    state: str | None
    pool: str
    pool_slots: int
    priority_weight: int
    try_number: int
    note: str = ""
    queue: str = ""


@dataclass(frozen=True, slots=True)
class StoredKey:
    """Where one value of the task state store lies."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    key: str


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A pool: its slots, and those held by tasks that are not trials of the sweeps asked about."""

    slots: int
    foreign_slots: int


@dataclass(frozen=True, slots=True)
class TaskRank:
    """The rank of one task instance; without a queue it keeps its own."""

    id: str
    priority_weight: int
    pool_slots: int
    queue: str | None = None

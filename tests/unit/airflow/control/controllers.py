"""A controller on a database of given sweeps, without any other service."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from hermes_ops.airflow.control.cluster import AirflowCluster
from hermes_ops.airflow.control.controller import Controller
from hermes_ops.airflow.control.decisions import DecisionLog
from hermes_ops.airflow.control.feeds import CurveFeed
from hermes_ops.airflow.metadata_rows import PastRun, PoolRow, RunRow, TaskInstanceRow
from hermes_ops.errors import Unavailable
from tests.unit.airflow.builders import Journal


class Database:
    """Airflow's metadata with the sweeps that it is given, none of them expanded."""

    def __init__(self, *runs: RunRow) -> None:
        self.runs = runs
        self.asked = 0
        self.pool_row: PoolRow | None = PoolRow(2, 0)
        self.away = False

    def single_connection(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def sweeps(self) -> tuple[RunRow, ...]:
        if self.away:
            raise Unavailable("the database did not answer")
        self.asked += 1
        return self.runs

    def sweeps_since(self, since_s: float, most: int) -> tuple[PastRun, ...]:
        return tuple(PastRun(run, None) for run in self.runs)

    def sweep(self, sweep: str) -> PastRun | None:
        return next((PastRun(run, None) for run in self.runs if run.sweep_id == sweep), None)

    def segments(self, run: RunRow, task_id: str) -> tuple[str, ...]:
        return ()

    def trials(self, run: RunRow, task: str) -> tuple[TaskInstanceRow, ...]:
        return ()

    def records(self, run: RunRow) -> dict[tuple[str, int], dict[str, Any]]:
        return {}

    def pool(self, name: str, own: Any) -> PoolRow | None:
        return self.pool_row

    def rerank(self, ranks: Any) -> int:
        return 0


def controller_of(database: Any, file: Path) -> Controller:
    outside: Any = Journal()
    applier = outside.applier()
    applier.metadata = database
    cluster = AirflowCluster("gpus", database, CurveFeed(outside), applier, DecisionLog(outside))
    leadership: Any = None
    return Controller(cluster, leadership, file)

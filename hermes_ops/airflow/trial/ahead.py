"""A trial's process made ready while Airflow still starts its task.

Airflow reads the DAG file and asks for several things before it calls the operator. Meanwhile the
interpreter of the trial's process can start, for the lease that lies beside the trial's folder; it
touches nothing before the operator has found that lease on record and lets it begin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.identity import sweep_id
from hermes_ops.airflow.trial.beside import offered
from hermes_ops.airflow.trial.local import LocalSegment

_made: list[LocalSegment] = []  # of this process, which is one task's


def make(about: Mapping[str, Any]) -> None:
    """Make the process ready of the trial that a task is, if a lease for it lies on this machine.

    :param about: the task's `dag_id`, `run_id`, `task_id` and `map_index`; nothing is made where
        one of them is missing
    """
    number = about.get("map_index")
    names = [about.get(name) for name in ("dag_id", "run_id", "task_id")]
    if not isinstance(number, int) or number < 0 or None in names:
        return
    sweep = sweep_id(*map(str, names))
    folder = TrialFolder.of(sweep, number)
    lease = offered(folder)
    if lease is not None and lease.pool:
        segment = LocalSegment(lease, folder, sweep, number, lease.pool, print)
        segment.prepare()
        _made.append(segment)


def taken() -> LocalSegment | None:
    """What was made ready, once: whoever takes it has it run, or finishes it."""
    return _made.pop() if _made else None

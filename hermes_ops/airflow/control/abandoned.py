"""Sweeps that no trial's task will end: the DAG run was deleted, or their record is unreadable."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.control.pool import FINAL_STATES
from hermes_ops.airflow.metadata import OCCUPYING
from hermes_ops.airflow.records import (
    CLOSE_KEY,
    CLOSED_TAG,
    CloseRecord,
    SweepRecord,
    decode,
    encode,
)
from hermes_ops.errors import HermesError
from hermes_ops.tracking.runs import RUN_STATUS

if TYPE_CHECKING:
    from hermes_ops.airflow.client import AirflowClient
    from hermes_ops.airflow.control.books import Plan
    from hermes_ops.airflow.metadata import RunRow, TrialRow
    from hermes_ops.tracking import Tracker

log = logging.getLogger(__name__)


def settle_abandoned(plan: Plan, client: AirflowClient, tracker: Tracker) -> None:
    """End in MLflow, as cancelled, what a DAG run that runs no more has left open.

    Nothing is open where its report was written. A service that is away leaves it as it is.
    """
    run, ref = plan.run, plan.ref
    try:
        if tracker.sweep(ref).state in RUN_STATUS:
            return
        found = client.dag_run(run.dag_id, run.run_id)
        if found is not None and found["state"] not in ("success", "failed"):
            return  # it was cleared, and begins again
        what = "deleted" if found is None else f"ended as {found['state']}"
        reason = f"its DAG run was {what} in Airflow before its report was written"
        for trial in tracker.trials(ref):
            if trial.is_open:
                tracker.finish_trial(trial.run_id, "cancelled", {"hermes.reason": reason})
        tracker.finish_sweep(ref.parent_run_id, "cancelled", {CLOSED_TAG: reason})
    except HermesError as error:
        log.warning("What is open of the sweep %s stays so in MLflow: %s", run.sweep_id, error)


def end_unreadable(
    run: RunRow,
    close: CloseRecord,
    trials: Callable[[str], Iterable[TrialRow]],
    client: AirflowClient,
    tracker: Tracker,
) -> None:
    """End a sweep whose configuration this controller cannot read; may be repeated.

    `trials` returns the trials that a task of that id is.
    Trials that train go on to their end; the tasks of all others are skipped.
    """
    record = decode(SweepRecord, run.sweep)
    if record is None:
        return
    waiting = [
        TaskKey(run.dag_id, run.run_id, record.trial_task, row.number)
        for row in trials(record.trial_task)
        if row.state not in (*FINAL_STATES, *OCCUPYING)
    ]
    if not waiting:
        return
    log.error("The sweep %s ends: %s", run.sweep_id, close.reason)
    plan = TaskKey(run.dag_id, run.run_id, run.plan_task)
    client.put_state(plan, CLOSE_KEY, encode(close))
    try:
        tracker.finish_sweep(record.parent_run_id, "failed", {CLOSED_TAG: close.reason})
    except HermesError as error:
        log.warning("MLflow has no word of the end of %s: %s", run.sweep_id, error)
    client.skip(waiting)

"""A sweep whose DAG run a person has deleted, or marked as ended: its runs in MLflow end too."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hermes_ops.airflow.records import CLOSED_TAG
from hermes_ops.errors import HermesError
from hermes_ops.tracking.runs import RUN_STATUS

if TYPE_CHECKING:
    from hermes_ops.airflow.client import AirflowClient
    from hermes_ops.airflow.control.books import Plan
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

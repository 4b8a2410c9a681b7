"""The DAG that cleans up the disks of a pool's machines: one task on each, by its queue.

The last task of a sweep and the controller see only their own state folder. On each machine this
DAG deletes the checkpoints of ended trials that cannot be continued, and those of the others once
their retention is over. It reads from MLflow what has ended, and how.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, BaseOperator

from hermes_ops.airflow.control.cleanup.janitor import KEEP_FILE, free_ended, free_expired
from hermes_ops.airflow.folders import home, sweep_folder
from hermes_ops.airflow.machines import SWEEP_NOTE, MachineSlots, queue_of
from hermes_ops.airflow.trial.metrics import tracking_uri
from hermes_ops.config import parse
from hermes_ops.errors import HermesError, Refused, Unavailable
from hermes_ops.tracking import Tracker
from hermes_ops.tracking.artifacts import fetch_sweep_file
from hermes_ops.tracking.runs import RUN_STATUS
from hermes_ops.tracking.tracker import require_sweep

log = logging.getLogger(__name__)


class MachineCleanupOperator(BaseOperator):
    """Cleans up the state folder of the machine whose worker runs it."""

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - Airflow's own
        """Return the sweeps of which something was deleted."""
        freed = clean_up(Tracker(tracking_uri()), time.time())
        self.log.info("Cleaned up: %s", ", ".join(freed) or "nothing")
        return {"sweeps": freed}


def clean_up(tracker: Tracker, now_s: float) -> list[str]:
    """Free the disk of ended sweeps in this state folder; return those of which something went.

    Unavailable while MLflow is away; a sweep that MLflow does not know is left as it is.
    """
    running: list[str] = []
    freed: list[str] = []
    for sweep in noted_sweeps():
        try:
            has_ended = _free_if_ended(tracker, sweep, now_s, freed)
        except Unavailable:
            raise
        except HermesError as error:
            log.warning("The checkpoints of %s stay: %s", sweep, error)
            has_ended = isinstance(error, Refused)
        if not has_ended:
            running.append(sweep)
    expired = free_expired(running.__contains__, now_s)
    return sorted({*freed, *(folder.name for folder in expired)})


def noted_sweeps() -> Iterator[str]:
    """Yield the sweeps whose trials have trained on this machine."""
    for note in sorted((home() / "sweeps").glob(f"*/{SWEEP_NOTE}")):
        try:
            yield str(json.loads(note.read_text())["sweep"])
        except (OSError, ValueError, KeyError, TypeError):
            log.warning("%s cannot be read: its folder stays as it is", note)


def _free_if_ended(tracker: Tracker, sweep: str, now_s: float, freed: list[str]) -> bool:
    """Free what an ended sweep does not need; return whether it has ended."""
    ref = require_sweep(tracker, sweep)
    folder = sweep_folder(sweep)
    if tracker.sweep(ref).state not in RUN_STATUS:
        with contextlib.suppress(OSError):
            (folder / KEEP_FILE).unlink(missing_ok=True)  # it goes on: its end sets a new time
        return False
    if (folder / KEEP_FILE).exists() or not any(folder.glob("trials/*/checkpoints")):
        return True
    document = fetch_sweep_file(tracker.artifacts, ref.parent_run_id, sweep)
    rules = parse(document, sweep, None).checkpoints
    states = {t.number: t.state for t in tracker.trials(ref) if t.state in RUN_STATUS}
    free_ended(sweep, states, rules.keep_seconds, now_s)  # the store is the last task's affair
    freed.append(sweep)
    return True


def machine_cleanup_dag(
    dag_id: str = "hermes_machine_cleanup",
    *,
    schedule: Any = "@hourly",  # noqa: ANN401 - whatever Airflow takes
    **dag_arguments: Any,  # noqa: ANN401 - Airflow's own
) -> DAG:
    """Return a DAG with a task for each machine of HERMES_MACHINES, which its own worker runs."""
    ours = {"doc_md": __doc__, "catchup": False, "max_active_runs": 1, "tags": ["hermes"]}
    with DAG(dag_id, schedule=schedule, **{**ours, **dag_arguments}) as dag:
        for name in MachineSlots.from_environment().names:
            MachineCleanupOperator(
                task_id=f"clean_{name}",
                queue=queue_of(name),
                retries=2,
                retry_delay=timedelta(minutes=5),
            )
    return dag

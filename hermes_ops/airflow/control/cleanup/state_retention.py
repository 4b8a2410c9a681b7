"""Retention of the records and XComs that sweeps need: Airflow's own clean-up goes by their age.

Records in the state store have no date of expiry. Those of an earlier version have one, and
whoever edits a value in Airflow may give it one: they lose it, but for what a task may be writing
at this moment. The plan's XComs of a sweep that runs are dated anew each day.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.clock_steps import is_due
from hermes_ops.airflow.metadata_rows import ENDED_TASK_STATES
from hermes_ops.airflow.records import HELD_POOL_SLOTS
from hermes_ops.airflow.sweep.ended_sweep import restore_plan_values
from hermes_ops.errors import HermesError, Unavailable

if TYPE_CHECKING:
    from hermes_ops.airflow.client import AirflowClient
    from hermes_ops.airflow.control.sweep_state import SweepState
    from hermes_ops.airflow.metadata import Metadata
    from hermes_ops.airflow.metadata_rows import StoredKey

log = logging.getLogger(__name__)

PERIOD_S = 3_600.0
SOON_S = 20.0
"""How soon the next look is where one has not done everything."""

MOST_AT_ONCE = 200

DAY_S = 86_400.0
RETRYING = "up_for_retry"
"""State of a trial whose task could not start; without the plan's XComs none can."""


@dataclass(slots=True)
class StateRetention:
    """Looks for dated records in the background, once an hour."""

    metadata: Metadata
    client: AirflowClient
    _due_s: float = 0.0
    _thread: threading.Thread | None = None

    def run_if_due(self, now_s: float) -> None:
        """Renew what expires soon, if it is time: in the background, after one indexed query."""
        if self._thread is not None and self._thread.is_alive():
            return
        if not is_due(now_s, self._due_s, PERIOD_S):
            return
        keys = self.metadata.expiring(ENDED_TASK_STATES, HELD_POOL_SLOTS, MOST_AT_ONCE)
        self._due_s = now_s + (SOON_S if len(keys) == MOST_AT_ONCE else PERIOD_S)
        if keys:
            self._thread = threading.Thread(target=self.renew, args=(keys,), daemon=True)
            self._thread.start()

    def renew(self, keys: tuple[StoredKey, ...]) -> None:
        """Store these records again without a date; what cannot be is tried another time."""
        kept = 0
        for place in keys:
            task = TaskKey(place.dag_id, place.run_id, place.task_id, place.map_index)
            try:
                self.client.keep_state(task, place.key)
            except Unavailable as error:
                log.warning("Records are not renewed, which is tried again: %s", error)
                break
            except HermesError as error:
                log.warning("%s of %s is not renewed: %s", place.key, place.run_id, error)
            else:
                kept += 1
        log.info("%s records of sweeps had a date of expiry; they have none now", kept)


@dataclass(slots=True)
class PlanValueRetention:
    """Dates the plans' XComs of running sweeps anew, and restores those that are missing."""

    client: AirflowClient
    _due_s: dict[str, float] = field(default_factory=dict)
    _thread: threading.Thread | None = None

    def run_if_due(self, sweeps: Iterable[SweepState], now_s: float) -> None:
        """Look after one sweep that is due, in the background.

        That is each day, and soon where a trial's task has failed to start.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        sweeps = tuple(sweeps)
        due_s = {sweep.id: self._due(sweep, now_s) for sweep in sweeps}
        self._due_s = due_s
        due = [sweep for sweep in sweeps if due_s[sweep.id] <= now_s]
        if due:
            self._due_s[due[0].id] = now_s + DAY_S
            self._thread = threading.Thread(target=partial(self.renew, due[0]), daemon=True)
            self._thread.start()

    def _due(self, sweep: SweepState, now_s: float) -> float:
        due_s = self._due_s.get(sweep.id, sweep.spec.record.planned_s + DAY_S)
        if any(trial.row.state == RETRYING for trial in sweep.trials):
            last_s = due_s - DAY_S
            return min(due_s, max(now_s, last_s + SOON_S))
        return due_s

    def renew(self, sweep: SweepState) -> None:
        """Do it for one sweep; what cannot be done is tried again when it is due next."""
        run = sweep.spec.run
        plan = TaskKey(run.dag_id, run.run_id, run.plan_task)
        try:
            missing = restore_plan_values(self.client, plan, sweep.spec.record, sweep.id)
        except HermesError as error:
            log.warning("The XComs of %s's plan are not renewed: %s", sweep.id, error)
            return
        if missing:
            log.warning(
                "XComs of %s's plan (%s) had been deleted, by `airflow db clean` for instance: "
                "they are restored.", sweep.id, ", ".join(missing),
            )  # fmt: skip

"""What a person asks of a trial in Airflow: to go on after its end, or to begin from scratch.

Clearing a task gives its instance a new id and the operator's own pool slots; so a trial that has
ended, whose task waits so, was cleared. It goes on from its checkpoint, with its failures forgiven.
A note that begins with `from scratch` on the task, written while clearing it or at any other time,
has the trial begin anew with the same configuration: an MLflow run of its own, an empty folder.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.control.pool import READY_STATES, Trial
from hermes_ops.airflow.identity import sweep_id
from hermes_ops.airflow.records import (
    HELD_POOL_SLOTS,
    LEASE_KEY,
    SEGMENT_KEY,
    SWEEP_KEY,
    Lease,
    Segment,
    SweepRecord,
    decode,
    encode,
)
from hermes_ops.airflow.sweep.continuing import OF_AN_END, report_of
from hermes_ops.errors import HermesError
from hermes_ops.tracking import SweepRef

if TYPE_CHECKING:
    from hermes_ops.airflow.client import AirflowClient
    from hermes_ops.tracking import Tracker

FROM_SCRATCH = "from scratch"
"""How a task's note begins that has its trial begin anew; in whatever case."""


class Wish(Enum):
    """What is to be done with a trial because of what a person did to its task."""

    NOTHING = auto()
    STOP = auto()  # its segment, before it can begin anew
    BEGIN_ANEW = auto()
    GO_ON = auto()
    STAY_ENDED = auto()  # its task gets back the state that it had


def clear_trial(client: AirflowClient, plan: TaskKey, number: int, *, from_scratch: bool) -> None:
    """Clear a trial of that plan and the report, as a person does; HermesError if not begun."""
    sweep = sweep_id(plan.dag_id, plan.run_id, plan.task_id)
    record = decode(SweepRecord, client.get_state(plan, SWEEP_KEY))
    if record is None:
        raise HermesError(f"the sweep {sweep!r} has no trials: it was not planned.")
    task = replace(plan, task_id=record.trial_task, map_index=number)
    if decode(Lease, client.get_state(task, LEASE_KEY)) is None:
        raise HermesError(
            f"trial {number} of {sweep!r} has not begun: there is nothing to clear. "
            f"`hermes sweep watch {sweep}` shows those that have."
        )
    tasks: list[str | tuple[str, int]] = [(record.trial_task, number), report_of(plan)]
    client.clear(plan.dag_id, plan.run_id, tasks, FROM_SCRATCH if from_scratch else None)


def wish_of(trial: Trial, *, closing: bool) -> Wish:
    """What a person asks of the trial; no trial of a sweep that is closing goes on."""
    if trial.lease is None and not is_cleared(trial):
        return Wish.NOTHING
    if trial.lease is not None and asks_anew(trial.row.note) and not closing:
        return _on_the_way_to_anew(trial)
    if not is_cleared(trial):
        return Wish.NOTHING
    finished = trial.segment is not None and trial.segment.outcome == "finished"
    return Wish.STAY_ENDED if closing or finished else Wish.GO_ON


def is_cleared(trial: Trial) -> bool:
    """True for a trial that has ended and whose task a person has cleared since."""
    segment = trial.segment
    if segment is None or segment.final is None or not trial.idle:
        return False
    return trial.row.pool_slots >= HELD_POOL_SLOTS and segment.task != trial.row.id


def asks_anew(note: str) -> bool:
    """True for a note that has the trial begin from scratch."""
    return note.strip().casefold().startswith(FROM_SCRATCH)


def _on_the_way_to_anew(trial: Trial) -> Wish:
    if trial.under_way:
        return Wish.NOTHING if trial.told else Wish.STOP
    return Wish.BEGIN_ANEW if trial.row.state in READY_STATES else Wish.NOTHING


@dataclass(slots=True)
class Clearing:
    """Has one trial go on or begin anew; each step may be repeated.

    MLflow comes first: where it is away, all is done another time. Raises HermesError.
    """

    client: AirflowClient
    tracker: Tracker
    task: TaskKey
    sweep: SweepRef

    def go_on(self, trial: Trial) -> Trial:
        """Let a trial that has ended go on; the trial as it is then."""
        if trial.segment is None:
            return trial
        for run in self.tracker.trials(self.sweep):
            if run.number == trial.number:
                self.tracker.reopen(run.run_id, [t for t in OF_AN_END if t in run.tags])
        again = replace(trial.segment, running=False, final=None, failures=0, task="")
        self.client.put_state(self.task, SEGMENT_KEY, encode(again))
        return replace(trial, segment=again)

    def begin_anew(self, trial: Trial, tags: Mapping[str, str], now_s: float) -> Trial:
        """Let a trial begin from scratch, whatever its state; the trial as it is then."""
        if trial.lease is None:
            return trial
        lease = self._fresh(trial.lease, tags)
        segment = Segment(lease.epoch, running=False, started_s=now_s, segments=0, ended_s=now_s)
        self.client.put_state(self.task, LEASE_KEY, encode(lease))
        self.client.put_state(self.task, SEGMENT_KEY, encode(segment))
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
        self.client.note(self.task, f"Began {FROM_SCRATCH} at {when}")
        row = replace(trial.row, note="", pool_slots=HELD_POOL_SLOTS)
        return replace(trial, row=row, lease=lease, segment=segment)

    def _fresh(self, lease: Lease, tags: Mapping[str, str]) -> Lease:
        """The lease, used up, with a new run in MLflow."""
        for run in self.tracker.trials(self.sweep):
            if run.run_id == lease.run_id:
                self.tracker.set_aside(run, "the trial has begun anew from scratch")
        number = self.task.map_index
        run_id = self.tracker.open_trial(self.sweep, number, lease.config, tags)
        return replace(lease, run_id=run_id, revoked=True, anew=lease.epoch + 1)

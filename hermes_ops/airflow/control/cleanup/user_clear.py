"""Requests that a person makes in Airflow: continue a trial that has ended, or restart it.

Clearing a task gives its instance a new id and the operator's own pool slots; so a trial that has
ended, whose task waits so, was cleared. It continues from its checkpoint, and its failures no
longer count.
A note that begins with `from scratch` on the task, written while clearing it or at any other time,
restarts the trial with the same configuration, in a new MLflow run and an empty folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.control.trial_state import READY_STATES, TrialRecords, TrialState
from hermes_ops.airflow.identity import sweep_id
from hermes_ops.airflow.records import (
    CLOSE_KEY,
    HELD_POOL_SLOTS,
    LEASE_KEY,
    SEGMENT_KEY,
    SWEEP_KEY,
    CloseRecord,
    Lease,
    SegmentRecord,
    SweepRecord,
    decode,
    encode,
)
from hermes_ops.airflow.sweep.ended_sweep import TRIAL_END_TAGS, report_of
from hermes_ops.core.amounts import utc_text
from hermes_ops.errors import HermesError
from hermes_ops.tracking import SweepRef

if TYPE_CHECKING:
    from hermes_ops.airflow.client import AirflowClient
    from hermes_ops.tracking import Tracker

FROM_SCRATCH = "from scratch"
"""The start of a task's note that restarts its trial; upper and lower case are the same."""


class ClearRequest(Enum):
    """The action that a person requests by clearing a trial's task or by its note."""

    NOTHING = auto()
    STOP = auto()  # its segment, before it can restart
    RESTART = auto()
    CONTINUE = auto()
    STAY_ENDED = auto()  # its task gets back the state that it had


def clear_trial(client: AirflowClient, plan: TaskKey, number: int, *, from_scratch: bool) -> None:
    """Clear a trial of that plan and the report, as a person does.

    Raises HermesError if the trial has not begun, or would be what it is again: one that has
    finished, or one of a sweep that was closed.
    """
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
    close = decode(CloseRecord, client.get_state(plan, CLOSE_KEY))
    if close is not None:
        raise HermesError(
            f"the sweep {sweep!r} was ended ({close.reason}), so a single trial of it cannot be "
            f"continued: `hermes sweep resume {sweep}` resumes the sweep; with --failed also its "
            "failed trials."
        )
    segment = decode(SegmentRecord, client.get_state(task, SEGMENT_KEY))
    if segment is not None and segment.outcome == "finished" and not from_scratch:
        raise HermesError(
            f"trial {number} of {sweep!r} has finished: there is nothing to continue. "
            "--from-scratch restarts it."
        )
    tasks: list[str | tuple[str, int]] = [(record.trial_task, number), report_of(plan)]
    client.clear(plan.dag_id, plan.run_id, tasks, FROM_SCRATCH if from_scratch else None)


def clear_request(trial: TrialRecords, *, closing: bool) -> ClearRequest:
    """Return what a person asks of the trial; in a sweep that is closing none continues.

    There a task is left alone until Airflow has scheduled it: the sweep's plan may have been
    cleared with it, and then removes the sweep's end first.
    """
    if trial.lease is None and trial.state is not TrialState.CLEARED:
        return ClearRequest.NOTHING
    if trial.lease is not None and asks_from_scratch(trial.row.note) and not closing:
        return _request_to_restart(trial)
    if trial.state is not TrialState.CLEARED or (closing and trial.row.state is None):
        return ClearRequest.NOTHING
    finished = trial.segment is not None and trial.segment.outcome == "finished"
    return ClearRequest.STAY_ENDED if closing or finished else ClearRequest.CONTINUE


def asks_from_scratch(note: str) -> bool:
    """Return whether a note has the trial begin from scratch."""
    return note.strip().casefold().startswith(FROM_SCRATCH)


def _request_to_restart(trial: TrialRecords) -> ClearRequest:
    if trial.is_under_way:
        return ClearRequest.NOTHING if trial.is_told_to_stop else ClearRequest.STOP
    return ClearRequest.RESTART if trial.row.state in READY_STATES else ClearRequest.NOTHING


@dataclass(slots=True)
class UserClear:
    """Writes what continues or restarts one trial; each step may be repeated.

    MLflow comes first: where it is away, all is done another time. Raises HermesError.
    """

    client: AirflowClient
    tracker: Tracker
    task: TaskKey
    sweep: SweepRef

    def continue_trial(self, trial: TrialRecords) -> TrialRecords:
        """Let a trial that has ended continue; return it as it is then."""
        if trial.segment is None:
            return trial
        for run in self.tracker.trials(self.sweep):
            if run.number == trial.number:
                self.tracker.reopen(run.run_id, [t for t in TRIAL_END_TAGS if t in run.tags])
        again = replace(trial.segment.continued(), task="")
        self.client.put_state(self.task, SEGMENT_KEY, encode(again))
        return replace(trial, segment=again)

    def restart_from_scratch(
        self, trial: TrialRecords, tags: Mapping[str, str], now_s: float
    ) -> TrialRecords:
        """Restart a trial from scratch, whatever its state; return it as it is then."""
        if trial.lease is None:
            return trial
        lease = self._fresh(trial.lease, tags)
        before = trial.segment or SegmentRecord(lease.epoch, running=False, started_s=now_s)
        segment = SegmentRecord(
            lease.epoch,
            running=False,
            started_s=now_s,
            segments=0,
            ended_s=now_s,
            earlier_spans=before.earlier_spans + before.held_spans,
            earlier_sizes=before.earlier_sizes + before.sizes,
            earlier_gpu_s=before.earlier_gpu_s + before.service_gpu_s,
        )
        self.client.put_state(self.task, LEASE_KEY, encode(lease))
        self.client.put_state(self.task, SEGMENT_KEY, encode(segment))
        when = utc_text(now_s)
        self.client.note(self.task, f"Began {FROM_SCRATCH} at {when}")
        row = replace(trial.row, note="", pool_slots=HELD_POOL_SLOTS)
        return replace(trial, row=row, lease=lease, segment=segment)

    def _fresh(self, lease: Lease, tags: Mapping[str, str]) -> Lease:
        """Return the lease, used up, with a new run in MLflow."""
        for run in self.tracker.trials(self.sweep):
            if run.run_id == lease.run_id:
                self.tracker.set_aside(run, "the trial has begun anew from scratch")
        number = self.task.map_index
        run_id = self.tracker.open_trial(self.sweep, number, lease.config, tags)
        return replace(lease, run_id=run_id, revoked=True, anew=lease.epoch + 1)

"""The state of a trial: one enum, classified from the records that the controller reads.

A trial's records are its row in Airflow (the task instance), its lease, its stop flag, its segment
record and, for a pod that no process watches, the outcome in its folder. `classify` maps every
combination of them to exactly one state. `STATES` says what each state means and which phase a
policy sees. `MOVES` says what leads from one state to the next; the diagram in
docs/architecture.md is drawn from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from hermes_ops.airflow.hosts import WRONG_HOST
from hermes_ops.airflow.metadata_rows import ENDED_TASK_STATES, OCCUPYING, TaskInstanceRow
from hermes_ops.airflow.records import (
    HELD_POOL_SLOTS,
    LEASE_KEY,
    OUTCOMES,
    SEGMENT_KEY,
    STOP_KEY,
    TASK_STATES,
    Lease,
    SegmentRecord,
    StopFlag,
    decode,
    is_active,
)
from hermes_ops.airflow.trial.segment_run import PAUSED
from hermes_ops.core.model import Phase
from hermes_ops.trial.failure import Cause

READY_STATES = ("scheduled",)
"""States of a task instance that Airflow's scheduler may start."""

LIVE_STATES = ("running", "deferred")
"""States of a task instance whose segment a process or the triggerer watches."""


class TrialState(Enum):
    """The state of a trial; the table `STATES` explains each member."""

    PENDING = "pending"
    GRANTED = "granted"
    RUNNING = "running"
    STOPPING = "stopping"
    RELEASED = "released"
    UNATTENDED = "unattended"
    PREEMPTED = "preempted"
    CONCLUDING = "concluding"
    RESIZING = "resizing"
    LEAVING = "leaving"
    WAITING = "waiting"
    REVOKED_RUNNING = "revoked_running"
    REVOKED_STOPPING = "revoked_stopping"
    REVOKED_PREEMPTED = "revoked_preempted"
    ENDING = "ending"
    UNMARKED = "unmarked"
    UNREPORTED = "unreported"
    CLEARED = "cleared"
    ENDED = "ended"
    SEGMENT_WITHOUT_LEASE = "segment_without_lease"
    SEGMENT_AHEAD = "segment_ahead"
    SEGMENT_AHEAD_LEAVING = "segment_ahead_leaving"


S = TrialState


@dataclass(frozen=True, slots=True)
class StateInfo:
    """The phase that a policy sees, and what the records say in that state."""

    phase: Phase
    meaning: str


STATES: Mapping[TrialState, StateInfo] = MappingProxyType({
    S.PENDING: StateInfo(Phase.PENDING, "It has no lease yet."),
    S.GRANTED: StateInfo(Phase.STARTING, "Its lease is in force; no segment of it has begun."),
    S.RUNNING: StateInfo(Phase.RUNNING, "A live task runs the segment of its lease."),
    S.STOPPING: StateInfo(Phase.STOPPING, "The running segment has its stop flag."),
    S.RELEASED: StateInfo(
        Phase.STOPPING, "Its pod has reported the preemption and is being removed."
    ),
    S.UNATTENDED: StateInfo(
        Phase.STARTING, "Its segment is on record as running, but its task waits for a slot."
    ),
    S.PREEMPTED: StateInfo(
        Phase.STOPPING, "Its pod was preempted, its task waits; the segment is to be closed."
    ),
    S.CONCLUDING: StateInfo(
        Phase.STOPPING, "Its pod has ended; its task waits for a slot to record how."
    ),
    S.RESIZING: StateInfo(
        Phase.WAITING, "Its segment has ended for another size; its task keeps its slots."
    ),
    S.LEAVING: StateInfo(
        Phase.STOPPING, "Its lease is used up or revoked; its task has not come back to wait."
    ),
    S.WAITING: StateInfo(Phase.WAITING, "Its lease is used up or revoked; its task waits."),
    S.REVOKED_RUNNING: StateInfo(
        Phase.STOPPING, "Its segment began while its lease was being revoked."
    ),
    S.REVOKED_STOPPING: StateInfo(
        Phase.STOPPING, "The running segment of a revoked lease has its stop flag."
    ),
    S.REVOKED_PREEMPTED: StateInfo(
        Phase.WAITING, "As `preempted`, under a lease that has been revoked since."
    ),
    S.ENDING: StateInfo(Phase.ENDED, "Its final state is on record; its task is about to end."),
    S.UNMARKED: StateInfo(
        Phase.ENDED, "The controller has ended it; its waiting task is to be marked."
    ),
    S.UNREPORTED: StateInfo(Phase.ENDED, "Its task has ended without recording a final state."),
    S.CLEARED: StateInfo(Phase.ENDED, "It had ended, and a person has cleared its task since."),
    S.ENDED: StateInfo(Phase.ENDED, "It and its task have ended."),
    S.SEGMENT_WITHOUT_LEASE: StateInfo(
        Phase.PENDING, "Impossible: a segment is running and no lease is on record."
    ),
    S.SEGMENT_AHEAD: StateInfo(
        Phase.WAITING, "Impossible: the segment is of a later lease than the one on record."
    ),
    S.SEGMENT_AHEAD_LEAVING: StateInfo(
        Phase.STOPPING, "Impossible, as `segment_ahead`; its task does not wait for a slot."
    ),
})  # fmt: skip

IMPOSSIBLE = frozenset({S.SEGMENT_WITHOUT_LEASE, S.SEGMENT_AHEAD, S.SEGMENT_AHEAD_LEAVING})
"""States that no writer of Hermes Ops leads to: a record was deleted or restored by hand.

The controller treats such a trial as one without a lease, or with one that is used up.
"""

UNDER_WAY = frozenset({
    S.RUNNING, S.STOPPING, S.RELEASED, S.RESIZING, S.REVOKED_RUNNING, S.REVOKED_STOPPING,
})  # fmt: skip
"""States of a trial that has not ended in which its task is made to leave by a stop flag."""

UNCLOSED = frozenset({S.PREEMPTED, S.REVOKED_PREEMPTED})
"""States in which the controller closes the segment."""


@dataclass(frozen=True, slots=True)
class Move:
    """A transition from one state to another, and who makes it."""

    source: TrialState
    target: TrialState
    actor: str
    event: str


CONTROLLER, TASK, PERSON, AIRFLOW = "controller", "task", "person", "Airflow"

MOVES: tuple[Move, ...] = (
    Move(S.PENDING, S.GRANTED, CONTROLLER, "grants the first lease"),
    Move(S.PENDING, S.UNMARKED, CONTROLLER, "gives it up, as it cannot be started"),
    Move(S.PENDING, S.ENDED, CONTROLLER, "skips its task, as the sweep ends"),
    Move(S.GRANTED, S.RUNNING, TASK, "starts the segment"),
    Move(S.GRANTED, S.WAITING, CONTROLLER, "revokes the lease"),
    Move(S.GRANTED, S.LEAVING, CONTROLLER, "withdraws the resize, then revokes the lease"),
    Move(S.GRANTED, S.REVOKED_RUNNING, TASK, "starts the segment while the lease is revoked"),
    Move(S.REVOKED_RUNNING, S.REVOKED_STOPPING, CONTROLLER, "writes the stop flag"),
    Move(S.REVOKED_STOPPING, S.LEAVING, TASK, "closes the segment"),
    Move(S.RUNNING, S.STOPPING, CONTROLLER, "writes the stop flag"),
    Move(S.RUNNING, S.LEAVING, TASK, "closes the segment, as it is to be tried again"),
    Move(S.RUNNING, S.ENDING, TASK, "records the final state"),
    Move(S.RUNNING, S.UNATTENDED, AIRFLOW, "loses the task, or schedules it as its pod ended"),
    Move(S.STOPPING, S.LEAVING, TASK, "closes the segment"),
    Move(S.STOPPING, S.RESIZING, TASK, "closes the segment, and keeps its slots"),
    Move(S.RESIZING, S.GRANTED, CONTROLLER, "changes its slots, then grants the next lease"),
    Move(S.RESIZING, S.LEAVING, CONTROLLER, "withdraws the resize, or its task waited too long"),
    Move(S.RESIZING, S.ENDING, TASK, "records the final state"),
    Move(S.RESIZING, S.WAITING, AIRFLOW, "loses the task"),
    Move(S.STOPPING, S.ENDING, TASK, "records the final state"),
    Move(S.STOPPING, S.RELEASED, TASK, "its pod writes the result preempted"),
    Move(S.STOPPING, S.UNATTENDED, AIRFLOW, "loses the task"),
    Move(S.RELEASED, S.PREEMPTED, AIRFLOW, "schedules the task, as its pod is gone"),
    Move(S.PREEMPTED, S.WAITING, CONTROLLER, "closes the segment"),
    Move(S.UNATTENDED, S.RUNNING, AIRFLOW, "starts the task again"),
    Move(S.UNATTENDED, S.PREEMPTED, TASK, "its pod has written the result preempted"),
    Move(S.UNATTENDED, S.CONCLUDING, TASK, "its pod has written another result"),
    Move(S.UNATTENDED, S.WAITING, CONTROLLER, "revokes the lease"),
    Move(S.CONCLUDING, S.ENDING, TASK, "records the final state"),
    Move(S.CONCLUDING, S.LEAVING, TASK, "closes the segment, as it is to be tried again"),
    Move(S.LEAVING, S.WAITING, AIRFLOW, "schedules the task"),
    Move(S.LEAVING, S.UNMARKED, CONTROLLER, "ends it, as the sweep ends"),
    Move(S.WAITING, S.GRANTED, CONTROLLER, "grants the next lease"),
    Move(S.WAITING, S.UNMARKED, CONTROLLER, "ends it, as the sweep ends, or it cannot be started"),
    Move(S.REVOKED_PREEMPTED, S.WAITING, CONTROLLER, "closes the segment"),
    Move(S.UNMARKED, S.ENDED, CONTROLLER, "marks its task"),
    Move(S.ENDING, S.ENDED, AIRFLOW, "ends the task"),
    Move(S.UNREPORTED, S.ENDED, CONTROLLER, "records the final state that its task shows"),
    Move(S.GRANTED, S.UNREPORTED, PERSON, "marks its task, or Airflow's tries are used up"),
    Move(S.RUNNING, S.UNREPORTED, PERSON, "marks its task, or Airflow's tries are used up"),
    Move(S.ENDED, S.CLEARED, PERSON, "clears its task"),
    Move(S.CLEARED, S.WAITING, CONTROLLER, "lets it continue from its checkpoint"),
    Move(S.CLEARED, S.ENDED, CONTROLLER, "marks its task, as it has finished, or the sweep ends"),
)
"""The moves that matter; a kill of any process repeats one or leads on from the state it left."""


@dataclass(frozen=True, slots=True)
class TrialRecords:
    """All that is known of one trial.

    `left` is the outcome of its lease's segment where that has ended and the task, which waits for
    a slot or for the pod to be gone, has not recorded it yet.
    """

    row: TaskInstanceRow
    lease: Lease | None
    stop: StopFlag | None
    segment: SegmentRecord | None
    left: str = ""
    state: TrialState = field(init=False, compare=False, default=TrialState.PENDING)
    """The state that `classify` returns of these records."""
    phase: Phase = field(init=False, compare=False, default=Phase.PENDING)
    """The trial's phase for a policy."""

    def __post_init__(self) -> None:
        state = classify(self)  # both are read many times in each round
        object.__setattr__(self, "state", state)
        object.__setattr__(self, "phase", STATES[state].phase)

    @classmethod
    def from_stored(cls, row: TaskInstanceRow, records: Mapping[str, Any]) -> TrialRecords:
        """Return the records of a task instance, decoded from Airflow's state store."""
        return cls(
            row,
            decode(Lease, records.get(LEASE_KEY)),
            decode(StopFlag, records.get(STOP_KEY)),
            decode(SegmentRecord, records.get(SEGMENT_KEY)),
        )

    @property
    def number(self) -> int:
        """Return the trial's number in its sweep."""
        return self.row.number

    @property
    def final(self) -> str | None:
        """Return the final state on record; None while there is none."""
        return self.segment.final if self.segment is not None else None

    @property
    def has_ended(self) -> bool:
        """Return whether its task instance is in a final state, or a final state is on record."""
        return self.phase is Phase.ENDED

    @property
    def has_failed(self) -> bool:
        """Return whether the trial has ended as failed, whether or not Airflow knows it yet."""
        return self.row.state == "failed" or self.final == "failed"

    @property
    def has_diverged(self) -> bool:
        """Return whether it has failed because its objective became NaN or infinite."""
        cause = self.segment.cause if self.segment is not None else ""
        return self.has_failed and cause == Cause.DIVERGED.value

    @property
    def was_given_up(self) -> bool:
        """Return whether the trial has failed without ever having begun."""
        return self.final == "failed" and self.segment is not None and self.segment.segments == 0

    @property
    def end_state(self) -> str:
        """Return the final state of a trial that has ended: on record, or that its task shows."""
        return self.final or OUTCOMES.get(self.row.state or "", "failed")

    @property
    def task_state(self) -> str:
        """Return the state that the task of a trial which has ended is to have in Airflow."""
        return TASK_STATES.get(self.final or "", "skipped")

    @property
    def is_idle(self) -> bool:
        """Return whether its task is neither in a final state nor holds slots."""
        return is_idle(self.row)

    @property
    def has_lease_in_force(self) -> bool:
        """Return whether its lease is neither revoked nor used up."""
        return is_active(self.lease, self.segment)

    @property
    def is_under_way(self) -> bool:
        """Return whether a segment of its lease, revoked or not, runs in a live task."""
        return has_open_segment(self) and self.row.state in LIVE_STATES

    @property
    def is_resizing(self) -> bool:
        """Return whether its task runs without a segment, and waits in its slots for a lease."""
        segment, stop = self.segment, self.stop
        if segment is None or stop is None or self.row.state != "running":
            return False
        is_wanted = stop.resize and stop.epoch == segment.epoch
        return is_wanted and segment.resizing and not segment.running

    @property
    def is_told_to_stop(self) -> bool:
        """Return whether there is a stop flag for the segment of its lease."""
        lease, stop = self.lease, self.stop
        return lease is not None and stop is not None and stop.epoch == lease.epoch

    @property
    def started_s(self) -> float | None:
        """Return when its segment began, of a STARTING trial its grant; None without GPUs.

        Of a pod that waits it is when its task began.
        """
        if self.phase is Phase.RUNNING and self.segment is not None:
            began_s = self.segment.began_s
            return self.segment.started_s if began_s is None else began_s
        return self.lease.granted_s if self.phase is Phase.STARTING and self.lease else None

    @property
    def uses_gpus(self) -> bool:
        """Return whether its program runs: one that starts, and a pod that waits, use no GPU."""
        segment = self.segment
        return self.is_under_way and segment is not None and segment.began_s is not None

    def service_gpu_s(self, now_s: float) -> float:
        """Return the GPU-seconds of its whole life up to `now_s`."""
        if self.segment is None:
            return 0.0
        ended_gpu_s, gpus = self.segment.service_gpu_s, max(1, len(self.segment.gpus))
        began_s = self.segment.began_s
        if not self.is_under_way or began_s is None:
            return ended_gpu_s
        return ended_gpu_s + max(0.0, now_s - began_s) * gpus


def classify(trial: TrialRecords) -> TrialState:
    """Return the one state of a trial with these records; total, and pure."""
    lease, segment = trial.lease, trial.segment
    if trial.row.state in ENDED_TASK_STATES or trial.final is not None:
        return _classify_ended(trial)
    is_ready = trial.row.state in READY_STATES
    if lease is None:
        is_running = segment is not None and segment.running
        return S.SEGMENT_WITHOUT_LEASE if is_running else S.PENDING
    if segment is not None and segment.epoch > lease.epoch:
        return S.SEGMENT_AHEAD if is_ready else S.SEGMENT_AHEAD_LEAVING
    if has_open_segment(trial):
        return _classify_revoked(trial) if lease.revoked else _classify_leased(trial)
    if trial.has_lease_in_force:
        return S.GRANTED
    return _classify_unleased(trial)


def _classify_ended(trial: TrialRecords) -> TrialState:
    row, segment = trial.row, trial.segment
    if row.state in ENDED_TASK_STATES:
        return S.ENDED if trial.final is not None or trial.lease is None else S.UNREPORTED
    if segment is None or not is_idle(row):
        return S.ENDING
    # Clearing a task gives its instance a new id and the operator's own pool slots.
    is_own_ending = segment.task == row.id
    if row.pool_slots >= HELD_POOL_SLOTS and not is_own_ending:
        return S.CLEARED
    if segment.final in ("stopped_early", "cancelled"):
        return S.UNMARKED
    return S.UNMARKED if segment.final == "failed" and is_own_ending else S.ENDING


def _classify_leased(trial: TrialRecords) -> TrialState:
    """Return the state of a trial with an open segment under a lease that is not revoked."""
    if trial.row.state in LIVE_STATES:
        if not trial.is_told_to_stop:
            return S.RUNNING
        return S.RELEASED if trial.left in PAUSED else S.STOPPING
    if not trial.left:
        return S.UNATTENDED
    return S.PREEMPTED if trial.left in PAUSED else S.CONCLUDING


def _classify_unleased(trial: TrialRecords) -> TrialState:
    """Return the state of a trial without a running segment, whose lease is used up or revoked."""
    if trial.is_resizing:
        return S.RESIZING
    return S.WAITING if trial.row.state in READY_STATES else S.LEAVING


def _classify_revoked(trial: TrialRecords) -> TrialState:
    """Return the state of a trial with an open segment under a revoked lease."""
    if trial.row.state in LIVE_STATES:
        return S.REVOKED_STOPPING if trial.is_told_to_stop else S.REVOKED_RUNNING
    if trial.row.state not in READY_STATES:
        return S.LEAVING
    return S.REVOKED_PREEMPTED if trial.left in PAUSED else S.WAITING


def is_idle(row: TaskInstanceRow) -> bool:
    """Return whether a task instance is neither in a final state nor holds slots."""
    return row.state not in (*ENDED_TASK_STATES, *OCCUPYING)


def has_open_segment(trial: TrialRecords) -> bool:
    """Return whether the segment of its lease is on record as running."""
    lease, segment = trial.lease, trial.segment
    if lease is None or segment is None:
        return False
    return segment.running and segment.epoch == lease.epoch


def is_on_wrong_host(trial: TrialRecords, host: str) -> bool:
    """Return whether a lease for that host came to a task elsewhere, which has left."""
    lease, segment = trial.lease, trial.segment
    if lease is None or segment is None or trial.has_ended or not trial.is_idle:
        return False
    return (
        segment.outcome == WRONG_HOST
        and segment.epoch == lease.epoch
        and lease.host == host
        and segment.host not in ("", host)
    )

"""The writes that the trials of a sweep need, by their states: commands as data.

`reconcile` is asked in each round, before the policy; `end_trials` when a sweep ends, or a policy
ends a trial early; `preempt` when a policy takes a trial's GPUs; `stop_all` at a shutdown. Each
returns commands in the order in which they are to be carried out, by `Executor`. A command names
the trial as it was when the command was decided on, and the step under which the fault barrier
records a failure. Each may be carried out again. `ranks_of` returns what Airflow's scheduler is to
see of the trials' tasks: their weight, and the slots that they ask for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from hermes_ops.airflow.control.cleanup.user_clear import ClearRequest, clear_request
from hermes_ops.airflow.control.jobs import job_id
from hermes_ops.airflow.control.sweep_state import SweepState
from hermes_ops.airflow.control.trial_state import (
    UNCLOSED,
    UNDER_WAY,
    TrialRecords,
    TrialState,
    is_on_wrong_host,
)
from hermes_ops.airflow.machines import queue_of
from hermes_ops.airflow.metadata_rows import OCCUPYING, TaskRank
from hermes_ops.airflow.records import HELD_POOL_SLOTS, CloseRecord, Lease
from hermes_ops.core.model import JobId, Phase

TAKE_BACK, END, MEND = "take its GPUs back", "end it", "mend it"
CLOSE_SEGMENT, USER_CLEAR = "close its segment", "do what its task asks for"


@dataclass(frozen=True, slots=True)
class StopSegment:
    """Write the stop flag of the running segment; `final` is the state that the trial ends in.

    With `resize` the trial's task keeps its slots. A task that has kept them leaves without it.
    """

    trial: TrialRecords
    reason: str
    step: str
    final: str | None = None
    resize: bool = False


@dataclass(frozen=True, slots=True)
class RevokeLease:
    """Take back a lease whose segment has not begun, out of the scheduler's reach first."""

    trial: TrialRecords
    step: str


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Write the lease, for the task in Airflow's store and as a file."""

    trial: TrialRecords
    lease: Lease
    step: str


@dataclass(frozen=True, slots=True)
class CloseSegment:
    """Close the segment of a pod that was preempted and whose task waits."""

    trial: TrialRecords
    step: str = CLOSE_SEGMENT


@dataclass(frozen=True, slots=True)
class RecordEnd:
    """Record the final state of a trial and its reason."""

    trial: TrialRecords
    state: str
    reason: str
    step: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Record as failed a trial that cannot be started.

    Its task is marked in the next round: a sweep that ends with it records its own end first.
    """

    trial: TrialRecords
    reason: str
    step: str = END


@dataclass(frozen=True, slots=True)
class ContinueTrial:
    """Let a trial whose task a person has cleared continue from its checkpoint."""

    trial: TrialRecords
    step: str = USER_CLEAR


@dataclass(frozen=True, slots=True)
class RestartFromScratch:
    """Let a trial begin again with an empty folder and a run of its own in MLflow."""

    trial: TrialRecords
    step: str = USER_CLEAR


@dataclass(frozen=True, slots=True)
class RestoreMark:
    """Give the task of an ended trial, which a person has cleared, its state back."""

    trial: TrialRecords
    step: str = USER_CLEAR


@dataclass(frozen=True, slots=True)
class ForgetFaults:
    """Forget the failed starts of a trial that has ended."""

    trial: TrialRecords


@dataclass(frozen=True, slots=True)
class MarkTasks:
    """Mark the waiting tasks of trials that the controller has ended."""

    trials: tuple[TrialRecords, ...]
    state: str


@dataclass(frozen=True, slots=True)
class RestoreTouched:
    """Mark the tasks that were cleared so that Airflow adds new trials, and forget them."""

    trials: tuple[TrialRecords, ...]


@dataclass(frozen=True, slots=True)
class EndIdleTrials:
    """Record the final state of trials without a live task, then skip their tasks."""

    trials: tuple[TrialRecords, ...]
    close: CloseRecord


TrialCommand = (
    StopSegment
    | RevokeLease
    | GrantLease
    | CloseSegment
    | RecordEnd
    | GiveUp
    | ContinueTrial
    | RestartFromScratch
    | RestoreMark
)
"""The commands that concern one trial and are written by one attempt."""

Command = TrialCommand | ForgetFaults | MarkTasks | RestoreTouched | EndIdleTrials


SHUTDOWN = "Hermes Ops is being shut down"
WITHDRAWN = "its GPUs belong to other trials now"


@dataclass(frozen=True, slots=True)
class SweepFindings:
    """A sweep in one round, as far as its trials' states are to be reconciled with it.

    `touched` are ended trials whose tasks were cleared so that Airflow adds those that are missing.
    `failing` are the trials whose start fails; `unstartable` those that have been tried often
    enough, with the reason. `host` is the machine that the controller grants leases for.
    """

    trials: tuple[TrialRecords, ...]
    host: str
    is_closing: bool = False
    is_paused: bool = False
    is_complete: bool = True
    touched: tuple[int, ...] = ()
    failing: frozenset[int] = frozenset()
    unstartable: Mapping[int, str] = field(default_factory=dict)


def reconcile(sweep: SweepFindings) -> tuple[Command, ...]:
    """Return what is to be written so that records, tasks and people's requests agree.

    Tasks are marked and records repaired before segments are closed, requests obeyed and trials
    given up: none of the first kind changes what the second kind is decided on.
    """
    return (*_repair_sweep(sweep), *(c for t in sweep.trials for c in _advance(sweep, t)))


def _repair_sweep(sweep: SweepFindings) -> Iterator[Command]:
    """Yield what repairs the sweep's tasks and the records that no longer fit their tasks."""
    yield from _mark_tasks(t for t in sweep.trials if t.number not in sweep.touched)
    if sweep.touched and sweep.is_complete:
        yield RestoreTouched(
            tuple(t for t in sweep.trials if t.number in sweep.touched and t.is_idle)
        )
    for trial in sweep.trials:
        if (repair := _repair_trial(trial, is_paused=sweep.is_paused)) is not None:
            yield repair


def _mark_tasks(trials: Iterable[TrialRecords]) -> Iterator[Command]:
    """Yield the marks of ended trials whose tasks still wait, grouped by the tasks' new state."""
    by_state: dict[str, list[TrialRecords]] = {}
    for trial in trials:
        if trial.state is TrialState.UNMARKED:
            by_state.setdefault(trial.task_state, []).append(trial)
    return (MarkTasks(tuple(marked), state) for state, marked in by_state.items())


def _repair_trial(trial: TrialRecords, *, is_paused: bool) -> Command | None:
    if trial.state is TrialState.REVOKED_RUNNING:
        return StopSegment(trial, "its lease was taken back", MEND)
    if trial.state is TrialState.UNREPORTED:
        return RecordEnd(trial, trial.end_state, f"its task is {trial.row.state}", MEND)
    if is_paused and trial.phase is Phase.STARTING:
        return RevokeLease(trial, MEND)  # Airflow starts no task: its GPUs would wait with it
    return None


def _advance(sweep: SweepFindings, trial: TrialRecords) -> Iterator[Command]:
    """Yield what leads one trial on: its segment is closed, a request obeyed, or it is given up."""
    if trial.state in UNCLOSED:
        yield CloseSegment(trial)
    if (obeyed := handle_user_clear(sweep, trial)) is not None:
        yield obeyed
    if is_on_wrong_host(trial, sweep.host) and trial.segment is not None:
        yield GiveUp(trial, trial.segment.reason)
    elif trial.number in sweep.failing and not trial.has_lease_in_force:
        if trial.has_ended:
            yield ForgetFaults(trial)
        elif trial.is_idle and trial.number in sweep.unstartable:
            yield GiveUp(trial, sweep.unstartable[trial.number])


def handle_user_clear(sweep: SweepFindings, trial: TrialRecords) -> Command | None:
    """Return what a person asks for by clearing the task or by its note; None for nothing."""
    if trial.number in sweep.touched:
        return None
    match clear_request(trial, closing=sweep.is_closing):
        case ClearRequest.STOP:
            return StopSegment(trial, "it is to begin from scratch", USER_CLEAR)
        case ClearRequest.RESTART:
            return RestartFromScratch(trial)
        case ClearRequest.CONTINUE:
            return ContinueTrial(trial)
        case ClearRequest.STAY_ENDED:
            return RestoreMark(trial)
    return None


def end_trials(trials: Iterable[TrialRecords], close: CloseRecord) -> tuple[Command, ...]:
    """Return what ends trials for good: live ones by their stop flag, the others by their record.

    A trial with a lease that has not begun first loses the lease, and is ended in a later round. A
    trial whose pod has ended is left to its task, which records how. A trial whose task Airflow has
    not scheduled yet is ended once it has: a plan that was cleared with it removes the sweep's end.
    """
    commands: list[Command] = []
    idle = []
    for trial in trials:
        if trial.has_ended:
            continue
        if trial.state in UNDER_WAY:
            commands.append(StopSegment(trial, close.reason, END, close.state))
        elif trial.phase is Phase.STARTING:
            commands.append(RevokeLease(trial, END))
        elif not trial.has_lease_in_force and trial.row.state not in (None, *OCCUPYING):
            idle.append(trial)
    return (*commands, EndIdleTrials(tuple(idle), close)) if idle else tuple(commands)


def preempt(trial: TrialRecords, reason: str, *, resize: bool = False) -> StopSegment | RevokeLease:
    """Return the command that makes a trial leave its GPUs.

    With `resize` the task of a process keeps its slots for the next lease. That of a pod does not:
    its next pod has another size, and its task needs as many slots.
    """
    if trial.phase is Phase.STARTING:
        return RevokeLease(trial, TAKE_BACK)
    is_process = trial.lease is not None and trial.lease.pod is None
    return StopSegment(trial, reason, TAKE_BACK, resize=resize and is_process)


def withdraw_resizes(sweep: SweepState, kept: Set[JobId]) -> tuple[Command, ...]:
    """Return the commands that make tasks which wait in their slots leave them, except `kept` ones.

    A sweep that ends sends other commands to its tasks: nothing is returned for it.
    """
    if sweep.close is not None:
        return ()
    waiting = (t for t in sweep.trials if t.state is TrialState.RESIZING)
    leaving = (t for t in waiting if job_id(sweep.id, t.number) not in kept)
    return tuple(StopSegment(trial, WITHDRAWN, TAKE_BACK) for trial in leaving)


def stop_all(trials: Iterable[TrialRecords]) -> tuple[Command, ...]:
    """Return what stops each segment with its checkpoint and revokes the leases not begun."""
    held = (
        t
        for t in trials
        if t.phase in (Phase.STARTING, Phase.RUNNING) or t.state is TrialState.RESIZING
    )
    return tuple(preempt(trial, SHUTDOWN) for trial in held)


ENDED_WEIGHT = 1_000_001
LEASED_WEIGHT = 1_000_000
WAITING_WEIGHT = 100_000
UNOPENED_WEIGHT = 1


def rank_of(trial: TrialRecords, lease: Lease | None, place: int | None) -> TaskRank | None:
    """Return the rank of a trial under that lease, in the policy's order; None: as it is.

    A trial that holds slots keeps them. A deferred trial that was told to stop is scheduled with
    its slots again when its pod has ended; trials that take over its GPUs rank before it. Once it
    has reported that it is preempted, it needs no slots: nothing waits for the rest of its pod. A
    trial that has ended for another reason reports that first.
    """
    row = trial.row
    if row.state == "deferred" and trial.is_told_to_stop:
        weight, slots = WAITING_WEIGHT, 0 if trial.left else row.pool_slots
    elif row.state in OCCUPYING:
        return None
    elif lease is not None:
        weight, slots = ENDED_WEIGHT if trial.left else LEASED_WEIGHT, slots_for(lease.gpus)
    elif trial.lease is None:
        weight, slots = UNOPENED_WEIGHT, HELD_POOL_SLOTS
    else:
        behind = place if place is not None else WAITING_WEIGHT // 2
        weight, slots = WAITING_WEIGHT - behind, HELD_POOL_SLOTS
    queue = queue_of(lease.machine) if lease is not None and lease.machine else None
    same = weight == row.priority_weight and slots == row.pool_slots
    return None if same and queue in (None, row.queue) else TaskRank(row.id, weight, slots, queue)


def slots_for(gpus: Collection[int]) -> int:
    """Return the slots that the task of a trial on these GPUs holds."""
    return max(1, len(gpus))


def ranks_of(
    sweep: SweepState,
    order: Mapping[JobId, int],
    leases: Mapping[JobId, Lease],
    revoked: Set[JobId],
) -> list[TaskRank]:
    """Return the ranks of a sweep's trials that differ once these leases stand.

    `order` is each job's place in the policy's ranking; `revoked` are leases just taken back.
    """
    changes: list[TaskRank] = []
    for trial in sweep.trials:
        if trial.has_ended:
            continue
        job = job_id(sweep.id, trial.number)
        is_in_force = trial.has_lease_in_force and job not in revoked
        lease = leases.get(job) or (trial.lease if is_in_force else None)
        if (rank := rank_of(trial, lease, order.get(job))) is not None:
            changes.append(rank)
    return changes

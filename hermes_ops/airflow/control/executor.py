"""Carries out commands: every write about a trial, in the order that a crash needs.

* A stop flag is written as a file first, which the task may follow at once, then in Airflow's
  store: a task that misses the file finds the record.
* The slots of a task that waits in them are those of its next lease before that is written: the
  task may start with it at once.
* A lease is out of the scheduler's reach (by its rank) before it is recorded as revoked: a trial
  whose revocation is on record can not be started by a rank that came before.
* A resize is withdrawn before its lease is revoked: the task may have read that lease already, and
  must not be taken for one that still waits in its slots.
* A final state is on record before the task is skipped or marked: after a kill in between, the next
  controller still knows the state, and marks the task in a later round.
* MLflow comes before Airflow's records where a trial continues or restarts: while MLflow is away
  nothing is written, and all of it is done another time.

Whatever command a kill interrupts, the next controller classifies the trial by what was written and
decides on the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

from hermes_ops.airflow.accounts import closed_use
from hermes_ops.airflow.client import MOST_MARKED, AirflowClient, TaskKey
from hermes_ops.airflow.control.cleanup.user_clear import UserClear
from hermes_ops.airflow.control.faults import Done, FaultBarrier, Subject
from hermes_ops.airflow.control.reconcile import (
    END,
    WAITING_WEIGHT,
    WITHDRAWN,
    CloseSegment,
    Command,
    ContinueTrial,
    EndIdleTrials,
    ForgetFaults,
    GiveUp,
    GrantLease,
    MarkTasks,
    RecordEnd,
    RestartFromScratch,
    RestoreMark,
    RestoreTouched,
    RevokeLease,
    StopSegment,
    TrialCommand,
)
from hermes_ops.airflow.control.sweep_state import SweepState
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.folders import (
    TrialFolder,
    read_start,
    write_ending,
    write_lease,
    write_stop_flag,
    write_use,
)
from hermes_ops.airflow.metadata import Metadata
from hermes_ops.airflow.metadata_rows import TaskRank
from hermes_ops.airflow.records import (
    CLOSE_KEY,
    HELD_POOL_SLOTS,
    LEASE_KEY,
    SEGMENT_KEY,
    STOP_KEY,
    SWEEP_KEY,
    CloseRecord,
    SegmentRecord,
    StopFlag,
    encode,
)
from hermes_ops.airflow.trial.metrics import TrialOutcome, ending_of, finish_run
from hermes_ops.airflow.trial.segment_run import PAUSED, closed
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.tracking import Tracker

log = logging.getLogger(__name__)

MARKING_S = 1.0
"""Seconds of a round for marking tasks of one sweep, and for carrying out requests that a person
made by clearing its tasks; what is left over follows in the next rounds."""

MLFLOW_PAUSE_S = 60.0
"""Seconds without a request to close a run after MLflow has not answered one."""

Tags = Callable[[SweepState, TrialRecords], dict[str, str]]
GiveUpRun = Callable[[SweepState, TrialRecords, SegmentRecord, str], None]


@dataclass(slots=True)
class Executor:
    """Writes to Airflow and MLflow; what fails of one trial is recorded and hinders no other.

    `tags` are those of a trial's run in MLflow; `give_up_run` ends the run of one given up.
    """

    client: AirflowClient
    metadata: Metadata
    tracker: Tracker
    faults: FaultBarrier
    tags: Tags
    give_up_run: GiveUpRun
    clock: Callable[[], float] = time.monotonic
    _mlflow_due_s: float = -inf

    def run(
        self, sweep: SweepState, commands: Iterable[Command], now_s: float
    ) -> dict[int, TrialRecords]:
        """Carry out the commands in order; return the trials whose records they have changed.

        A trial that has been continued or restarted is not given up in the same round. If a person
        has cleared many tasks, some of them are left for the next rounds (MARKING_S).
        """
        changed: dict[int, TrialRecords] = {}
        resumed: set[int] = set()
        requests_until_s = inf
        for command in commands:
            if isinstance(command, MarkTasks | RestoreTouched | EndIdleTrials | ForgetFaults):
                self._run_for_sweep(sweep, command, now_s)
                continue
            number = command.trial.number
            if isinstance(command, GiveUp) and number in resumed:
                continue
            if isinstance(command, ContinueTrial | RestartFromScratch | RestoreMark):
                if self.clock() >= requests_until_s:
                    continue
                requests_until_s = min(requests_until_s, self.clock() + MARKING_S)
            before = changed.get(number, command.trial)
            done = self.attempt(sweep, replace(command, trial=before), now_s)
            if done is None or done.value is before:
                continue
            changed[number] = done.value
            if isinstance(command, ContinueTrial | RestartFromScratch):
                resumed.add(number)
        return changed

    def attempt(
        self, sweep: SweepState, command: TrialCommand, now_s: float
    ) -> Done[TrialRecords] | None:
        """Carry out one command; return the trial afterwards, None if it failed or is not due."""
        subject = Subject(sweep.id, command.trial.number)
        return self.faults.attempt(subject, command.step, self._write, sweep, command, now_s)

    def close(self, sweep: SweepState, close: CloseRecord) -> bool:
        """Record that a sweep ends; return whether that is on record."""
        step = "write that it ends"
        done = self.faults.attempt(
            Subject(sweep.id), step, self._put, sweep, None, CLOSE_KEY, encode(close)
        )
        return done is not None

    def _write(self, sweep: SweepState, command: TrialCommand, now_s: float) -> TrialRecords:
        match command:
            case StopSegment():
                after = self._stop(sweep, command, now_s)
            case RevokeLease():
                after = self._revoke(sweep, command.trial, now_s)
            case GrantLease():
                after = self._grant(sweep, command)
            case CloseSegment():
                after = self._close_segment(sweep, command.trial)
            case RecordEnd():
                after = self.record_end(sweep, command, now_s)
            case GiveUp():
                after = self._give_up(sweep, command, now_s)
            case ContinueTrial() | RestartFromScratch() | RestoreMark():
                after = self._carry_out_request(sweep, command, now_s)
        return after

    def _stop(self, sweep: SweepState, command: StopSegment, now_s: float) -> TrialRecords:
        trial, segment = command.trial, command.trial.segment
        if segment is None or not (trial.is_under_way or trial.is_resizing):
            return trial
        flag = StopFlag(segment.epoch, command.reason, now_s, command.final, command.resize)
        self._write_flag(sweep, trial, flag)
        return trial

    def _write_flag(self, sweep: SweepState, trial: TrialRecords, flag: StopFlag) -> None:
        """Write the stop flag, unless the one on record demands the same."""
        if trial.stop is not None and _demands_same(trial.stop, flag):
            return
        folder = sweep.folder(trial)
        is_local = write_stop_flag(folder, flag, needed=trial.row.state == "deferred")
        if is_local:  # on this machine the trial need not wait for Airflow's record
            folder.wake_file().wake()
        self._put(sweep, trial, STOP_KEY, encode(flag))
        if not is_local:
            folder.wake_file().wake()

    def _grant(self, sweep: SweepState, command: GrantLease) -> TrialRecords:
        trial, lease = command.trial, command.lease
        self._put(sweep, trial, LEASE_KEY, encode(lease))
        if lease.pod is None:
            write_lease(sweep.folder(trial), lease)
        if trial.is_resizing:  # its task waits for this lease
            sweep.folder(trial).wake_file().wake()
        return trial

    def _revoke(self, sweep: SweepState, trial: TrialRecords, now_s: float) -> TrialRecords:
        """Take back a lease that has not begun: first out of the scheduler's reach.

        A trial that is being resized is to have no other lease while its task may start with this
        one, whatever state its task had when it was read: it gives its slots back.
        """
        if trial.lease is not None:
            self._hold_back(trial)
            segment, is_ending = trial.segment, trial.stop is not None and trial.stop.final
            if segment is not None and segment.resizing and not is_ending:
                self._write_flag(sweep, trial, StopFlag(segment.epoch, WITHDRAWN, now_s))
            self._put(sweep, trial, LEASE_KEY, encode(replace(trial.lease, revoked=True)))
        return trial

    def change_slots(self, trial: TrialRecords, slots: int) -> bool:
        """Give a task that waits in its slots that many; hold back one that waits for slots.

        Return whether the next lease may be written.
        """
        if trial.is_resizing:
            return self.metadata.change_slots(trial.row, slots)
        return self._hold_back(trial)

    def _hold_back(self, trial: TrialRecords) -> bool:
        """Have the task ask for more slots than the pool has, so that Airflow passes it over.

        Return whether it does: a task that has been queued meanwhile keeps its slots.
        """
        rank = TaskRank(trial.row.id, WAITING_WEIGHT, HELD_POOL_SLOTS)
        return self.metadata.rerank([rank]) > 0

    def _close_segment(self, sweep: SweepState, trial: TrialRecords) -> TrialRecords:
        """Close the segment of a pod that was preempted; its task need take no slot for that."""
        if (segment := closed_segment(trial, sweep.folder(trial))) is None:
            return trial
        self._put(sweep, trial, SEGMENT_KEY, encode(segment))
        write_use(sweep.folder(trial), segment)
        return replace(trial, segment=segment, left="")

    def record_end(self, sweep: SweepState, command: RecordEnd, now_s: float) -> TrialRecords:
        """Record a final state in Airflow, then in MLflow; nothing for a trial without a lease."""
        trial, lease = command.trial, command.trial.lease
        if lease is None:
            return trial
        record = with_open_use(trial, sweep.folder(trial))
        record = record or SegmentRecord(epoch=lease.epoch, running=False, started_s=now_s)
        record = _ended(record, trial, command.state, command.reason, now_s)
        outcome = TrialOutcome(command.state, command.reason)
        write_ending(sweep.folder(trial), ending_of(outcome, record))
        self._put(sweep, trial, SEGMENT_KEY, encode(record))
        self._finish_run(lease.run_id, outcome, record)
        return trial

    def _finish_run(self, run_id: str, outcome: TrialOutcome, record: SegmentRecord) -> None:
        """Close a trial's run in MLflow; if it is not closed now, the report task closes it.

        A server that hangs delays the round once in a while, not for each trial.
        """
        if self.clock() < self._mlflow_due_s:
            return
        try:
            finish_run(self.tracker, run_id, outcome, record)
        except HermesError as error:
            log.warning("The report task will close the run %s: %s", run_id, error)
            if isinstance(error, Unavailable):
                self._mlflow_due_s = self.clock() + MLFLOW_PAUSE_S

    def _give_up(self, sweep: SweepState, command: GiveUp, now_s: float) -> TrialRecords:
        trial, reason = command.trial, command.reason
        log.error("Trial %s of %s fails: %s", trial.number, sweep.id, reason)
        record = with_open_use(trial, sweep.folder(trial))
        record = record or SegmentRecord(epoch=0, running=False, started_s=now_s, segments=0)
        record = _ended(record, trial, "failed", reason, now_s)
        write_ending(sweep.folder(trial), ending_of(TrialOutcome("failed", reason), record))
        self._put(sweep, trial, SEGMENT_KEY, encode(record))
        self.give_up_run(sweep, trial, record, reason)
        self.faults.forget(Subject(sweep.id, trial.number))
        return replace(trial, segment=record)

    def _carry_out_request(
        self,
        sweep: SweepState,
        command: ContinueTrial | RestartFromScratch | RestoreMark,
        now_s: float,
    ) -> TrialRecords:
        """Do what a person asks of a trial by clearing its task or by its note."""
        trial, task = command.trial, task_of(sweep, command.trial)
        if isinstance(command, RestoreMark):
            self.client.mark([task], trial.task_state)
            return trial
        writer = UserClear(self.client, self.tracker, task, sweep.spec.ref)
        try:
            if isinstance(command, ContinueTrial):
                return writer.continue_trial(trial)
            self._hold_back(trial)
            used = replace(trial, segment=with_open_use(trial, sweep.folder(trial)))
            return writer.restart_from_scratch(used, self.tags(sweep, trial), now_s)
        except HermesError as error:
            log.warning("Trial %s of %s is cleared later: %s", trial.number, sweep.id, error)
        return trial

    def _run_for_sweep(
        self,
        sweep: SweepState,
        command: MarkTasks | RestoreTouched | EndIdleTrials | ForgetFaults,
        now_s: float,
    ) -> None:
        subject = Subject(sweep.id)
        match command:
            case MarkTasks():
                step = f"mark its tasks {command.state}"
                for trials in self._in_batches(command.trials):
                    tasks = [task_of(sweep, t) for t in trials]
                    self.faults.attempt(subject, step, self._mark, tasks, command.state)
            case RestoreTouched():
                step = "take up its new trials"
                self.faults.attempt(subject, step, self._restore_touched, sweep, command)
            case EndIdleTrials():
                self._end_idle(sweep, command, now_s)
            case ForgetFaults():
                self.faults.forget(Subject(sweep.id, command.trial.number))

    def _mark(self, tasks: list[TaskKey], state: str) -> None:
        if state == "skipped":
            self.client.skip(tasks)
        else:
            self.client.mark(tasks, state)

    def _restore_touched(self, sweep: SweepState, command: RestoreTouched) -> None:
        """Give tasks their state back now that Airflow has the new trials; then forget them."""
        for trial in command.trials:
            self.client.mark([task_of(sweep, trial)], trial.task_state)
        record = replace(sweep.spec.record, touched=())
        self._put(sweep, None, SWEEP_KEY, encode(record))

    def _end_idle(self, sweep: SweepState, command: EndIdleTrials, now_s: float) -> None:
        """Record each end before its task is skipped, so that the next controller knows it."""
        state, reason = command.close.state, command.close.reason
        for trials in self._in_batches(command.trials):
            ended = [
                trial
                for trial in trials
                if self.attempt(sweep, RecordEnd(trial, state, reason, END), now_s)
            ]
            if ended:
                tasks = [task_of(sweep, t) for t in ended]
                self.faults.attempt(Subject(sweep.id), "skip its tasks", self.client.skip, tasks)

    def _in_batches(self, trials: tuple[TrialRecords, ...]) -> Iterator[tuple[TrialRecords, ...]]:
        """Yield the trials in batches until the time for them in this round is over."""
        until_s = self.clock() + MARKING_S
        for begin in range(0, len(trials), MOST_MARKED):
            if begin and self.clock() >= until_s:
                return
            yield trials[begin : begin + MOST_MARKED]

    def _put(self, sweep: SweepState, trial: TrialRecords | None, key: str, value: object) -> None:
        self.client.put_state(task_of(sweep, trial), key, value)
        self.faults.answered()


def task_of(sweep: SweepState, trial: TrialRecords | None) -> TaskKey:
    """Return the task instance of a trial, or of the sweep's plan."""
    run = sweep.spec.run
    if trial is None:
        return TaskKey(run.dag_id, run.run_id, run.plan_task)
    return TaskKey(run.dag_id, run.run_id, sweep.spec.record.trial_task, trial.number)


def _demands_same(one: StopFlag, other: StopFlag) -> bool:
    return (one.epoch, one.final, one.resize) == (other.epoch, other.final, other.resize)


def closed_segment(trial: TrialRecords, folder: TrialFolder) -> SegmentRecord | None:
    """Return the closed record of a preempted segment whose task waits; None for any other."""
    if trial.left not in PAUSED or trial.segment is None or trial.row.state == "deferred":
        return None
    start = read_start(folder, trial.segment.epoch)
    return closed(trial.segment, folder, trial.left, ran_s=start.ran_s if start else None)


def with_open_use(trial: TrialRecords, folder: TrialFolder) -> SegmentRecord | None:
    """Return the record with the use of GPUs by a segment whose task was lost before it closed it.

    The folder has it, unless it is on another machine. A killed process has not written its end.
    """
    record, lease = trial.segment, trial.lease
    if record is None or lease is None or not record.running:
        return record
    start = read_start(folder, record.epoch)
    if lease.pod is None:
        segments = folder.end_killed(record.epoch, record.step, folder.last_sign_s())
    else:
        segments = folder.segments()
    used = closed_use(segments, record, start.ran_s if start else None, time.time())
    return used.entered_in(record)


def _ended(
    record: SegmentRecord, trial: TrialRecords, state: str, reason: str, now_s: float
) -> SegmentRecord:
    """Return the record with that final state, given to the trial's present task instance."""
    return replace(record, running=False, final=state, task=trial.row.id, reason=reason,
                   host="", ended_s=record.ended_s or now_s)  # fmt: skip

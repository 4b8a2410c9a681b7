"""One run of a trial's task in a slot: what it records as it begins, goes on and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hermes_ops.airflow.accounts import SEEN_S, Accounts, closed_use, recorded_use
from hermes_ops.airflow.clock_steps import ClockSteps
from hermes_ops.airflow.folders import (
    TrialFolder,
    WakeFile,
    controller_wake_file,
    notice_text,
    read_start,
    read_stop_flag,
    with_began,
    with_start,
    write_ending,
    write_start,
    write_use,
)
from hermes_ops.airflow.records import (
    LEASE_KEY,
    SEGMENT_KEY,
    STOP_KEY,
    CorrectedStart,
    Lease,
    SegmentRecord,
    StopFlag,
    decode,
    encode,
    is_active,
)
from hermes_ops.airflow.state_store import TaskStore, read_record
from hermes_ops.airflow.trial.metrics import MetricFeed, TrialOutcome, ending_of
from hermes_ops.core.summary import INCOMPLETE
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.trial.failure import Cause
from hermes_ops.trial.outcome import FINISHED, INFRASTRUCTURE, PREEMPTED, SegmentOutcome

REASON_CHARACTERS, ADVICE_CHARACTERS = 1_000, 8_000
MOST_WITHOUT_SPACE = 20
"""Full disks in a row that may end a trial without a new step; one more counts as a failure."""
PAUSED = (SegmentOutcome.PREEMPTED.value, SegmentOutcome.INTERRUPTED.value)
"""Outcomes of a segment after which its trial waits for its next lease."""
_MEASURED = ("checkpoint_s", "restore_s", "startup_s", "repeat_s")
MOST_STEPS, MOST_MEASURED_S = 2**53, 1e9
"""What a trial can report of itself: beyond it, sums of policies are no numbers any more."""
MOST_WAITED_S = 7 * 86_400.0
"""A pod that says that it began later after its task than that is not believed."""
FIRST_LINES, FIRST_CHARACTERS = 12, 200
"""Last lines of a trial's first failure that its record keeps, and characters of each."""


@dataclass(frozen=True, slots=True)
class SegmentFailure:
    """How a segment failed: why, with which last lines, and whether trying again may help."""

    reason: str
    tail: tuple[str, ...] = ()
    cause: str = ""
    retryable: bool = True

    @property
    def kept(self) -> tuple[str, ...]:
        """The reason and the last lines, as the record keeps them of a trial's first failure."""
        lines = (self.reason, *self.tail[-FIRST_LINES:])
        return tuple(line[:FIRST_CHARACTERS] for line in lines)


@dataclass(slots=True)
class SegmentRun:
    """Writes the trial's `SegmentRecord`, and through its feed the trial's MLflow run."""

    store: TaskStore
    lease: Lease
    folder: TrialFolder
    feed: MetricFeed
    record: SegmentRecord
    clock_steps: ClockSteps = field(default_factory=ClockSteps)
    ran_s: float | None = None  # the observed run time of its container
    _recorded_status: Mapping[str, Any] | None = None

    @classmethod
    def from_lease(
        cls,
        store: TaskStore,
        lease: Lease,
        folder: TrialFolder,
        last: SegmentRecord | None,
        feed: MetricFeed | None = None,
    ) -> SegmentRun:
        """Return a run under this lease, after the segment `last`; nothing is written yet.

        `feed` is that of the segment before, if it was in the same run of the task.
        """
        before = last or SegmentRecord(0, False, 0.0)
        before = with_start(before, read_start(folder, before.epoch))
        goes_on = lease.pod is not None and before.running and before.epoch == lease.epoch
        earlier = folder.segments()
        is_pod = lease.pod is not None
        recorded = recorded_use(earlier, before, lease.epoch) if is_pod else None
        accounts = recorded or Accounts.from_segments(earlier)
        record = replace(
            accounts.entered_in(before),
            epoch=lease.epoch,
            running=True,
            started_s=before.started_s if goes_on else time.time(),
            waited_s=before.waited_s if goes_on else (None if lease.pod is not None else 0.0),
            ended_s=None,
            outcome="",
            reason="",
            cause="",
            host="",
            gpus=lease.gpus,
            steps_at_start=before.step,
            batch=lease.samples,
            segments=accounts.segments + 1,
            preemptions=accounts.preemptions,
            resizing=False,
        )
        return cls(store, lease, folder, feed or _feed(lease, folder), record)

    @classmethod
    def from_ended(
        cls, store: TaskStore, lease: Lease, folder: TrialFolder, last: SegmentRecord
    ) -> SegmentRun:
        """Return the run of a segment that ended under `lease` or an earlier lease of its trial."""
        ended_lease = replace(lease, epoch=last.epoch, gpus=last.gpus)
        start = read_start(folder, last.epoch)
        record, ran_s = with_start(last, start), start.ran_s if start else None
        return cls(store, ended_lease, folder, _feed(lease, folder), record, ran_s=ran_s)

    def wake_file(self) -> WakeFile:
        """Return the file that is touched when there is a stop flag."""
        return self.folder.wake_file()

    def record_batch(self) -> None:
        """Record the samples of a step, where they are known, before the segment starts."""
        if self.lease.samples is not None:
            self.folder.record_batch(self.lease.epoch, self.lease.samples)

    def record_start(self) -> None:
        """Record for the triggerer, which holds the segment from now on, when it began."""
        began_s, gpus = self.record.started_s, self.record.gpus
        start = CorrectedStart(self.record.epoch, began_s, began_s, gpus=gpus)
        write_start(self.folder, start)

    def opened(self) -> None:
        """Record that the segment's process has started, and send its metrics from now on."""
        self.feed.start()
        self._write()

    def stop_flag(self) -> StopFlag | None:
        """Return the stop flag of this lease, from its local record or Airflow's store."""
        flag = read_stop_flag(self.folder, self.lease.epoch)
        if flag is not None:
            return flag
        flag = decode(StopFlag, read_record(self.store.get, STOP_KEY))
        return flag if flag is not None and flag.epoch == self.lease.epoch else None

    def next_lease(self) -> Lease | None:
        """Return the lease with which this task goes on once its segment has ended; None: none yet.

        A trial that is to begin from scratch has other files and another run: it waits as others.
        """
        lease = decode(Lease, read_record(self.store.get, LEASE_KEY))
        if lease is None or not is_active(lease, self.record):
            return None
        mine = self.lease
        same = (lease.run_id, lease.anew, lease.pod) == (mine.run_id, mine.anew, mine.pod)
        return lease if same else None

    def notice(self) -> str:
        """Return why and until when it keeps its GPUs; empty while nobody else wants them."""
        return notice_text(self.folder, self.lease.epoch)

    def relay(self, ran_s: float | None = None) -> None:
        """Record the trial's status, if it has changed, or when it began, if the clock was set.

        Where the status does not say when it began, its container's observed start counts.
        """
        status, step_s = self.folder.status(), self.clock_steps.step_s()
        if step_s:
            self.record = replace(self.record, started_s=self.record.started_s + step_s)
        is_new = status != self._recorded_status and status.get("epoch") == self.lease.epoch
        record = with_status(self.record, status) if is_new or step_s else self.record
        if ran_s is not None and ran_s >= SEEN_S:
            record = with_began(record, time.time() - ran_s)
        if is_new or step_s or record != self.record:
            self.record = record
            self._write()
            self._recorded_status = status

    def result(self) -> Mapping[str, Any]:
        """Return how this lease's segment ended, or that the trial had finished; else empty."""
        return result_of(self.folder, self.lease.epoch)

    def may_wait_for_space(self) -> bool:
        """Return whether a trial whose disk is full is tried again without counting a failure."""
        return self._times_without_space() <= MOST_WITHOUT_SPACE

    def _times_without_space(self) -> int:
        """Count the full disks in a row, with this one, that ended it before a new step."""
        record = with_status(self.record, self.folder.status())
        return 1 if record.step > record.steps_at_start else record.without_space + 1

    def pause(
        self,
        outcome: str,
        *,
        failed: bool = False,
        failure: SegmentFailure | None = None,
        resizing: bool = False,
    ) -> None:
        """Record that the segment has ended and that the trial goes on later.

        With `resizing` its task keeps its slots until then.
        """
        self._close(outcome)
        self.record = replace(self._since_new_step(), interruptions=0)
        if failed:
            self._count(failure or SegmentFailure(""))
        self._leave(resizing=resizing)

    def interrupt(
        self, reason: str, *, without_space: bool = False, incomplete: bool = False
    ) -> None:
        """Record that something other than the script has ended the segment: not a failure.

        `incomplete`: not all pods of the trial could start. From then on it gets GPUs of one node
        only, if it takes that few.
        """
        self._close("infrastructure")
        before = self._since_new_step()
        self.record = replace(
            before,
            reason=reason[:REASON_CHARACTERS],
            interruptions=before.interruptions + 1,
            without_space=before.without_space + without_space,
        )
        if incomplete:
            most = max(map(len, self.lease.gpus_by_node.values()), default=0)
            self.record = with_failed_size(self.record, most + 1)
        self._leave()

    def _count(self, failure: SegmentFailure) -> None:
        self.record = with_failure(self.record, failure)
        if self.record.cause == Cause.OTHER.value:
            self.record = with_failed_size(self.record, self.lease.worker_count)

    def _since_new_step(self) -> SegmentRecord:
        """Return the record of the ended segment; a new step resets the counts of interruptions."""
        if self.record.step <= self.record.steps_at_start:
            return self.record
        return replace(self.record, interruptions=0, without_space=0)

    def _leave(self, *, resizing: bool = False) -> None:
        self.record = replace(self.record, resizing=resizing)
        self._write()
        controller_wake_file().wake()
        if resizing:
            self.feed.end_segment()
        else:
            defer(lambda: self.feed.pump_once(ended=True))

    def give_up_resize(self) -> None:
        """Record that the task no longer keeps its slots, and send the remaining metrics."""
        self.record = replace(self.record, resizing=False)
        self._write()
        controller_wake_file().wake()
        defer(lambda: self.feed.pump_once(ended=True))

    def end(self, ending: TrialOutcome, failure: SegmentFailure | None = None) -> None:
        """Record that the trial has ended for good, in the same write as the failure that ends it.

        Otherwise a task that is killed between two writes would be tried once more than allowed.
        """
        self._close(ending.state)
        if failure is not None:
            self.record = replace(self._since_new_step(), interruptions=0)
            self._count(failure)
        reason = ending.reason[:REASON_CHARACTERS]
        self.record = replace(self.record, final=ending.state, reason=reason, resizing=False)
        write_ending(self.folder, ending_of(ending, self.record))
        self._write()
        controller_wake_file().wake()
        self.feed.finish(ending, self.record)

    def _close(self, outcome: str) -> None:
        is_process = self.lease.pod is None  # it has just ended; when a pod has is not known here
        self.record = closed(self.record, self.folder, outcome, is_process, ran_s=self.ran_s)
        if not is_process:
            write_use(self.folder, self.record)

    def _write(self) -> None:
        self.store.set(SEGMENT_KEY, encode(self.record))


def _feed(lease: Lease, folder: TrialFolder) -> MetricFeed:
    return MetricFeed(lease.run_id, folder, objective=(lease.objective, lease.direction))


def result_of(folder: TrialFolder, epoch: int) -> Mapping[str, Any]:
    """Return how that lease's segment ended, or that the trial had finished before; else empty."""
    result = folder.result()
    ours = result.get("epoch") == epoch or result.get("outcome") == "finished"
    return result if ours else {}


def with_failure(record: SegmentRecord, failure: SegmentFailure) -> SegmentRecord:
    """Return the record with one more failure; it keeps the first one in full."""
    first = record.first_failure if record.failures else failure.kept
    return replace(
        record,
        failures=record.failures + 1,
        reason=failure.reason[:REASON_CHARACTERS],
        cause=failure.cause,
        first_failure=first,
    )


def with_failed_size(record: SegmentRecord, workers: int) -> SegmentRecord:
    """Return the record after a failure of that many workers; a single one says nothing of it.

    Nor does a full disk, or a supervisor that was killed: then the failure has no cause.
    """
    if workers < 2 or (record.failed_size is not None and record.failed_size <= workers):
        return record
    return replace(record, failed_size=workers)


def closed(
    record: SegmentRecord,
    folder: TrialFolder,
    outcome: str,
    is_process: bool = False,
    *,
    ran_s: float | None = None,
) -> SegmentRecord:
    """Return the record of an ended segment, with the accounts in the trial's folder.

    A killed process has not written its end: that is now. Of a pod, which can write its folder,
    `ran_s` is the observed run time of its container.
    """
    record = with_status(record, folder.status())
    if is_process:
        segments = folder.end_killed(record.epoch, record.step, time.time())
        accounts = Accounts.from_segments(segments)
    elif record.running:
        accounts = closed_use(folder.segments(), record, ran_s, time.time())
    else:
        accounts = recorded_use(folder.segments(), record)
    return replace(
        accounts.entered_in(record),
        running=False,
        ended_s=time.time(),
        outcome=outcome,
        segments=max(1, accounts.segments),
        preemptions=accounts.preemptions,
    )


def with_status(record: SegmentRecord, status: Mapping[str, Any]) -> SegmentRecord:
    """Return the record with the fields of the trial's status file.

    The script can write that file, and a policy computes with the fields of all sweeps: where one
    is of another type the record stays as it is, as a number does that no trial can measure.
    """
    if status.get("epoch") != record.epoch:
        return record
    given = status.get("timings")
    timings: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    fields = {
        "step": status.get("step") or record.step,
        "preemptible": bool(status.get("preemptible", record.preemptible)),
        "preemptible_reason": str(status.get("preemptible_reason") or "")[:REASON_CHARACTERS],
        "checkpointed_s": status.get("checkpointed_s") or record.checkpointed_s,
        **{name: _first(timings.get(name), getattr(record, name)) for name in _MEASURED},
        "advice": str(status.get("advice") or "")[:ADVICE_CHARACTERS],
        "tensor_skew": _first(status.get("tensor_skew"), record.tensor_skew),
    }
    least = {"epoch": record.epoch, "running": record.running, "started_s": record.started_s}
    read = decode(SegmentRecord, {**least, **fields})
    begun = replace(record, waited_s=_waited_s(record, status.get("started_s")))
    if read is None:
        return begun
    limits = {"step": MOST_STEPS, **dict.fromkeys(_MEASURED, MOST_MEASURED_S)}
    kept = [name for name, most in limits.items() if not 0 <= (getattr(read, name) or 0) <= most]
    return replace(begun, **{name: getattr(read, name) for name in fields if name not in kept})


def _waited_s(record: SegmentRecord, began_s: object) -> float:
    """Return the seconds that the trial's program began after its task; 0 if that is impossible.

    :param began_s: what its status says, in Unix seconds
    """
    if record.waited_s is not None:
        return record.waited_s
    task_s, now_s = record.started_s, time.time()
    if not isinstance(began_s, int | float) or not task_s <= began_s <= task_s + MOST_WAITED_S:
        return 0.0
    return float(max(0.0, min(began_s, now_s) - task_s))  # it has begun by now


def _first(new: object, old: float | None) -> object:
    return new if new is not None else old


def exit_code_reader(folder: TrialFolder, epoch: int) -> Callable[[], int | None]:
    """Return a function that reads the exit code for the result in the trial's folder."""

    def code() -> int | None:
        try:
            result = result_of(folder, epoch)
        except HermesError as error:  # the volume is away for a while
            raise Unavailable(str(error)) from error
        return exit_code_of(result)

    return code


def exit_code_of(result: Mapping[str, Any]) -> int | None:
    """Return the exit code of hermes-trial for the result that it wrote; None without one."""
    outcome = result.get("outcome")
    if not outcome:
        return None
    if result.get("cause") == Cause.INCOMPLETE.value:
        return INCOMPLETE
    if outcome == SegmentOutcome.FINISHED.value:
        return FINISHED
    if outcome in PAUSED:
        return PREEMPTED
    code = abs(int(result.get("exit_code") or 1))
    return code if code not in (INFRASTRUCTURE, PREEMPTED) else 1


DEFERRED_WORK_S = 2.0
"""Seconds for the deferred work of a task, which is done after its slot is free.

Its process must be gone before the task may start again (`trial_task.reschedule_delay_s`)."""

_pending: list[Callable[[], object]] = []


def defer(work: Callable[[], object]) -> None:
    """Have `work` done in the task's process after its state was reported, by Airflow's listener.

    It may be cut off, so it must be repeatable.
    """
    _pending.append(work)


def run_pending() -> None:
    """Do the deferred work, for at most `DEFERRED_WORK_S` seconds."""
    works = _pending[:]
    _pending.clear()
    if works:
        worker = threading.Thread(target=lambda: [work() for work in works], daemon=True)
        worker.start()
        worker.join(DEFERRED_WORK_S)

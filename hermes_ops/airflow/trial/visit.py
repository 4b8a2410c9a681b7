"""One visit of a trial to a slot: what is written down when it begins, goes on and ends."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hermes_ops.airflow.folders import Accounts, Nudge, TrialFolder, controller_nudge
from hermes_ops.airflow.pieces import read_record
from hermes_ops.airflow.records import (
    SEGMENT_KEY,
    STOP_KEY,
    Lease,
    Segment,
    StopFlag,
    decode,
    encode,
)
from hermes_ops.airflow.trial import afterwards
from hermes_ops.airflow.trial.beside import told
from hermes_ops.airflow.trial.metrics import Ending, MetricFeed

REASON_CHARACTERS = 1_000
FIRST_LINES, FIRST_CHARACTERS = 12, 200
"""How much of a trial's first failure its record keeps: its last lines, and of each the start."""


@dataclass(frozen=True, slots=True)
class Failed:
    """How a segment failed: why, with which last lines, and whether trying again may help."""

    reason: str
    tail: tuple[str, ...] = ()
    cause: str = ""
    retryable: bool = True

    @property
    def kept(self) -> tuple[str, ...]:
        """What is kept of it as the first failure of its trial: the reason and the last lines."""
        lines = (self.reason, *self.tail[-FIRST_LINES:])
        return tuple(line[:FIRST_CHARACTERS] for line in lines)


class Store(Protocol):
    """The task's own state store."""

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - JSON
        """The stored value."""

    def set(self, key: str, value: Any, *, retention: Any = None) -> None:  # noqa: ANN401 - JSON
        """Store a value."""


@dataclass(slots=True)
class Visit:
    """Keeps the trial's `Segment` record, and through its feed the trial's MLflow run."""

    store: Store
    lease: Lease
    folder: TrialFolder
    feed: MetricFeed
    record: Segment
    _said: Mapping[str, Any] | None = None

    @classmethod
    def begin(cls, store: Store, lease: Lease, folder: TrialFolder, last: Segment | None) -> Visit:
        """A visit under this lease, after the segment `last`; nothing is written yet."""
        before = last or Segment(0, False, 0.0)
        goes_on = lease.pod is not None and before.running and before.epoch == lease.epoch
        accounts = Accounts.of(folder.segments())
        record = replace(
            before,
            epoch=lease.epoch,
            running=True,
            started_s=before.started_s if goes_on else time.time(),
            ended_s=None,
            outcome="",
            reason="",
            cause="",
            gpus=lease.gpus,
            steps_at_start=before.step,
            spans=accounts.spans,
            service_gpu_s=accounts.service_gpu_s,
            segments=accounts.segments + 1,
            preemptions=accounts.preemptions,
        )
        return cls(store, lease, folder, _feed(lease, folder), record)

    @classmethod
    def after(cls, store: Store, lease: Lease, folder: TrialFolder, last: Segment) -> Visit:
        """The visit of a segment that has ended under `lease` or an earlier lease of its trial."""
        own = replace(lease, epoch=last.epoch, gpus=last.gpus)
        return cls(store, own, folder, _feed(lease, folder), last)

    def nudge(self) -> Nudge:
        """Given when there is a stop flag."""
        return self.folder.nudge()

    def opened(self) -> None:
        """The segment's process has started."""
        self.feed.start()
        self._write()

    def stop_flag(self) -> StopFlag | None:
        """The stop flag of this lease, told or on record; an older one does not count."""
        flag = told(self.folder, self.lease.epoch)
        if flag is not None:
            return flag
        flag = decode(StopFlag, read_record(self.store.get, STOP_KEY))
        return flag if flag is not None and flag.epoch == self.lease.epoch else None

    def relay(self) -> None:
        """Pass on what the trial says of itself, if it says something new."""
        status = self.folder.status()
        if status != self._said and status.get("epoch") == self.lease.epoch:
            self.record = with_status(self.record, status)
            self._write()
            self._said = status

    def result(self) -> Mapping[str, Any]:
        """How this lease's segment ended, or that the trial had finished before; else empty."""
        return result_of(self.folder, self.lease.epoch)

    def pause(self, outcome: str, *, failed: bool = False, failure: Failed | None = None) -> None:
        """The segment has ended and the trial goes on another time."""
        self._close(outcome)
        if failed:
            self.record = with_failure(self.record, failure or Failed(""))
        self._write()
        controller_nudge().give()
        afterwards.do(lambda: self.feed.pump_once(ended=True))

    def end(self, ending: Ending) -> None:
        """The trial has ended for good."""
        self._close(ending.state)
        reason = ending.reason[:REASON_CHARACTERS]
        self.record = replace(self.record, final=ending.state, reason=reason)
        self._write()
        controller_nudge().give()
        self.feed.finish(ending, self.record)

    def _close(self, outcome: str) -> None:
        self.record = closed(self.record, self.folder, outcome)

    def _write(self) -> None:
        self.store.set(SEGMENT_KEY, encode(self.record))


def _feed(lease: Lease, folder: TrialFolder) -> MetricFeed:
    return MetricFeed(lease.run_id, folder, objective=(lease.objective, lease.direction))


def result_of(folder: TrialFolder, epoch: int) -> Mapping[str, Any]:
    """How that lease's segment ended, or that the trial had finished before; else empty."""
    result = folder.result()
    ours = result.get("epoch") == epoch or result.get("outcome") == "finished"
    return result if ours else {}


def with_failure(record: Segment, failure: Failed) -> Segment:
    """The record once one more failure is counted; the first one is kept for those that follow."""
    first = record.first_failure if record.failures else failure.kept
    return replace(
        record,
        failures=record.failures + 1,
        reason=failure.reason[:REASON_CHARACTERS],
        cause=failure.cause,
        first_failure=first,
    )


def closed(record: Segment, folder: TrialFolder, outcome: str) -> Segment:
    """The record once its segment has ended, with the accounts that the trial has kept."""
    accounts = Accounts.of(folder.segments())
    over = replace(
        record,
        running=False,
        ended_s=time.time(),
        outcome=outcome,
        spans=accounts.spans,
        service_gpu_s=accounts.service_gpu_s,
        segments=max(1, accounts.segments),
        preemptions=accounts.preemptions,
    )
    return with_status(over, folder.status())


def with_status(record: Segment, status: Mapping[str, Any]) -> Segment:
    """The record with what the trial's own status file says."""
    if status.get("epoch") != record.epoch:
        return record
    timings = status.get("timings") or {}
    return replace(
        record,
        step=int(status.get("step") or record.step),
        preemptible=bool(status.get("preemptible", record.preemptible)),
        preemptible_reason=str(status.get("preemptible_reason") or ""),
        checkpointed_s=status.get("checkpointed_s") or record.checkpointed_s,
        checkpoint_s=_first(timings.get("checkpoint_s"), record.checkpoint_s),
        restore_s=_first(timings.get("restore_s"), record.restore_s),
        startup_s=_first(timings.get("startup_s"), record.startup_s),
        advice=str(status.get("advice") or ""),
        tensor_skew=_first(status.get("tensor_skew"), record.tensor_skew),
    )


def _first(new: float | None, old: float | None) -> float | None:
    return new if new is not None else old

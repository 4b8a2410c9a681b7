"""Sends a trial's metrics file to MLflow while the trial trains: the run's only writer."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hermes_ops.airflow.accounts import Accounts
from hermes_ops.airflow.folders import (
    TrialFolder,
    counted_segments,
    metrics_wake_file,
)
from hermes_ops.airflow.records import Ending, SegmentRecord
from hermes_ops.core.summary import Segment as SegmentFact
from hermes_ops.errors import HermesError

if TYPE_CHECKING:
    from hermes_ops.tracking import MetricSender, Tracker

log = logging.getLogger(__name__)

LOOK_S, REST_S = 0.1, 0.4
"""Seconds between two checks for new metrics, and after a check that found some."""

DRAIN_S = 20.0
"""How long a finished trial waits for MLflow before it leaves the rest to the report task."""


def tracking_uri() -> str:
    """Return MLflow's address from MLFLOW_TRACKING_URI; HermesError when it is not set."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise HermesError("MLFLOW_TRACKING_URI is not set: set it to the MLflow server's address.")
    return uri


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """How a trial ended for good: its final state, why, and of a failure its last lines.

    `first_failure`: the reason and output of the first failure of a trial that was retried.
    """

    state: str
    reason: str = ""
    tail: tuple[str, ...] = ()
    first_failure: str = ""


@dataclass(slots=True)
class MetricFeed:
    """Sends a trial's metrics in the background; an outage of MLflow only delays them.

    `tracker` is the client of MLflow, by default a new one; `look_s` the seconds between two
    checks of the file, where `LOOK_S` would be too often. `objective` is the metric whose best and
    final value MLflow's table shows, and its direction.
    """

    run_id: str
    folder: TrialFolder
    tracker: Tracker | None = None
    look_s: Callable[[], float] = lambda: LOOK_S
    objective: tuple[str, str] = ("", "minimize")
    _stop: threading.Event = field(default_factory=threading.Event)
    _busy: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _is_size_logged: bool = False  # of the segment under way
    _has_segment_ended: bool = False  # and its record is still to be sent
    _sender: MetricSender | None = None

    def start(self) -> None:
        """Start sending in the background, or go on with it for the trial's next segment."""
        self._is_size_logged = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, daemon=True)
            self._thread.start()

    def end_segment(self) -> None:
        """Send the record of the segment that has ended in the background; the feed goes on."""
        self._has_segment_ended = True

    def pump_once(self, *, ended: bool = False) -> bool:
        """Send the new metrics, if MLflow answers; with `ended` also the segment's record.

        Return whether anything was sent, and wake the controllers if so.
        """
        sent = 0
        with self._busy:
            try:
                sent = self._open().pump()
                if sent:
                    self._log_size()
                if ended and self.tracker is not None:
                    save_segments(self.tracker, self.run_id, self.folder)
                    self._log_columns(self.tracker)
            except (HermesError, OSError) as error:  # MLflow is away, or the volume is full
                log.warning("Metrics stay on disk for now: %s", error)
        if sent:
            metrics_wake_file().wake()
        return sent > 0

    def finish(self, ending: TrialOutcome, record: SegmentRecord) -> None:
        """Send the rest and close the run in that state; the report task repeats what fails."""
        self._stop.set()
        with self._busy:
            try:
                self._open().drain(DRAIN_S)
                if self.tracker is not None:
                    save_segments(self.tracker, self.run_id, self.folder)
                    self._log_columns(self.tracker)
                    finish_run(self.tracker, self.run_id, ending, record)
            except (HermesError, OSError) as error:
                log.warning("The report task will close the run: %s", error)

    def close(self) -> None:
        """Stop the background thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _log_size(self) -> None:
        """Log the GPUs and the batch of the segment under way, once."""
        from hermes_ops.tracking.summary import log_sizes

        if self.tracker is not None and not self._is_size_logged:
            log_sizes(self.tracker, self.run_id, segment_facts(self.folder))
            self._is_size_logged = True

    def _log_columns(self, tracker: Tracker) -> None:
        """Log the columns of the trial in MLflow's table, before its sweep has ended."""
        from hermes_ops.tracking.summary import best_and_final, log_so_far

        segments = counted_segments(self.folder)
        accounts = Accounts.from_segments(segments)
        figures: dict[str, float | None] = {
            **best_and_final(self.folder.metrics, *self.objective),
            "steps": max((s.get("last_step") or 0 for s in segments), default=0),
            "segments": accounts.segments,
            "preemptions": accounts.preemptions,
            "gpu_seconds": accounts.service_gpu_s,
        }
        log_so_far(tracker, self.run_id, figures, int(time.time() * 1_000))

    def _open(self) -> MetricSender:
        if self._sender is None:
            from hermes_ops.tracking import MetricSender, Tracker

            self.tracker = self.tracker or Tracker(tracking_uri())
            self._sender = MetricSender(
                self.run_id, self.folder.metrics, self.folder.sent, self.tracker
            )
        return self._sender

    def _loop(self) -> None:
        pause_s = self.look_s()
        while not self._stop.wait(pause_s):
            ended, self._has_segment_ended = self._has_segment_ended, False
            pause_s = REST_S if self.pump_once(ended=ended) else self.look_s()


def segment_facts(folder: TrialFolder) -> list[SegmentFact]:
    """Return the trial's segments, with the GPUs that each held and when."""
    return [
        SegmentFact(
            trial=int(folder.path.name),
            epoch=int(s.get("epoch", 0)),
            gpus=tuple(int(g) for g in s.get("gpus") or ()),
            start_s=float(s["start_s"]),
            end_s=s.get("end_s"),
            first_step=int(s.get("first_step") or 0),
            last_step=s.get("last_step"),
            outcome=str(s.get("outcome") or ""),
            startup_s=s.get("startup_s"),
            restore_s=s.get("restore_s"),
            batch=s.get("batch"),
        )
        for s in counted_segments(folder)
    ]


def save_segments(tracker: Tracker, run_id: str, folder: TrialFolder) -> None:
    """Store which GPUs each segment held and when, for the report's timeline, and how many."""
    from hermes_ops.tracking.summary import log_sizes

    rows = segment_facts(folder)
    tracker.save_segments(run_id, rows)
    log_sizes(tracker, run_id, rows)


def finish_run(tracker: Tracker, run_id: str, ending: TrialOutcome, record: SegmentRecord) -> None:
    """Write a trial's final state, its totals and, after a failure, its last output lines."""
    tracker.finish(run_id, ending.state, ending_of(ending, record).tags)


def ending_of(ending: TrialOutcome, record: SegmentRecord) -> Ending:
    """Return what MLflow is to know of a trial's end."""
    from hermes_ops.tracking.runs import TIMINGS

    tags = {
        "hermes.segments": str(record.segments),
        "hermes.preemptions": str(record.preemptions),
        "hermes.gpu_seconds": f"{record.service_gpu_s:.3f}",
        "hermes.steps": str(record.step),
        "hermes.ended": f"{record.ended_s or time.time():.3f}",
    }
    for name in TIMINGS:
        if (seconds := getattr(record, name)) is not None:
            tags[f"hermes.{name}"] = f"{seconds:.3f}"
    if ending.reason:
        tags["hermes.reason"] = ending.reason[:1000]
    if ending.tail:
        tags["hermes.output_tail"] = "\n".join(ending.tail)[-4000:]
    if ending.first_failure:
        tags["hermes.first_failure"] = ending.first_failure[:4000]
    if record.cause and ending.state == "failed":
        tags["hermes.cause"] = record.cause
    return Ending(ending.state, tags)

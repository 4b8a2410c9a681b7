"""Learning curves from MLflow, read in the background so that a slow server delays no decision."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hermes_ops.airflow.control.recall import Points
from hermes_ops.airflow.folders import NUDGE_PERIOD_S, Nudge, metrics_nudge
from hermes_ops.errors import HermesError

if TYPE_CHECKING:
    from hermes_ops.airflow.control.books import Plan
    from hermes_ops.tracking import CurveReader, Curves, SweepRef, Tracker

log = logging.getLogger(__name__)

PERIOD_S = 1.0
"""Seconds between two readings when nothing nudges the feed."""

LEAST_S, READING_SHARE = 0.5, 0.1
"""Readings are at least so far apart, and take at most this share of the time."""


@dataclass(slots=True)
class CurveFeed:
    """Reads the curves of the sweeps it is told of, again and again, until closed."""

    tracker: Tracker
    clock: Callable[[], float] = time.time
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _readers: dict[str, tuple[CurveReader, SweepRef]] = field(default_factory=dict)
    _curves: dict[str, Curves] = field(default_factory=dict)
    _read_at: dict[str, float] = field(default_factory=dict)
    _nudge: Nudge = field(default_factory=metrics_nudge)
    _news: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Read in the background from now on."""
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def follow(self, plans: Mapping[str, Plan]) -> None:
        """Read the curves of exactly these sweeps from now on."""
        from hermes_ops.tracking import CurveReader

        with self._lock:
            for gone in set(self._readers) - set(plans):
                for known in (self._readers, self._curves, self._read_at):
                    known.pop(gone, None)
            for sweep, plan in plans.items():
                if sweep not in self._readers:
                    config = plan.config
                    metric, beside = config.objective.metric, config.ending_bounds
                    reader = CurveReader(self.tracker, metric, beside=beside)
                    self._readers[sweep] = (reader, plan.ref)

    def curves(self, sweep: str) -> Mapping[int, Points]:
        """The curves of a sweep by trial number: (step, value, Unix milliseconds)."""
        with self._lock:
            found = self._curves.get(sweep)
        return {} if found is None else found.points

    def beside(self, sweep: str) -> Mapping[str, Mapping[int, Points]]:
        """The same of each metric whose bounds count for the sweep's end, by the metric's name."""
        with self._lock:
            found = self._curves.get(sweep)
        return {} if found is None else found.beside

    def age_s(self, sweep: str) -> float | None:
        """Seconds since MLflow last answered for this sweep; None when it never has."""
        with self._lock:
            at = self._read_at.get(sweep)
        return None if at is None else self.clock() - at

    def newest_s(self) -> float | None:
        """When the newest point of all curves was measured, Unix time; None before the first."""
        with self._lock:
            curves = [points for f in self._curves.values() for points in f.points.values()]
        return max((points[-1][2] / 1000.0 for points in curves if points), default=None)

    def has_news(self) -> bool:
        """True when a curve has changed since the last call."""
        fresh = self._news.is_set()
        self._news.clear()
        return fresh

    def read_once(self) -> None:
        """One round over all sweeps; a server that is away leaves the curves as they are."""
        with self._lock:
            readers = dict(self._readers)
        for sweep, (reader, ref) in readers.items():
            try:
                found = reader.read(ref)
            except Exception as error:  # whatever it is: the curves of others are read
                trace = None if isinstance(error, HermesError) else error
                log.warning("The curves of %s are not read now: %s", sweep, error, exc_info=trace)
                continue
            with self._lock:
                if sweep in self._readers:
                    if _differ(found, self._curves.get(sweep)):
                        self._news.set()
                    self._curves[sweep] = found
                    self._read_at[sweep] = self.clock()

    def close(self) -> None:
        """End the background work."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=15.0)

    def _loop(self) -> None:
        while not self._stop.is_set():
            begun_s = time.monotonic()
            try:
                self.read_once()
            except Exception:  # the thread must live; the next round tries again
                log.exception("Reading curves failed")
            took_s = time.monotonic() - begun_s
            self._pause(begun_s + PERIOD_S, begun_s + max(LEAST_S, took_s / READING_SHARE))

    def _pause(self, due_s: float, nudged_s: float) -> None:
        """Until it is due, or if nudged until then, on the monotonic clock."""
        nudged = False
        while not self._stop.wait(NUDGE_PERIOD_S):
            nudged = nudged or self._nudge.taken()
            if time.monotonic() >= (nudged_s if nudged else due_s):
                return


def _differ(new: Curves, old: Curves | None) -> bool:
    """True when a trial of the objective has another curve: one that stayed is the same object."""
    before: Mapping[int, Points] = {} if old is None else old.points
    return any(before.get(number) is not points for number, points in new.points.items())

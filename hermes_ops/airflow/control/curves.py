"""Learning curves from MLflow, read in the background so that a slow server delays no decision."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hermes_ops.airflow.control.recall import Points
from hermes_ops.errors import HermesError

if TYPE_CHECKING:
    from hermes_ops.airflow.control.books import Plan
    from hermes_ops.tracking import CurveReader, Curves, SweepRef, Tracker

log = logging.getLogger(__name__)

PERIOD_S = 1.0


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

    def read_once(self) -> None:
        """One round over all sweeps; a server that is away leaves the curves as they are."""
        with self._lock:
            readers = dict(self._readers)
        for sweep, (reader, ref) in readers.items():
            try:
                found = reader.read(ref)
            except HermesError as error:
                log.warning("The curves of %s are not read now: %s", sweep, error)
                continue
            with self._lock:
                if sweep in self._readers:
                    self._curves[sweep] = found
                    self._read_at[sweep] = self.clock()

    def close(self) -> None:
        """End the background work."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=15.0)

    def _loop(self) -> None:
        while not self._stop.is_set():
            try:
                self.read_once()
            except Exception:  # the thread must live; the next round tries again
                log.exception("Reading curves failed")
            self._stop.wait(PERIOD_S)

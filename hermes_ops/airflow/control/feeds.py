"""Feeds that are read from MLflow in the background, so that a slow server delays no decision.

These are the learning curves of the sweeps that run, and what earlier sweeps teach.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hermes_ops.airflow.control.jobs import Points
from hermes_ops.airflow.folders import WAKE_POLL_S, WakeFile, metrics_wake_file
from hermes_ops.core.model import PastTrial
from hermes_ops.errors import HermesError
from hermes_ops.search.tree import axes

if TYPE_CHECKING:
    from hermes_ops.airflow.control.sweep_state import SweepSpec
    from hermes_ops.tracking import SweepRef, Tracker
    from hermes_ops.tracking.curves import CurveReader, SweepCurves

log = logging.getLogger(__name__)

CURVE_PERIOD_S = 1.0
"""Seconds between two readings when nothing wakes the feed."""

LEAST_S, READING_SHARE, MOST_PAUSE_S = 0.5, 0.1, 3.0
"""Readings begin at least this far apart, and take at most this share of the time.

But one that was slow, as on a busy machine, is followed by the next one after `MOST_PAUSE_S`: the
policy and early stopping must not decide for long on curves that have grown since.
"""


@dataclass(slots=True)
class CurveFeed:
    """Reads the curves of the sweeps it is told of, again and again, until closed."""

    tracker: Tracker
    clock: Callable[[], float] = time.time
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _readers: dict[str, tuple[CurveReader, SweepRef]] = field(default_factory=dict)
    _curves: dict[str, SweepCurves] = field(default_factory=dict)
    _read_at: dict[str, float] = field(default_factory=dict)
    _wake_file: WakeFile = field(default_factory=metrics_wake_file)
    _news: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Read in the background from now on."""
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def follow(self, specs: Mapping[str, SweepSpec]) -> None:
        """Read the curves of exactly these sweeps from now on."""
        from hermes_ops.tracking.curves import CurveReader

        with self._lock:
            for gone in set(self._readers) - set(specs):
                for by_sweep in (self._readers, self._curves, self._read_at):
                    by_sweep.pop(gone, None)
            for sweep, spec in specs.items():
                if sweep not in self._readers:
                    config = spec.config
                    metric = config.objective.metric
                    constraint_metrics = config.ending_bounds
                    reader = CurveReader(
                        self.tracker, metric, constraint_metrics=constraint_metrics
                    )
                    self._readers[sweep] = (reader, spec.ref)

    def curves(self, sweep: str) -> Mapping[int, Points]:
        """Return the curves of a sweep by trial number: (step, value, Unix milliseconds)."""
        with self._lock:
            sweep_curves = self._curves.get(sweep)
        return {} if sweep_curves is None else sweep_curves.points

    def constraint_metrics(self, sweep: str) -> Mapping[str, Mapping[int, Points]]:
        """Return the points of each metric whose bounds count for the sweep's end, by its name."""
        with self._lock:
            sweep_curves = self._curves.get(sweep)
        return {} if sweep_curves is None else sweep_curves.constraint_metrics

    def age_s(self, sweep: str) -> float | None:
        """Return the seconds since MLflow last answered for this sweep; None when it never has."""
        with self._lock:
            at = self._read_at.get(sweep)
        return None if at is None else self.clock() - at

    def newest_s(self) -> float | None:
        """Return the Unix time of the newest point of all curves; None before the first."""
        with self._lock:
            curves = [points for f in self._curves.values() for points in f.points.values()]
        return max((points[-1][2] / 1000.0 for points in curves if points), default=None)

    def has_news(self) -> bool:
        """Return whether a curve has changed since the last call."""
        fresh = self._news.is_set()
        self._news.clear()
        return fresh

    def read_once(self) -> None:
        """Read the curves of all sweeps once; while the server is away they stay as they are."""
        with self._lock:
            readers = dict(self._readers)
        for sweep, (reader, ref) in readers.items():
            try:
                sweep_curves = reader.fetch(ref)
            except Exception as error:  # whatever it is: the curves of others are read
                trace = None if isinstance(error, HermesError) else error
                log.warning("The curves of %s are not read now: %s", sweep, error, exc_info=trace)
                continue
            with self._lock:
                if sweep in self._readers:
                    if _differ(sweep_curves, self._curves.get(sweep)):
                        self._news.set()
                    self._curves[sweep] = sweep_curves
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
            self._pause(begun_s + CURVE_PERIOD_S, begun_s + woken_after_s(took_s))

    def _pause(self, due_s: float, woken_s: float) -> None:
        """Wait until the reading is due, or until `woken_s` once woken, on the monotonic clock."""
        woken = False
        while not self._stop.wait(WAKE_POLL_S):
            woken = woken or self._wake_file.woken()
            if time.monotonic() >= (woken_s if woken else due_s):
                return


def woken_after_s(took_s: float) -> float:
    """Return the seconds from the begin of a reading, which took so long, to one that is woken."""
    return max(LEAST_S, min(took_s / READING_SHARE, took_s + MOST_PAUSE_S))


def _differ(new: SweepCurves, old: SweepCurves | None) -> bool:
    """Return whether a trial has another curve; one that stayed is the same object."""
    before: Mapping[int, Points] = {} if old is None else old.points
    return any(before.get(number) is not points for number, points in new.points.items())


PRIOR_RETRY_S = 30.0
"""How long an MLflow that did not answer is left alone."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Sweeps that teach each other: one experiment, one objective, one space."""

    experiment: str
    metric: str
    sign: float
    names: tuple[str, ...]
    sometimes: tuple[str, ...]  # parameters under a choice
    total_steps: int | None

    @classmethod
    def from_spec(cls, spec: SweepSpec) -> _Kind:
        objective = spec.config.objective
        names = tuple(sorted(spec.config.search.space))
        every = {name for name, _ in axes(spec.config.search.to_space())}
        return cls(
            spec.record.experiment,
            objective.metric,
            objective.sign,
            names,
            tuple(sorted(every.difference(names))),
            spec.config.budget.max_epochs,
        )


@dataclass(slots=True)
class PriorFeed:
    """Reads the past trials of each followed sweep when it appears and when a like one ends.

    Nothing is read before `start`; until it has been read, and while MLflow is away, a sweep has
    no prior (or the one that was read before), which costs quality only.
    """

    tracker: Tracker
    version: int = 0
    """Counts the changes of `prior`."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wake: threading.Event = field(default_factory=threading.Event)
    _stop: threading.Event = field(default_factory=threading.Event)
    _kinds: dict[str, _Kind] = field(default_factory=dict)
    _held: dict[_Kind, tuple[PastTrial, ...]] = field(default_factory=dict)
    _due: set[_Kind] = field(default_factory=set)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Read in the background from now on; to be asked again does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, daemon=True)
            self._thread.start()

    def follow(self, specs: Mapping[str, SweepSpec]) -> None:
        """Keep the past trials of exactly these sweeps from now on."""
        with self._lock:
            gone = [self._kinds.pop(sweep) for sweep in set(self._kinds) - set(specs)]
            fresh = {s: _Kind.from_spec(p) for s, p in specs.items() if s not in self._kinds}
            self._kinds.update(fresh)
            followed = set(self._kinds.values())
            self._held = {k: past for k, past in self._held.items() if k in followed}
            self._due = (self._due | set(gone) | set(fresh.values())) & followed
            self.version += bool(gone) or bool(fresh)
            if self._due and (gone or fresh):
                self._wake.set()

    def prior(self) -> tuple[PastTrial, ...]:
        """Return the past trials of all kinds of sweeps that are followed.

        One policy serves several sweeps; it tells theirs by the names of the hyper-parameters.
        """
        with self._lock:
            kinds = dict.fromkeys(self._kinds[sweep] for sweep in sorted(self._kinds))
            return tuple(past for kind in kinds for past in self._held.get(kind, ()))

    @property
    def behind(self) -> bool:
        """Return whether something that is due has not been read."""
        with self._lock:
            return bool(self._due)

    def read_once(self) -> None:
        """Read what is due; of what MLflow does not give now it stays due."""
        from hermes_ops.tracking.earlier_sweeps import past_trials

        with self._lock:
            due, self._due = self._due, set()
        for kind in due:
            try:
                past = past_trials(
                    self.tracker,
                    kind.experiment,
                    metric=kind.metric,
                    sign=kind.sign,
                    names=kind.names,
                    sometimes=kind.sometimes,
                    total_steps=kind.total_steps,
                )
            except Exception as error:  # whatever it is: those of others are read
                trace = None if isinstance(error, HermesError) else error
                name = kind.experiment
                log.warning(
                    "Earlier sweeps of %s are not read now: %s", name, error, exc_info=trace
                )
                with self._lock:
                    self._due.add(kind)
                continue
            with self._lock:
                self._held[kind] = past
                self.version += 1

    def close(self) -> None:
        """End the background work."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=15.0)

    def _loop(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            try:
                self.read_once()
            except Exception:  # the thread must live; the next round tries again
                log.exception("Reading earlier sweeps failed")
            self._wake.wait(PRIOR_RETRY_S)

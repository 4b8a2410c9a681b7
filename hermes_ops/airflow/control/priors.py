"""What earlier sweeps teach, read from MLflow in the background: it delays no decision."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hermes_ops.core.history import PastTrial
from hermes_ops.errors import HermesError
from hermes_ops.search.tree import axes

if TYPE_CHECKING:
    from hermes_ops.airflow.control.books import Plan
    from hermes_ops.tracking import Tracker

log = logging.getLogger(__name__)

RETRY_S = 30.0
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
    def of(cls, plan: Plan) -> _Kind:
        objective = plan.config.objective
        names = tuple(sorted(plan.config.search.space))
        every = {name for name, _ in axes(plan.config.search.to_space())}
        return cls(
            plan.record.experiment,
            objective.metric,
            objective.sign,
            names,
            tuple(sorted(every.difference(names))),
            plan.config.budget.max_epochs,
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

    def follow(self, plans: Mapping[str, Plan]) -> None:
        """Keep the past trials of exactly these sweeps from now on."""
        with self._lock:
            gone = [self._kinds.pop(sweep) for sweep in set(self._kinds) - set(plans)]
            fresh = {s: _Kind.of(p) for s, p in plans.items() if s not in self._kinds}
            self._kinds.update(fresh)
            followed = set(self._kinds.values())
            self._held = {k: past for k, past in self._held.items() if k in followed}
            self._due = (self._due | set(gone) | set(fresh.values())) & followed
            self.version += bool(gone) or bool(fresh)
            if self._due and (gone or fresh):
                self._wake.set()

    def prior(self) -> tuple[PastTrial, ...]:
        """The past trials of all kinds of sweeps that are followed.

        One policy serves several sweeps; it tells theirs by the names of the hyper-parameters.
        """
        with self._lock:
            kinds = dict.fromkeys(self._kinds[sweep] for sweep in sorted(self._kinds))
            return tuple(past for kind in kinds for past in self._held.get(kind, ()))

    @property
    def behind(self) -> bool:
        """True while something that is due has not been read."""
        with self._lock:
            return bool(self._due)

    def read_once(self) -> None:
        """Read what is due; of what MLflow does not give now it stays due."""
        from hermes_ops.tracking.history import past_trials

        with self._lock:
            due, self._due = self._due, set()
        for kind in due:
            try:
                found = past_trials(
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
                self._held[kind] = found
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
            self._wake.wait(RETRY_S)

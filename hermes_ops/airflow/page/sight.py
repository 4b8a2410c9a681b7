"""What the page reads, and from where: the database, the controller's files, MLflow."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from hermes_ops.airflow.control.books import Book, Plan
from hermes_ops.airflow.control.publish import read_view
from hermes_ops.airflow.control.running import RunningSweeps
from hermes_ops.airflow.metadata import Metadata, PoolRow
from hermes_ops.airflow.page.progress import ProgressCache
from hermes_ops.airflow.records import SweepRecord, decode
from hermes_ops.errors import HermesError

if TYPE_CHECKING:
    from hermes_ops.tracking import Tracker

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_POOL = "gpus"
SILENCE_S = 10.0
"""How long an MLflow that did not answer is not asked again for what a page can do without."""
FRESH_S = 1.0
"""How long one look serves everybody who has the page open."""


@dataclass(frozen=True, slots=True)
class Look:
    """A pool at one instant: its sweeps, and the controller's newest view (empty without one).

    `row` is None when Airflow has no such pool; `jobs` are the view's facts of each trial, by id.
    """

    pool: str
    time_s: float
    books: Mapping[str, Book]
    row: PoolRow | None
    view: Mapping[str, Any]
    jobs: Mapping[str, Mapping[str, Any]]


@dataclass(slots=True)
class Sight:
    """Reads for all requests of one API server; writes nothing anywhere."""

    metadata: Metadata
    open_tracker: Callable[[], Tracker]
    clock: Callable[[], float] = time.time
    progress: ProgressCache = field(default_factory=ProgressCache)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sweeps: dict[str, RunningSweeps] = field(default_factory=dict)
    _looks: dict[str, Look] = field(default_factory=dict)
    _tracker: Tracker | None = None
    _silent_until_s: float = 0.0

    @classmethod
    def of_airflow(cls) -> Sight:
        """Of the Airflow that runs this process; Unsupported for another version."""
        from hermes_ops.airflow.trial.metrics import tracking_uri

        def open_tracker() -> Tracker:
            from hermes_ops.tracking import Tracker

            return Tracker(tracking_uri())

        metadata = Metadata.from_airflow()
        metadata.check()
        return cls(metadata, open_tracker)

    @property
    def tracker(self) -> Tracker:
        """MLflow; HermesError when nothing says where it is."""
        with self._lock:
            if self._tracker is None:
                self._tracker = self.open_tracker()
            return self._tracker

    def from_mlflow(self, ask: Callable[[Tracker], T]) -> T | None:
        """What MLflow answers; None when it does not, and for some seconds after that.

        A page that is refreshed all the time must not wait for it each time.
        """
        if self.clock() < self._silent_until_s:
            return None
        try:
            return ask(self.tracker)
        except HermesError as error:
            log.warning("MLflow is left out of the page: %s", error)
            self._silent_until_s = self.clock() + SILENCE_S
            return None

    def pools(self) -> tuple[str, ...]:
        """The pools in which sweeps run, and this machine's own, sorted."""
        records = (decode(SweepRecord, run.sweep) for run in self.metadata.sweeps())
        used = {str(r.config.get("pool", DEFAULT_POOL)) for r in records if r is not None}
        return tuple(sorted(used | {os.environ.get("HERMES_POOL", DEFAULT_POOL)}))

    def look(self, pool: str) -> Look:
        """The pool now, or as it was a moment ago."""
        with self._lock:
            known = self._looks.get(pool)
            if known is None or self.clock() - known.time_s > FRESH_S:
                known = self._looks[pool] = self._look(pool)
            return known

    def _look(self, pool: str) -> Look:
        running = self._sweeps.setdefault(pool, RunningSweeps(pool))
        running.read(self.metadata)
        books = {s: Book.read(p, self.metadata, {}) for s, p in running.plans.items()}
        row = self.metadata.pool(pool, [_trials(p) for p in running.plans.values()])
        view = read_view(pool) or {}
        jobs = {j["id"]: j for j in view.get("jobs", ())}
        return Look(pool, self.clock(), books, row, view, jobs)


def _trials(plan: Plan) -> tuple[str, str, str]:
    return plan.run.dag_id, plan.run.run_id, plan.record.trial_task

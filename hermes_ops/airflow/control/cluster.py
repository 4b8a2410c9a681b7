"""The live driver of the decision loop: observes Airflow and MLflow, applies plans as leases."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec

from hermes_ops.airflow.control.abandoned import end_unreadable, settle_abandoned
from hermes_ops.airflow.control.apply import Applier
from hermes_ops.airflow.control.books import Book, Plan
from hermes_ops.airflow.control.curves import CurveFeed
from hermes_ops.airflow.control.decisions import DecisionLog
from hermes_ops.airflow.control.faults import THE_POOL, Done, FaultBarrier, Subject
from hermes_ops.airflow.control.janitor import Janitor
from hermes_ops.airflow.control.overlap import overtaken, replaced
from hermes_ops.airflow.control.pod_janitor import PodJanitor
from hermes_ops.airflow.control.priors import PriorFeed
from hermes_ops.airflow.control.publish import publish
from hermes_ops.airflow.control.running import RunningSweeps, pool_snapshot
from hermes_ops.airflow.folders import NUDGE_PERIOD_S, Nudge, controller_nudge, home
from hermes_ops.airflow.metadata import Metadata
from hermes_ops.airflow.records import CloseRecord
from hermes_ops.core.model import Action, Job, Snapshot
from hermes_ops.core.model import Plan as Allocation

P = ParamSpec("P")

PERIOD_S = 1.0
"""Seconds between two rounds when nothing nudges the controller, no curve has changed and no review
is due."""

UPLOAD = "send its decisions to MLflow"

CURVE_SHARE = 0.2
"""Rounds that only a changed curve calls for take at most this share of the time."""

VIEW_SHARE, QUICK_VIEW_S = 0.05, 0.05
"""A view that takes longer than that to write is written so seldom that it takes this share."""


@dataclass(slots=True)
class AirflowCluster:
    """One pool of an Airflow, as a `Cluster` of the decision loop."""

    pool: str
    metadata: Metadata
    curves: CurveFeed
    applier: Applier
    decisions: DecisionLog
    clock: Callable[[], float] = time.time
    priors: PriorFeed | None = None
    nodes: tuple[str, ...] = ()
    books: dict[str, Book] = field(default_factory=dict)
    _sweeps: RunningSweeps = field(init=False)
    _janitor: Janitor = field(default_factory=Janitor)
    _pod_janitor: PodJanitor = field(default_factory=PodJanitor)
    _nudge: Nudge = field(default_factory=controller_nudge)
    _wake: threading.Event = field(default_factory=threading.Event)
    _under_way: dict[tuple[str, str], Future[Done[None] | None]] = field(default_factory=dict)
    _view_due_s: float = 0.0
    _observed_s: float = 0.0

    def __post_init__(self) -> None:
        self._sweeps = RunningSweeps(self.pool, self.faults)

    def observe(self) -> Snapshot:
        """Read everything, settle what needs no policy, and return the policy's facts."""
        now = self._observed_s = self.clock()
        self.faults.begin_round()
        with self.metadata.in_one_go():
            self._read_books()
        self._end_unreadable(now)
        for book in overtaken(self.books.values()):
            self.applier.close(book, replaced(now))
        for book in self.books.values():
            self.faults.attempt(Subject(book.sweep), "settle it", self.applier.settle, book, now)
        with self.metadata.in_one_go():
            jobs = self._jobs(now)
            snapshot = pool_snapshot(
                self.pool, self.metadata, self.books, now, nodes=self.nodes, jobs=jobs
            )
        return Snapshot(now, (), ()) if self.draining else snapshot

    @property
    def faults(self) -> FaultBarrier:
        """What fails of single sweeps and trials."""
        return self.applier.faults

    def _jobs(self, now_s: float) -> tuple[Job, ...]:
        """The trials of all sweeps as a policy sees them."""
        made = (
            self.faults.attempt(Subject(sweep), "show its trials", book.jobs, now_s)
            for sweep, book in self.books.items()
        )
        return tuple(job for done in made if done is not None for job in done.value)

    def apply(self, snapshot: Snapshot, plan: Allocation, actions: Sequence[Action]) -> None:
        """Grant leases, re-rank, stop; or, while draining, stop everything."""
        try:
            if self.draining:
                self.applier.stop_all(self.books.values(), self.clock())
            else:
                ages = {s: self.curves.age_s(s) for s in self.books}
                self.applier.apply(self.books, snapshot, plan, actions, ages)
        finally:
            self._show(snapshot, plan)

    def _show(self, snapshot: Snapshot, plan: Allocation) -> None:
        """Write the pool's view; that of thousands of trials not in each round."""
        begun_s = self.clock()
        if begun_s < self._view_due_s:
            return
        self.faults.attempt(
            Subject(THE_POOL), "write the pool's view", publish,
            self.pool, snapshot, plan, self.books, self.applier.policy_name,
            faults=self.faults.faults,
        )  # fmt: skip
        took_s = self.clock() - begun_s
        self._view_due_s = begun_s + took_s / VIEW_SHARE if took_s > QUICK_VIEW_S else 0.0

    def wait(self, until_s: float | None) -> None:
        """Send decisions that are done, then sleep until the next round is due.

        That is after a second, or earlier if nudged or woken, or if a curve has changed and the
        last round was short enough.
        """
        self._do_what_nobody_waits_for()
        now = self.clock()
        due_s = now + PERIOD_S if until_s is None else min(now + PERIOD_S, until_s)
        rested_s = self._observed_s + (now - self._observed_s) / CURVE_SHARE
        while not self._wake.wait(NUDGE_PERIOD_S):
            if self._nudge.taken() or self.clock() >= due_s:
                break
            if self.clock() >= rested_s and self.curves.has_news():
                break
        self._wake.clear()

    def _do_what_nobody_waits_for(self) -> None:
        pool, call = Subject(THE_POOL), self.faults.isolate
        call(pool, "write params", self.applier.complete)
        for book in self.books.values():
            run_id = book.plan.record.parent_run_id
            self._later(UPLOAD, book.sweep, self.decisions.upload, book.sweep, run_id)
        for janitor in (self._janitor, self._pod_janitor):
            call(pool, "clean up", janitor.look, self.books.values(), self.clock())

    def _later(
        self, step: str, sweep: str, call: Callable[P, None], *args: P.args, **named: P.kwargs
    ) -> None:
        """Make a call for a sweep while the rounds go on, unless the last one is under way."""
        before = self._under_way.get((sweep, step))
        self._under_way = {k: b for k, b in self._under_way.items() if not b.done()}
        if before is None or before.done():
            made = partial(call, *args, **named)
            begun = self.applier.idle_hands.begin(self.faults.isolate, Subject(sweep), step, made)
            self._under_way[sweep, step] = begun

    def wake(self) -> None:
        """End the current `wait`."""
        self._wake.set()

    def close(self) -> None:
        """Send what is left and stop the background work; no trial is touched."""
        wait(self._under_way.values())
        self.applier.complete(whole=True)
        for book in self.books.values():
            self.decisions.upload(book.sweep, book.plan.record.parent_run_id, force=True)
        self.applier.release()
        self.curves.close()
        if self.priors is not None:
            self.priors.close()
        self.applier.client.close()

    @property
    def draining(self) -> bool:
        """True while the stack is being shut down (the file HERMES_HOME/drain exists)."""
        return (home() / "drain").exists()

    def _read_books(self) -> None:
        ended = self._sweeps.read(self.metadata)
        self.faults.keep({*self._sweeps.plans, *self._sweeps.unreadable})
        for sweep, plan in ended.items():
            self.applier.forget(sweep)
            self._later("settle its end", sweep, self._leave, sweep, plan)
        plans = self._sweeps.plans
        pool = Subject(THE_POOL)
        self.faults.isolate(pool, "follow the curves", self.curves.follow, plans)
        if self.priors is not None:
            self.faults.isolate(pool, "follow earlier sweeps", self.priors.follow, plans)
        read = {
            sweep: self.faults.attempt(Subject(sweep), "read its trials", self._book, sweep, plan)
            for sweep, plan in plans.items()
        }
        self.books = {sweep: done.value for sweep, done in read.items() if done is not None}

    def _end_unreadable(self, now_s: float) -> None:
        """End the sweeps of this pool whose record cannot be read."""
        writer, tracker = self.applier.client, self.applier.tracker
        for run, reason in self._sweeps.hopeless(now_s):
            end = CloseRecord(reason, "cancelled", now_s)
            trials = partial(self.metadata.trials, run)
            self.faults.attempt(
                Subject(run.sweep_id), "end it", end_unreadable, run, end, trials, writer, tracker
            )

    def _leave(self, sweep: str, ended: Plan) -> None:
        """Settle a sweep that runs no more."""
        self.decisions.upload(sweep, ended.record.parent_run_id, force=True)
        settle_abandoned(ended, self.applier.client, self.applier.tracker)

    def _book(self, sweep: str, plan: Plan) -> Book:
        told = self.curves.age_s(sweep) is not None
        curves, beside = self.curves.curves(sweep), self.curves.beside(sweep)
        return Book.read(plan, self.metadata, curves, beside=beside, told=told)

"""The live driver of the decision loop: observes Airflow and MLflow, applies plans as leases."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hermes_ops.airflow.apply import Applier
from hermes_ops.airflow.books import Book, Plan
from hermes_ops.airflow.curves import CurveFeed
from hermes_ops.airflow.decisions import DecisionLog
from hermes_ops.airflow.folders import Nudge, controller_nudge, home
from hermes_ops.airflow.metadata import Metadata, PoolRow, RunRow
from hermes_ops.airflow.priors import PriorFeed
from hermes_ops.airflow.publish import publish
from hermes_ops.core.model import Action, Gpu, Snapshot, SweepId
from hermes_ops.core.model import Plan as Allocation
from hermes_ops.errors import HermesError

log = logging.getLogger(__name__)

PERIOD_S = 1.0
"""Seconds between two rounds when nothing nudges the controller and no review is due."""

NUDGE_PERIOD_S = 0.05


def usable_gpus(pool: PoolRow, held: Sequence[int]) -> tuple[Gpu, ...]:
    """The GPUs that trials may use: the pool's, less as many as other tasks occupy.

    Tasks that are not trials name no GPU, so those that our trials hold are kept before free ones.
    """
    capacity = max(0, pool.slots - pool.foreign_slots)
    mine = sorted({g for g in held if g < pool.slots})
    free = [g for g in range(pool.slots) if g not in mine]
    return tuple(Gpu(i) for i in sorted((mine + free)[:capacity]))


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
    books: dict[str, Book] = field(default_factory=dict)
    _plans: dict[str, Plan] = field(default_factory=dict)
    _not_ours: dict[str, dict[str, Any]] = field(default_factory=dict)
    _nudge: Nudge = field(default_factory=controller_nudge)
    _wake: threading.Event = field(default_factory=threading.Event)

    def observe(self) -> Snapshot:
        """Read everything, settle what needs no policy, and return the policy's facts."""
        now = self.clock()
        self._read_books()
        for book in self.books.values():
            self.applier.settle(book, now)
        jobs = tuple(j for b in self.books.values() for j in b.jobs(now))
        own = [
            (b.plan.run.dag_id, b.plan.run.run_id, b.plan.record.trial_task)
            for b in self.books.values()
        ]
        pool = self.metadata.pool(self.pool, own)
        if pool is None:
            raise HermesError(
                f"Airflow has no pool {self.pool!r}: create it with as many slots as GPUs."
            )
        if self.draining:
            return Snapshot(now, (), ())
        held = [g for j in jobs for g in j.gpus_held]
        return Snapshot(now, usable_gpus(pool, held), jobs)

    def apply(self, snapshot: Snapshot, plan: Allocation, actions: Sequence[Action]) -> None:
        """Grant leases, re-rank, stop; or, while draining, stop everything."""
        if self.draining:
            self.applier.stop_all(self.books.values(), self.clock())
        else:
            ages = {s: self.curves.age_s(s) for s in self.books}
            self.applier.apply(self.books, snapshot, plan, actions, ages)
        publish(self.pool, snapshot, plan, self.books, self.applier.policy_name)

    def wait(self, until_s: float | None) -> None:
        """Send decisions that are done, then sleep until the next round is due.

        That is after a second, or earlier if nudged or woken.
        """
        for book in self.books.values():
            self.decisions.upload(book.sweep, book.plan.record.parent_run_id)
        due_s = self.clock() + PERIOD_S
        due_s = due_s if until_s is None else min(due_s, until_s)
        while not self._wake.wait(NUDGE_PERIOD_S):
            if self._nudge.taken() or self.clock() >= due_s:
                break
        self._wake.clear()

    def wake(self) -> None:
        """End the current `wait`."""
        self._wake.set()

    def close(self) -> None:
        """Send what is left and stop the background work; no trial is touched."""
        for book in self.books.values():
            self.decisions.upload(book.sweep, book.plan.record.parent_run_id, force=True)
        self.curves.close()
        if self.priors is not None:
            self.priors.close()
        self.applier.client.close()

    def early_stop_rules(self) -> tuple[tuple[SweepId, str], ...]:
        """Each sweep's own early-stopping rule, as of the last observation."""
        return tuple(
            (SweepId(s), b.plan.config.early_stop.value) for s, b in sorted(self.books.items())
        )

    def learning_sweeps(self) -> frozenset[SweepId]:
        """The sweeps whose trials get their configurations from earlier results."""
        return frozenset(SweepId(s) for s, book in self.books.items() if book.plan.learns)

    def parallel_limits(self) -> tuple[tuple[SweepId, int], ...]:
        """Each sweep's own limit on trials that train at once, where it has one."""
        limits = ((s, b.plan.config.budget.max_parallel) for s, b in sorted(self.books.items()))
        return tuple((SweepId(s), limit) for s, limit in limits if limit is not None)

    @property
    def draining(self) -> bool:
        """True while the stack is being shut down (the file HERMES_HOME/drain exists)."""
        return (home() / "drain").exists()

    def _read_books(self) -> None:
        runs = {r.run_id: r for r in self.metadata.sweeps()}
        for run_id, run in runs.items():
            if run_id in self._plans or self._not_ours.get(run_id) == run.sweep:
                continue
            plan = self._plan(run)
            if plan is not None and plan.config.pool == self.pool:
                self._plans[run_id] = plan
            else:
                self._not_ours[run_id] = run.sweep
        for gone in set(self._plans) - set(runs):
            ended = self._plans.pop(gone)
            self.decisions.upload(gone, ended.record.parent_run_id, force=True)
        self.curves.follow(self._plans)
        if self.priors is not None:
            self.priors.follow(self._plans)
        self.books = {
            s: Book.read(p, self.metadata, self.curves.curves(s)) for s, p in self._plans.items()
        }

    def _plan(self, run: RunRow) -> Plan | None:
        try:
            return Plan.of(run)
        except HermesError:
            log.exception("The sweep %s cannot be scheduled", run.run_id)
            return None

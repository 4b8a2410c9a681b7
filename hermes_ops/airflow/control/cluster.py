"""The live driver of the decision loop: observes Airflow and MLflow, applies plans as leases."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec

from hermes_ops.airflow.clock_steps import is_due
from hermes_ops.airflow.control.apply import Applier
from hermes_ops.airflow.control.cleanup.janitor import Janitor
from hermes_ops.airflow.control.cleanup.pod_janitor import PodJanitor
from hermes_ops.airflow.control.cleanup.state_retention import PlanValueRetention, StateRetention
from hermes_ops.airflow.control.cleanup.sweep_end import (
    end_deleted,
    end_unreadable,
    overlapped_sweeps,
    replaced_by_newer,
)
from hermes_ops.airflow.control.decisions import DecisionLog
from hermes_ops.airflow.control.faults import THE_POOL, Done, FaultBarrier, Subject
from hermes_ops.airflow.control.feeds import CurveFeed, PriorFeed
from hermes_ops.airflow.control.machine_watch import PoolMachines
from hermes_ops.airflow.control.pool_file import publish
from hermes_ops.airflow.control.quota_settings import QuotaInForce
from hermes_ops.airflow.control.sweep_state import (
    RunningSweeps,
    SweepSpec,
    SweepState,
    leased_gpus,
    pool_snapshot,
)
from hermes_ops.airflow.folders import WAKE_POLL_S, WakeFile, controller_wake_file, home
from hermes_ops.airflow.hosts import unmatched_nodes
from hermes_ops.airflow.metadata import Metadata
from hermes_ops.airflow.records import CloseRecord
from hermes_ops.core.model import Job, Plan, Snapshot
from hermes_ops.core.plan import Action
from hermes_ops.errors import HermesError
from hermes_ops.trial.disk_space import DiskSpace, disks_of

P = ParamSpec("P")

PERIOD_S = 1.0
"""Seconds between two rounds when nothing wakes the controller, no curve has changed and no review
is due."""

START_TRIALS = "start trials"

SET_SLOTS = "set its slots"

FIND_NODES = "find the nodes of its slots"

UPLOAD = "send its decisions to MLflow"

CURVE_SHARE = 0.2
"""Rounds that only a changed curve, or a trial that waits for slots, calls for take at most this
share of the time."""

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
    disks: Callable[[], Sequence[DiskSpace]] = lambda: disks_of((home(), home() / "sweeps"))
    priors: PriorFeed | None = None
    nodes: tuple[str, ...] = ()
    process_refusal: str = ""  # why its Airflow cannot run trials as processes, as far as known
    sweeps: dict[str, SweepState] = field(default_factory=dict)
    quota: QuotaInForce | None = None  # that the policy keeps, if there is one
    machines: PoolMachines = field(default_factory=PoolMachines)
    _running: RunningSweeps = field(init=False)
    _janitor: Janitor = field(init=False)
    _pod_janitor: PodJanitor = field(default_factory=PodJanitor)
    _state_retention: StateRetention = field(init=False)
    _plan_value_retention: PlanValueRetention = field(init=False)
    _wake_file: WakeFile = field(default_factory=controller_wake_file)
    _wake: threading.Event = field(default_factory=threading.Event)
    _unread: dict[str, frozenset[int]] = field(default_factory=dict)
    _under_way: dict[tuple[str, str], Future[Done[None] | None]] = field(default_factory=dict)
    _view_due_s: float = 0.0
    _observed_s: float = 0.0

    def __post_init__(self) -> None:
        self._running = RunningSweeps(self.pool, self.faults, self.machines.machines)
        self._janitor = Janitor(self._is_unfinished)
        self._state_retention = StateRetention(self.metadata, self.applier.client)
        self._plan_value_retention = PlanValueRetention(self.applier.client)

    def adopt_quota(self, quota: QuotaInForce) -> None:
        """Put sweeps into the teams of this quota from now on, and show it."""
        self.quota = quota
        self._running.assign_teams(quota.spec)

    def observe(self) -> Snapshot:
        """Read everything, settle what needs no policy, and return the policy's facts."""
        now = self._observed_s = self.clock()
        self.faults.begin_round()
        self.machines.refresh()
        with self.metadata.single_connection():
            self._read_sweeps()
        self._end_unreadable(now)
        for sweep in overlapped_sweeps(self.sweeps.values()):
            self.applier.close(sweep, replaced_by_newer(now))
        for sweep in self.sweeps.values():
            self.faults.attempt(Subject(sweep.id), "settle it", self.applier.settle, sweep, now)
        if self.draining:  # even if Airflow has no such pool any more: its trials are stopped
            return Snapshot(now, (), ())
        with self.metadata.single_connection():
            snapshot = pool_snapshot(
                self.pool, self.metadata, self.sweeps, now,
                nodes=self.nodes, jobs=self._jobs(now), lendable=self.machines.lendable,
                unread=frozenset().union(*self._unread.values()),
            )  # fmt: skip
        self._note_slots_without_node(snapshot)
        return snapshot

    def _note_slots_without_node(self, snapshot: Snapshot) -> None:
        """Note slots of the pool behind which HERMES_NODES names no node."""
        pool = Subject(THE_POOL)
        slots = [gpu.index for gpu in snapshot.gpus if gpu.index >= len(self.nodes)]
        if slots and self.nodes and self.machines.lendable is None:
            error = f"slot {slots[0]} of the pool {self.pool} {unmatched_nodes(self.nodes)}"
            self.faults.note(pool, FIND_NODES, HermesError(error))
        else:
            self.faults.clear(pool, FIND_NODES)

    @property
    def faults(self) -> FaultBarrier:
        """Return what fails of single sweeps and trials."""
        return self.applier.faults

    def _jobs(self, now_s: float) -> tuple[Job, ...]:
        """Return the trials of all sweeps as a policy sees them."""
        results = (
            self.faults.attempt(Subject(sweep_id), "show its trials", sweep.jobs, now_s, self.nodes)
            for sweep_id, sweep in self.sweeps.items()
        )
        return tuple(job for done in results if done is not None for job in done.value)

    def apply(self, snapshot: Snapshot, plan: Plan, actions: Sequence[Action]) -> None:
        """Grant leases, re-rank, stop; or, while draining, stop everything."""
        try:
            if self.draining:
                self.applier.stop_all(self.sweeps.values(), self.clock())
            else:
                ages = {s: self.curves.age_s(s) for s in self.sweeps}
                due = () if self._is_disk_full() else actions
                self.applier.apply(self.sweeps, snapshot, plan, due, ages)
        finally:
            self._show(snapshot, plan)

    def _is_disk_full(self) -> bool:
        """Tell whether trials have no room now; then none is started, and none makes way for it."""
        pool = Subject(THE_POOL)
        full = next((disk for disk in self.disks() if disk.is_full), None)
        if full is None:
            self.faults.clear(pool, START_TRIALS)
            return False
        self.faults.note(
            pool, START_TRIALS, HermesError(f"the disk of {full.folder} is full: free some space")
        )
        return True

    def _show(self, snapshot: Snapshot, plan: Plan) -> None:
        """Write the pool's view; that of thousands of trials not in each round."""
        begun_s = time.monotonic()  # the clock may be set back
        if begun_s < self._view_due_s:
            return
        self.faults.attempt(
            Subject(THE_POOL), "write the pool's view", publish,
            self.pool, snapshot, plan, self.sweeps, self.applier.policy_name,
            faults=self.faults.faults, process_refusal=self.process_refusal, quota=self.quota,
            machines=self.machines.view(),
        )  # fmt: skip
        took_s = time.monotonic() - begun_s
        self._view_due_s = begun_s + took_s / VIEW_SHARE if took_s > QUICK_VIEW_S else 0.0

    def wait(self, until_s: float | None) -> None:
        """Send decisions that are done, then sleep until the next round is due.

        The next round is due after a second; earlier if `wake` is called, if the clock was set
        back, or if the last round was short and a curve has changed or a trial waits for slots that
        a task is about to leave.
        """
        self._run_upkeep()
        now = self.clock()
        due_s = now + PERIOD_S if until_s is None else min(now + PERIOD_S, until_s)
        rested_s = self._observed_s + (now - self._observed_s) / CURVE_SHARE
        while not self._wake.wait(WAKE_POLL_S):
            if self._wake_file.woken() or is_due(self.clock(), due_s, PERIOD_S):
                break
            if self.clock() >= rested_s and (
                self.applier.waits_for_slots or self.curves.has_news()
            ):
                break
        self._wake.clear()

    def _run_upkeep(self) -> None:
        pool, call = Subject(THE_POOL), self.faults.isolate
        if self.machines.machines.of_slot:
            trials = [t for sweep in self.sweeps.values() for t in sweep.trials]
            follow, client = self.machines.follow, self.applier.client
            self._run_in_background(
                SET_SLOTS, THE_POOL, follow, self.pool, client, trials, self.clock()
            )
        call(pool, "write params", self.applier.complete)
        for sweep in self.sweeps.values():
            run_id = sweep.spec.record.parent_run_id
            self._run_in_background(UPLOAD, sweep.id, self.decisions.upload, sweep.id, run_id)
        call(pool, "clean up", self._janitor.run_if_due, self.sweeps.values(), self.clock())
        unread = {*self._running.specs, *self._running.unreadable} - self.sweeps.keys()
        look = self._pod_janitor.run_if_due
        call(pool, "clean up pods", look, self.sweeps.values(), self.clock(), unread)
        call(pool, "keep its records", self._state_retention.run_if_due, self.clock())
        values, sweeps = self._plan_value_retention, self.sweeps.values()
        call(pool, "keep the values of its plans", values.run_if_due, sweeps, self.clock())

    def _run_in_background(
        self, step: str, sweep_id: str, call: Callable[P, None], *args: P.args, **named: P.kwargs
    ) -> None:
        """Make a call for a sweep while the rounds go on, unless the last one is under way."""
        before = self._under_way.get((sweep_id, step))
        self._under_way = {k: b for k, b in self._under_way.items() if not b.done()}
        if before is None or before.done():
            bound = partial(call, *args, **named)
            future = self.applier.background.submit(
                self.faults.isolate, Subject(sweep_id), step, bound
            )
            self._under_way[sweep_id, step] = future

    def _is_unfinished(self, sweep: str) -> bool:
        """Return whether the sweep with that id, in any pool of this Airflow, has not ended."""
        past = self.metadata.sweep(sweep)
        return past is not None and past.run.state in ("queued", "running")

    def wake(self) -> None:
        """End the current `wait`."""
        self._wake.set()

    def close(self) -> None:
        """Send what is left and stop the background work; no trial is touched."""
        wait(self._under_way.values())
        self.applier.complete(whole=True)
        for sweep in self.sweeps.values():
            self.decisions.upload(sweep.id, sweep.spec.record.parent_run_id, force=True)
        self.applier.release()
        self.curves.close()
        self.machines.close()
        if self.priors is not None:
            self.priors.close()
        self.applier.client.close()

    @property
    def draining(self) -> bool:
        """Return whether the stack is being shut down (the file HERMES_HOME/drain exists)."""
        return (home() / "drain").exists()

    def _read_sweeps(self) -> None:
        ended = self._running.refresh(self.metadata)
        self.faults.keep({*self._running.specs, *self._running.unreadable})
        for sweep_id, spec in ended.items():
            self.applier.forget(sweep_id)
            self._run_in_background("settle its end", sweep_id, self._settle_ended, sweep_id, spec)
        specs = self._running.specs
        pool = Subject(THE_POOL)
        self.faults.isolate(pool, "follow the curves", self.curves.follow, specs)
        if self.priors is not None:
            self.faults.isolate(pool, "follow earlier sweeps", self.priors.follow, specs)
        read = {
            sweep_id: self.faults.attempt(
                Subject(sweep_id), "read its trials", self._fetch_sweep, sweep_id, spec
            )
            for sweep_id, spec in specs.items()
        }
        before = self.sweeps
        self.sweeps = {sweep_id: done.value for sweep_id, done in read.items() if done is not None}
        self._unread = dict(self._read_gpus(before))

    def _read_gpus(self, before: Mapping[str, SweepState]) -> Iterator[tuple[str, frozenset[int]]]:
        """Yield the GPUs of each sweep that could not be read in this round, as far as known.

        Its trials continue to train, so other trials should start on other GPUs first.
        """
        for sweep_id in self._running.specs.keys() - self.sweeps.keys():
            last = before.get(sweep_id)
            gpus = self._unread.get(sweep_id, frozenset()) if last is None else last.gpus_in_use
            yield sweep_id, gpus
        for sweep_id, run in self._running.unread_runs().items():
            subject, step = Subject(sweep_id), "read its leases"
            done = self.faults.isolate(subject, step, leased_gpus, self.metadata, run)
            yield sweep_id, self._unread.get(sweep_id, frozenset()) if done is None else done.value

    def _end_unreadable(self, now_s: float) -> None:
        """End the sweeps of this pool whose record cannot be read."""
        writer, tracker = self.applier.client, self.applier.tracker
        for run, reason in self._running.hopeless():
            end = CloseRecord(reason, "cancelled", now_s)
            trials = partial(self.metadata.trials, run)
            self.faults.attempt(
                Subject(run.sweep_id), "end it", end_unreadable, run, end, trials, writer, tracker
            )

    def _settle_ended(self, sweep_id: str, ended: SweepSpec) -> None:
        """Settle a sweep that has stopped running."""
        self.decisions.upload(sweep_id, ended.record.parent_run_id, force=True)
        end_deleted(ended, self.applier.client, self.applier.tracker)

    def _fetch_sweep(self, sweep_id: str, spec: SweepSpec) -> SweepState:
        curves_read = self.curves.age_s(sweep_id) is not None
        return SweepState.fetch(
            spec,
            self.metadata,
            self.curves.curves(sweep_id),
            constraint_metrics=self.curves.constraint_metrics(sweep_id),
            curves_read=curves_read,
        )

"""Finish-time fairness: no sweep ends much later than on its own share of the GPUs (Themis)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import ceil, floor, inf
from typing import ClassVar

import numpy as np

from hermes_ops.core.amounts import figure
from hermes_ops.core.model import (
    QUEUED_PHASES,
    Job,
    JobId,
    Phase,
    Plan,
    Reason,
    Snapshot,
    Term,
)
from hermes_ops.core.oracle import Oracle
from hermes_ops.core.order import submission
from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.themis.apps import App, AppShare, apps_of
from hermes_ops.policies.themis.job_shares import (
    JobField,
    JobShare,
    fluid_parts,
    predicted_left_s,
)
from hermes_ops.policies.toolbox.answer import answer
from hermes_ops.policies.toolbox.fill import fill
from hermes_ops.policies.toolbox.parameter_checks import one_of, positive
from hermes_ops.policies.toolbox.sweep_queues import searches, serve

__all__ = ["Themis", "ThemisMemory", "predicted_left_s"]

FORMS = ("auto", "offers", "fluid", "simple", "filter")
APPS = ("sweep", "user")
SLACK = 1e-6  # of a lease: times of the driver's clock are rounded


@dataclass(frozen=True, slots=True)
class ThemisMemory:
    """The shares of the open jobs and of the apps, by id, and the time of the newest round."""

    round_s: float = -inf
    shares: tuple[JobShare, ...] = ()
    apps: tuple[AppShare, ...] = ()


@dataclass(frozen=True, slots=True)
class Themis:
    """Give GPUs so that the largest rho, the finish-time fairness, becomes least.

    rho is (elapsed + left) / independent: the time from submission to the end, over the time on an
    own share of the GPUs. The share of one of n is C / n GPUs. GPUs are leased for `lease_s`: at
    its multiples all are given anew, in between only free ones are. `form`:

    * "offers": by apps. Source: Mahajan et al., "Themis", NSDI 2020. An app is a sweep (its jobs
      have hyper-parameters), any other job is one by itself; with `by="user"` it is all that a
      user has. At a lease's end the GPUs are offered to the ceil((1 - `knob`) x n) apps with the
      largest rho, and go job by job to the one whose rho is the largest with what it has so far;
      the others get what these leave.
    * "fluid": by jobs. The parts x of their time that jobs get are those for which the largest
      rho = (elapsed + left / x) / share is least; then the jobs run whose x is largest against the
      part of their time that they had GPUs. Source: Narayanan et al., "Gavel", OSDI 2020.
    * "simple": by jobs, those with the largest rho.
    * "filter": by jobs, of the ceil((1 - `knob`) x n) jobs with the largest rho those with the
      least left, then the others likewise: a form of the auction in which the job that ends first
      wins.
    * "auto": "offers" where there is a sweep, or with `by="user"`; else "fluid".

    Where the paper is silent, or too little of it is public, these are our choices:

    * An app ends when the last of its jobs does: elapsed + max(longest job, GPU time left / GPUs).
      (The paper's app ends with the job that finds the best model, which is not known before.)
    * Its independent time is GPU time / min(share, GPUs that it can use), summed up with the share
      at each time, and no less than its longest job for what is left.
    * Its share is its weight's part of all weights of sweeps; users count alike.
    * In place of bids for sets of GPUs with hidden payments each GPU goes to the largest rho, which
      lowers the product of all rho the most when rho are alike; where GPUs are makes no difference.
    * Within an app those that hold GPUs come first, then those that have begun.

    In a simulation an oracle gives the time left. Live it is predicted (`predicted_seconds`).
    """

    form: str = "auto"
    knob: float = 0.8
    lease_s: float = 120.0
    by: str = "sweep"
    oracle: Oracle | None = None
    name: ClassVar[str] = "themis"
    preempts: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("form", self.form, FORMS)
        one_of("by", self.by, APPS)
        positive("lease_s", self.lease_s)
        if isinstance(self.knob, bool) or not 0 <= self.knob <= 1:
            raise ValueError("knob is a number from 0 to 1")

    def initial(self) -> ThemisMemory:
        """Return a memory without shares."""
        return ThemisMemory()

    def decide(self, snapshot: Snapshot, memory: ThemisMemory) -> tuple[Plan, ThemisMemory]:
        """Return the plan by finish-time fairness; compare those that run when leases end."""
        lease = floor(snapshot.time_s / self.lease_s + SLACK)
        is_known = bool(memory.shares or memory.apps)
        # `!=`, as the clock may be set back: it could take hours to catch up.
        ends = lease != floor(memory.round_s / self.lease_s + SLACK) if is_known else True
        round_s = snapshot.time_s if ends else memory.round_s
        if self._has_apps(snapshot):
            plan, apps = self._by_offers(snapshot, memory.apps, lease_ends=ends)
            after = ThemisMemory(round_s, apps=tuple(sorted(apps, key=lambda share: share.app)))
        else:
            plan, shares = self._by_jobs(snapshot, memory.shares, lease_ends=ends)
            after = ThemisMemory(round_s, shares)
        has_jobs = bool(after.shares or after.apps)
        return replace(plan, review_at_s=(lease + 1) * self.lease_s if has_jobs else None), after

    def _has_apps(self, snapshot: Snapshot) -> bool:
        if self.form != "auto":
            return self.form == "offers"
        return self.by == "user" or bool(searches(snapshot))

    def _by_offers(
        self, snapshot: Snapshot, shares: Sequence[AppShare], *, lease_ends: bool
    ) -> tuple[Plan, list[AppShare]]:
        left_s = None if self.oracle is None else self.oracle.remaining_s
        by_user = self.by == "user"
        apps = apps_of(snapshot, shares, left_s, by_user=by_user, least_s=self.lease_s)
        gpus = len(snapshot.gpus)
        order = offer_order(apps, self.knob, gpus, lease_ends=lease_ends)
        return serve(snapshot, order, AppReasons(apps, gpus).explain), [app.share for app in apps]

    def _by_jobs(
        self, snapshot: Snapshot, shares: Sequence[JobShare], *, lease_ends: bool
    ) -> tuple[Plan, tuple[JobShare, ...]]:
        jobs = sorted(
            (j for j in snapshot.jobs if j.phase not in (Phase.ENDED, Phase.STOPPING)),
            key=submission,
        )
        field = JobField.observed(snapshot, jobs, self._left_s(snapshot, jobs), shares)
        order = [jobs[n] for n in np.argsort(self._ranks(field), kind="stable")]
        if not lease_ends:
            order.sort(key=lambda job: job.id not in snapshot.held)
        rho = dict(zip((job.id for job in jobs), field.rho.tolist(), strict=True))
        waiting = next((job.id for job in order if job.phase in QUEUED_PHASES), None)
        reasons = _FairnessReasons(rho, waiting)
        plan = answer(snapshot, fill(snapshot, order), order, reasons.explain)
        return plan, field.shares(jobs)

    def _left_s(self, snapshot: Snapshot, jobs: Sequence[Job]) -> Floats:
        now_s = snapshot.time_s
        if self.oracle is not None:
            left = [self.oracle.remaining_s(job, now_s) for job in jobs]
        else:
            left = [predicted_left_s(job, now_s, self.lease_s) for job in jobs]
        return np.maximum(np.array(left, dtype=np.float64), 1e-3)

    def _ranks(self, field: JobField) -> Floats:
        """Return a number for each job: the least first."""
        if self.form == "simple":
            return -field.rho
        if self.form in ("auto", "fluid"):
            return -field.claims(fluid_parts(field))
        number = offered_number(self.knob, len(field.rho))
        offered = np.argsort(-field.rho, kind="stable")[:number]
        ranks = field.left_s.copy()
        ranks[offered] -= field.left_s.max(initial=0.0) + 1.0
        return ranks


@dataclass(frozen=True, slots=True)
class _FairnessReasons:
    rho: Mapping[JobId, float]
    waiting: JobId | None

    def explain(self, job: Job, is_granted: bool) -> Reason:
        """Return the reason, with the job's rho."""
        terms = (Term("rho", self.rho.get(job.id, 0.0)),)
        rival = self.waiting if self.waiting != job.id else None
        if is_granted:
            text = "runs: it would end late against its share of the GPUs, or fits beside those"
            return Reason(
                text, terms, rival, "another job falling behind its share, at a lease's end"
            )
        return Reason("waits: others are further behind their share", terms, None, "the next lease")


class AppReasons:
    """The reasons of a decision by apps: how late each would end against its share."""

    def __init__(self, apps: Sequence[App], pool_gpus: int) -> None:
        self._pool_gpus = pool_gpus
        self._app_of = {job.id: app for app in apps for job in app.jobs}
        self._ranked = sorted(apps, key=lambda app: app.rank(pool_gpus))

    def explain(self, job: Job, is_granted: bool) -> Reason:
        """Return the reason, with the rho of the job's app at all GPUs that it can use."""
        app = self._app_of[job.id]
        rho = app.rho(min(app.demand, self._pool_gpus))
        terms = (Term("rho", rho), Term("share_gpus", app.share_gpus))
        late = f"{app.name} would end after {figure(rho)} times its time on its share of the GPUs"
        rival = next((other for other in self._ranked if other is not app and other.jobs), None)
        runner_up = rival.jobs[0].id if rival is not None else None
        if is_granted:
            verb = "runs" if job.holds_gpus else "starts"
            change = "another app falling further behind its share, at a lease's end"
            return Reason(f"{verb}: {late}", terms, runner_up, change)
        return Reason(f"waits: {late}", terms, runner_up, "the next lease")


def offered_number(knob: float, number: int) -> int:
    """Return ceil((1 - `knob`) x `number`) without rounding errors: 3 of 10 for a knob of 0.7."""
    return ceil((1 - knob) * number - 1e-9)


def offer_order(
    apps: Sequence[App], knob: float, pool_gpus: int, *, lease_ends: bool
) -> Iterator[Job]:
    """Yield the jobs of all apps in the order in which GPUs are offered to them.

    At a lease's end all GPUs are offered to the ceil((1 - `knob`) x n) of n apps with the largest
    rho; what they leave goes to the others in the same way. In between jobs keep their GPUs, and
    only free ones are offered. Each offer is given job by job to the app whose rho is the largest
    with what it has been given so far; to those with nothing in the order of their rho with all
    GPUs that they can use. Jobs that must not be stopped count as given and come first.
    """
    ranked = sorted(apps, key=lambda app: app.rank(pool_gpus))
    kept = {app.name: _kept(app, lease_ends=lease_ends) for app in ranked}
    for app in ranked:
        yield from kept[app.name]
    few = offered_number(knob, len(ranked))
    for offered in (ranked[:few], ranked[few:]):
        yield from _to_the_largest_rho(offered, kept)


def _kept(app: App, *, lease_ends: bool) -> list[Job]:
    """Return the jobs whose GPUs are not offered."""
    return [job for job in app.jobs if job.holds_gpus and not (lease_ends and job.preemptible)]


def _to_the_largest_rho(apps: Sequence[App], kept: dict[str, list[Job]]) -> Iterator[Job]:
    lines: list[Iterator[Job]] = []
    heap: list[tuple[float, int]] = []
    given: list[int] = []
    for number, app in enumerate(apps):
        over = {job.id for job in kept[app.name]}
        lines.append(iter([job for job in app.jobs if job.id not in over]))
        given.append(sum(len(job.gpus_held) for job in kept[app.name]))
        heap.append((-app.rho(given[number]), number))
    heapify(heap)
    while heap:
        _, number = heappop(heap)
        job = next(lines[number], None)
        if job is None:
            continue
        yield job
        given[number] += len(job.gpus_held) if job.holds_gpus else job.min_gpus
        heappush(heap, (-apps[number].rho(given[number]), number))

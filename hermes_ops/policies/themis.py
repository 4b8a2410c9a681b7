"""Finish-time fairness: no job ends much later than on its own share of the GPUs (Themis)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

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
from hermes_ops.policies.toolbox.answer import answer
from hermes_ops.policies.toolbox.fill import fill
from hermes_ops.policies.toolbox.parameter_checks import one_of, positive

Floats = NDArray[np.float64]
FORMS = ("fluid", "simple", "filter")
SLACK = 1e-6  # of a lease: times of the driver's clock are rounded
BISECTIONS = 60


@dataclass(frozen=True, slots=True)
class JobShare:
    """A job's time on its share of the GPUs, up to the newest decision.

    `alone_s` is the part of it for what the job has trained: the time alone, times the contention
    while it did so. `left_s` is what was left at that decision, alone on its GPUs.
    """

    job: JobId
    alone_s: float
    left_s: float


@dataclass(frozen=True, slots=True)
class ThemisMemory:
    """The shares of the open jobs, by id, and the time of the newest round."""

    round_s: float = -inf
    shares: tuple[JobShare, ...] = ()


@dataclass(frozen=True, slots=True)
class Themis:
    """Give GPUs so that the largest rho, the finish-time fairness, becomes least.

    rho is (elapsed + left) / share: the time from submission to the end if the job gets its GPUs
    from now on, over its time on its share of the GPUs. The share of n jobs is C / n GPUs each, so
    that a job of g GPUs takes max(1, n g / C) times as long as alone.

    GPUs are leased for `lease_s`: at its multiples all jobs are compared, in between only free
    GPUs are given. `form`:

    * "fluid": the parts x of their time that jobs get are those for which the largest
      rho = (elapsed + left / x) / share is least; then the jobs run whose x is largest against the
      part of their time that they had GPUs. Source: Narayanan et al., "Gavel", OSDI 2020.
    * "simple": the jobs with the largest rho.
    * "filter": of the ceil((1 - `knob`) x n) jobs with the largest rho those with the least left,
      then the others likewise. Source: Mahajan et al., "Themis", NSDI 2020, whose auction has
      the jobs bid for what the filter offers; here the one that ends first wins. Of its hidden
      payments too little is public.

    In a simulation an oracle gives the time left. Live it is predicted: the steps left at the pace
    so far, and as long again as a job has trained where its steps are unknown (ours).
    """

    form: str = "fluid"
    knob: float = 0.8
    lease_s: float = 120.0
    oracle: Oracle | None = None
    name: ClassVar[str] = "themis"
    preempts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("form", self.form, FORMS)
        positive("lease_s", self.lease_s)
        if isinstance(self.knob, bool) or not 0 <= self.knob <= 1:
            raise ValueError("knob is a number from 0 to 1")

    def initial(self) -> ThemisMemory:
        """Return a memory without shares."""
        return ThemisMemory()

    def decide(self, snapshot: Snapshot, memory: ThemisMemory) -> tuple[Plan, ThemisMemory]:
        """Return the plan by finish-time fairness; compare running jobs when leases end."""
        jobs = sorted(
            (j for j in snapshot.jobs if j.phase not in (Phase.ENDED, Phase.STOPPING)),
            key=submission,
        )
        field = _Field.observed(snapshot, jobs, self._left_s(snapshot, jobs), memory)
        lease = floor(snapshot.time_s / self.lease_s + SLACK)
        ends = lease > floor(memory.round_s / self.lease_s + SLACK) if memory.shares else True
        order = [jobs[n] for n in np.argsort(self._ranks(field), kind="stable")]
        if not ends:
            order.sort(key=lambda job: job.id not in snapshot.held)
        rho = dict(zip((job.id for job in jobs), field.rho.tolist(), strict=True))
        waiting = next((job.id for job in order if job.phase in QUEUED_PHASES), None)
        reasons = _FairnessReasons(rho, waiting)
        review_s = (lease + 1) * self.lease_s if jobs else None
        plan = answer(snapshot, fill(snapshot, order), order, reasons.explain, review_s)
        after_s = snapshot.time_s if ends else memory.round_s
        return plan, ThemisMemory(after_s, field.shares(jobs))

    def _left_s(self, snapshot: Snapshot, jobs: Sequence[Job]) -> Floats:
        now_s = snapshot.time_s
        if self.oracle is not None:
            left = [self.oracle.remaining_s(job, now_s) for job in jobs]
        else:
            left = [predicted_left_s(job, now_s, self.lease_s) for job in jobs]
        return np.maximum(np.array(left, dtype=np.float64), 1e-3)

    def _ranks(self, field: _Field) -> Floats:
        """Return a number for each job: the least first."""
        if self.form == "simple":
            return -field.rho
        if self.form == "fluid":
            return -field.claims(fluid_parts(field))
        offered = np.argsort(-field.rho, kind="stable")[: ceil((1 - self.knob) * len(field.rho))]
        ranks = field.left_s.copy()
        ranks[offered] -= field.left_s.max(initial=0.0) + 1.0
        return ranks


def predicted_left_s(job: Job, now_s: float, least_s: float) -> float:
    """Predict the seconds left from the steps left; `least_s` or what it has trained otherwise."""
    trained_s = job.attained_gpu_s(now_s) / job.min_gpus
    if job.total_steps is not None and job.last_step > 0 and job.curve[-1].seconds > 0:
        step_s = job.curve[-1].seconds / job.last_step
        return max(0, job.total_steps - job.last_step) * step_s
    return max(least_s, trained_s)


@dataclass(frozen=True, slots=True, eq=False)
class _Field:
    """What is known of the jobs, in their order; `gpus` are the GPUs of the pool."""

    gpus: int
    demand: Floats
    elapsed_s: Floats
    left_s: Floats
    alone_s: Floats  # for what is done, on the share that each had then
    share_s: Floats  # for all of it
    had_s: Floats  # with GPUs

    @classmethod
    def observed(
        cls, snapshot: Snapshot, jobs: Sequence[Job], left_s: Floats, memory: ThemisMemory
    ) -> _Field:
        """Return the field now, with the training since the last decision added to the shares."""
        gpus, now_s = len(snapshot.gpus), snapshot.time_s
        demand = np.array([job.min_gpus for job in jobs], dtype=np.float64)
        known = {share.job: share for share in memory.shares}
        before = [known.get(job.id) for job in jobs]
        contention = np.maximum(1.0, len(jobs) * demand / max(1, gpus))
        alone_s = np.array([0.0 if b is None else b.alone_s for b in before])
        then_s = np.array(
            [left if b is None else b.left_s for b, left in zip(before, left_s, strict=True)]
        )
        alone_s = alone_s + np.maximum(0.0, then_s - left_s) * contention
        return cls(
            gpus,
            demand,
            np.array([max(0.0, now_s - job.submitted_s) for job in jobs]),
            left_s,
            alone_s,
            alone_s + left_s * contention,
            np.array([job.attained_gpu_s(now_s) / job.min_gpus for job in jobs]),
        )

    @property
    def rho(self) -> Floats:
        """The finish-time fairness of each job if it has its GPUs from now on."""
        return (self.elapsed_s + self.left_s) / self.share_s

    def claims(self, parts: Floats) -> Floats:
        """Return the part of its time that each job is to have over the part that it had."""
        had = self.had_s / np.maximum(self.elapsed_s, 1e-9)
        return parts / np.maximum(had, 1e-9)

    def shares(self, jobs: Iterable[Job]) -> tuple[JobShare, ...]:
        """Return what the next decision needs, by id."""
        rows = zip(jobs, self.alone_s.tolist(), self.left_s.tolist(), strict=True)
        shares = (JobShare(job.id, alone_s, left_s) for job, alone_s, left_s in rows)
        return tuple(sorted(shares, key=lambda share: share.job))


def fluid_parts(field: _Field) -> Floats:
    """Return the part in (0, 1] of its time that each job gets when the largest rho is least.

    By bisection over rho: x = left / (rho share - elapsed) at most 1, and the GPUs suffice.
    """
    if not len(field.left_s):
        return field.left_s
    low = float(field.rho.max())
    if _used(field, low) <= field.gpus:
        return _parts(field, low)
    high = 2.0 * low
    while _used(field, high) > field.gpus and high < 1e12:
        high *= 2.0
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _used(field, middle) > field.gpus else (low, middle)
    return _parts(field, high)


def _parts(field: _Field, rho: float) -> Floats:
    slack_s = np.maximum(rho * field.share_s - field.elapsed_s, field.left_s)
    parts: Floats = field.left_s / slack_s
    return parts


def _used(field: _Field, rho: float) -> float:
    return float(_parts(field, rho) @ field.demand)


@dataclass(frozen=True, slots=True)
class _FairnessReasons:
    rho: Mapping[JobId, float]
    waiting: JobId | None

    def explain(self, job: Job, on: bool) -> Reason:
        """Return the reason, with the job's rho."""
        terms = (Term("rho", self.rho.get(job.id, 0.0)),)
        rival = self.waiting if self.waiting != job.id else None
        if on:
            text = "runs: it would end late against its share of the GPUs, or fits beside those"
            return Reason(
                text, terms, rival, "another job falling behind its share, at a lease's end"
            )
        return Reason("waits: others are further behind their share", terms, None, "the next lease")

"""The time of each job on its own share of the GPUs: finish-time fairness of jobs (Gavel)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hermes_ops.core.model import Job, JobId, Snapshot
from hermes_ops.core.speed_model import Floats

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


def predicted_left_s(job: Job, now_s: float, least_s: float) -> float:
    """Predict the seconds left from the steps left; `least_s` or what it has trained otherwise."""
    trained_s = job.attained_gpu_s(now_s) / job.min_gpus
    if job.total_steps is not None and job.last_step > 0 and job.curve[-1].seconds > 0:
        step_s = job.curve[-1].seconds / job.last_step
        return max(0, job.total_steps - job.last_step) * step_s
    return max(least_s, trained_s)


@dataclass(frozen=True, slots=True, eq=False)
class JobField:
    """Arrays of facts of the jobs, in their order; `gpus` is the number of GPUs of the pool."""

    gpus: int
    demand: Floats
    elapsed_s: Floats
    left_s: Floats
    alone_s: Floats  # for what is done, on the share that each had then
    share_s: Floats  # for all of it
    had_s: Floats  # with GPUs

    @classmethod
    def observed(
        cls, snapshot: Snapshot, jobs: Sequence[Job], left_s: Floats, shares: Iterable[JobShare]
    ) -> JobField:
        """Return the field now, with the training since the last decision added to the shares."""
        gpus, now_s = len(snapshot.gpus), snapshot.time_s
        demand = np.array([job.min_gpus for job in jobs], dtype=np.float64)
        share_of = {share.job: share for share in shares}
        before = [share_of.get(job.id) for job in jobs]
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
        """Return the share of each job, by id, for the policy's memory."""
        rows = zip(jobs, self.alone_s.tolist(), self.left_s.tolist(), strict=True)
        shares = (JobShare(job.id, alone_s, left_s) for job, alone_s, left_s in rows)
        return tuple(sorted(shares, key=lambda share: share.job))


def fluid_parts(field: JobField) -> Floats:
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


def _parts(field: JobField, rho: float) -> Floats:
    slack_s = np.maximum(rho * field.share_s - field.elapsed_s, field.left_s)
    parts: Floats = field.left_s / slack_s
    return parts


def _used(field: JobField, rho: float) -> float:
    return float(_parts(field, rho) @ field.demand)

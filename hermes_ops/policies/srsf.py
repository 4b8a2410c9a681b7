"""Shortest remaining service first: time left times GPUs, known beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.answer import answer
from hermes_ops.core.fill import fill
from hermes_ops.core.model import Job, Plan, Reason, Snapshot, Term
from hermes_ops.core.oracle import Oracle
from hermes_ops.core.order import by_submission


@dataclass(frozen=True, slots=True)
class Srsf:
    """Serve the job with the least GPU time left: seconds times GPUs.

    Each job that still fits runs (greedy fill). Ties go to the job with fewer GPUs, then to the
    first submitted: a choice that reproduces the public simulator of Tiresias, where a job that
    was behind stays behind when the two are even. Source: the clairvoyant baseline of Tiresias
    (NSDI 2019). It needs an oracle.
    """

    oracle: Oracle
    name: ClassVar[str] = "srsf"
    preempts: ClassVar[bool] = True

    def initial(self) -> None:
        """None: it remembers nothing."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Serve the jobs in the order of what is left of them."""
        jobs = by_submission((*snapshot.holding, *snapshot.queue))
        left = {job.id: self._left(job, snapshot.time_s) for job in jobs}
        order = sorted(jobs, key=lambda job: (left[job.id], job.min_gpus))
        grants = fill(snapshot, order)

        def explain(job: Job, runs: bool) -> Reason:
            return _reason(left[job.id], runs)

        return answer(snapshot, grants, order, explain), memory

    def _left(self, job: Job, now_s: float) -> float:
        return self.oracle.remaining_s(job, now_s) * job.min_gpus


def _reason(left_gpu_s: float, runs: bool) -> Reason:
    terms = (Term("remaining_gpu_s", left_gpu_s),)
    if runs:
        return Reason("runs: less GPU time is left of it than of those that wait", terms)
    return Reason("waits: jobs with less GPU time left go first", terms, None, "one of them ending")

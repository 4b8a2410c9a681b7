"""Throughput: the GPUs go where they add most speed-up, short jobs first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.model import Job, Plan, Reason, Snapshot
from hermes_ops.core.order import submission
from hermes_ops.policies.toolbox.planned_sizes import (
    PlannedSizes,
    SpeedPolicy,
    planned,
    speed_up_gain,
    widened,
)
from hermes_ops.policies.toolbox.sized_grants import SizingProblem


@dataclass(frozen=True, slots=True)
class Throughput(SpeedPolicy):
    """Give the next GPUs to the job whose speed-up grows most for each of them.

    Every job gets its least size, the one with the least work left first; then the job with the
    greatest gain of speed-up a GPU is doubled, ties to the least work left. The speed-up is over
    one GPU. With an oracle, speeds and the work left are known. Without one, or with `blind`, jobs
    of a kind share their measured speeds; the work left is that of `total_steps`, and if a job has
    none, the one with the least attained service is first.
    Sizes are planned when a job arrives or ends, and every `interval_s` (with measured speeds 600).

    Our own: `doubling` looks at the time that a job gains, which is larger for a job with more left
    to do; so it widens the jobs that are far from their end.
    """

    name: ClassVar[str] = "throughput"

    def decide(self, snapshot: Snapshot, memory: PlannedSizes) -> tuple[Plan, PlannedSizes]:
        """Return the plan with the greatest speed-up that doubling finds."""
        problem = SizingProblem.from_snapshot(snapshot)
        speeds, interval_s = self.speeds(snapshot), self.period_s
        by_service = not self.known and any(job.total_steps is None for job in problem.jobs)

        def rank(job: Job) -> tuple[float, object]:
            if by_service:
                return job.attained_gpu_s(snapshot.time_s), submission(job)
            return speeds.left(job) / speeds.speed(job, job.min_gpus), submission(job)

        after = planned(
            memory,
            problem,
            interval_s,
            lambda subproblem: widened(
                sorted(subproblem.jobs, key=rank), subproblem.gpus, speed_up_gain(speeds)
            ),
        )
        order = sorted(snapshot.queue, key=rank)
        grants = problem.grants(dict(after.sizes))
        return problem.plan(grants, _reason, order, after.review_s(interval_s)), after


def _reason(job: Job, is_granted: bool) -> Reason:  # noqa: ARG001 - the same for every job
    if is_granted:
        return Reason("runs on as many GPUs as add most to the speed of all jobs")
    return Reason("waits: others have less left to do", would_change="one of them ending")

"""Optimus: one more GPU goes to the job whose remaining time falls the most by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.model import Job, JobId, Plan, Reason, Snapshot
from hermes_ops.core.oracle import Oracle
from hermes_ops.policies.toolbox.job_speeds import packed
from hermes_ops.policies.toolbox.sized_grants import EMPTIEST, SizingProblem
from hermes_ops.policies.toolbox.widening import widened

Seconds = Callable[[Job, int], float]


@dataclass(frozen=True, slots=True)
class Optimus:
    """Give each job its least size by submission, then GPUs by the time that they save.

    The next size goes to the job for which (seconds of a step now - with it) x remaining steps, for
    each GPU added, is the greatest above 0. The batch stays the requested one, and no GPU gets
    less than the least that its user allows. What a job has left and its step times are known.

    Source: Peng et al., "Optimus", EuroSys 2018, section 4, as "Optimus+Oracle" of Qiao et al.,
    "Pollux", OSDI 2021, section 5.1, and its public artefact (petuum/adaptdl, commit c793c70): GPUs
    alone and no parameter servers, all of one kind. A step that saves nothing ends a job's growth.
    """

    oracle: Oracle
    name: ClassVar[str] = "optimus"
    preempts: ClassVar[bool] = True
    sizes: ClassVar[bool] = True

    def initial(self) -> None:
        """Return None: the policy has no memory."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Return the plan; a job whose size stays keeps its GPUs."""
        problem = SizingProblem.from_snapshot(snapshot)
        placements: dict[int, tuple[int, ...]] = {}

        def seconds(job: Job, gpus: int) -> float:
            if gpus not in placements:
                placements[gpus] = packed(snapshot, gpus)
            left = self.oracle.remaining_steps(job, snapshot.time_s)
            return self.oracle.step_s(job, placements[gpus]) * left

        def saved_s(job: Job, size: int, more: int) -> float:
            return (seconds(job, size) - seconds(job, more)) / (more - size)

        sizes = widened(problem.jobs, problem.gpus, saved_s, _larger)
        batches = {job.id: job.requested_batch for job in problem.jobs if job.batch_range}
        grants = problem.grants(sizes, _allowed(problem, sizes, batches), EMPTIEST)
        return problem.plan(grants, _reason), memory


def _larger(job: Job, size: int) -> int | None:
    """Return the next size on which each GPU still gets the least samples of its batch."""
    if job.batch_range is None or job.requested_batch is None:
        return job.size_above(size)
    return job.size_above(size, job.requested_batch // job.batch_range.least_local)


def _allowed(
    problem: SizingProblem, sizes: dict[JobId, int], batches: dict[JobId, int | None]
) -> dict[JobId, int | None]:
    """Return the batches without those that their sizes do not allow: there the job chooses."""
    ranges = {job.id: job.batch_range for job in problem.jobs}
    return {
        job: batch
        for job, batch in batches.items()
        if batch is not None
        and job in sizes
        and (limits := ranges[job]) is not None
        and limits.allows(batch, sizes[job])
    }


def _reason(job: Job, on: bool) -> Reason:  # noqa: ARG001 - the same for every job
    if on:
        return Reason("its GPUs save more time here than with other jobs")
    return Reason("waits for jobs submitted before it", would_change="one of them ending")

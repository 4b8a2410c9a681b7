"""Optimus: one more GPU goes to the job whose remaining time falls the most by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.model import Job, JobId, Plan, Reason, Snapshot
from hermes_ops.core.oracle import Oracle
from hermes_ops.policies.toolbox.job_speeds import packed
from hermes_ops.policies.toolbox.planned_sizes import (
    Gain,
    PlannedSizes,
    SpeedPolicy,
    planned,
    time_gain,
    widened,
)
from hermes_ops.policies.toolbox.sized_grants import EMPTIEST, SizingProblem


@dataclass(frozen=True, slots=True)
class Optimus(SpeedPolicy):
    """Give each job its least size by submission, then GPUs by the time that they save.

    The next size goes to the job for which (seconds of a step now - with it) x remaining steps, for
    each GPU added, is the greatest above 0. The batch stays the requested one, and no GPU gets
    less than the least that its user allows.

    With an oracle the remaining steps and the step times are known, and sizes are planned at every
    decision. Without one, or with `blind`, jobs of a kind share their measured speeds, the steps
    left are those to `total_steps` or to the convergence of the fitted loss curve, and sizes are
    planned when a job arrives or ends and every `interval_s` (600 by default, as in the paper).

    Source: Peng et al., "Optimus", EuroSys 2018, sections 3 and 4; with an oracle as
    "Optimus+Oracle" of Qiao et al., "Pollux", OSDI 2021, section 5.1, and its public artefact
    (petuum/adaptdl, commit c793c70): GPUs alone and no parameter servers, all of one kind. A step
    that saves nothing ends a job's growth. Our choices: all-reduce speeds by the fit of
    `AllReduceSpeed`, where the paper fits parameter servers; a step that does not fit is passed
    over, where the code of the paper ends there; a job whose size stays is not restarted, where
    that code restarts all of them.
    """

    name: ClassVar[str] = "optimus"

    def decide(self, snapshot: Snapshot, memory: PlannedSizes) -> tuple[Plan, PlannedSizes]:
        """Return the plan; a job whose size stays keeps its GPUs."""
        problem, review_s = SizingProblem.from_snapshot(snapshot), None
        if self.oracle is not None and self.known:
            gain = _known_gain(self.oracle, snapshot)
            sizes = problem.solve_sizes(
                lambda subproblem: widened(subproblem.jobs, subproblem.gpus, gain, _larger)
            )
        else:
            gain = time_gain(self.speeds(snapshot))
            memory = planned(
                memory,
                problem,
                self.period_s,
                lambda subproblem: widened(subproblem.jobs, subproblem.gpus, gain, _larger),
            )
            sizes, review_s = dict(memory.sizes), memory.review_s(self.period_s)
        batches = {job.id: job.requested_batch for job in problem.jobs if job.batch_range}
        grants = problem.grants(sizes, _allowed(problem, sizes, batches), EMPTIEST)
        return problem.plan(grants, _reason, None, review_s), memory


def _known_gain(oracle: Oracle, snapshot: Snapshot) -> Gain:
    """Return the seconds saved for each GPU added, by the known steps and step times."""
    placements: dict[int, tuple[int, ...]] = {}

    def seconds(job: Job, gpus: int) -> float:
        if gpus not in placements:
            placements[gpus] = packed(snapshot, gpus)
        left = oracle.remaining_steps(job, snapshot.time_s)
        return oracle.step_s(job, placements[gpus]) * left

    def gain(job: Job, size: int, more: int) -> float:
        return (seconds(job, size) - seconds(job, more)) / (more - size)

    return gain


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


def _reason(job: Job, is_granted: bool) -> Reason:  # noqa: ARG001 - the same for every job
    if is_granted:
        return Reason("its GPUs save more time here than with other jobs")
    return Reason("waits for jobs submitted before it", would_change="one of them ending")

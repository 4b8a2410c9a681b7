"""Elastic FIFO: every job in order of submission at its least size, then the rest in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.model import Job, JobId, Plan, Reason, Snapshot
from hermes_ops.policies.toolbox.sized_grants import SizingProblem


@dataclass(frozen=True, slots=True)
class ElasticFifo:
    """Give the least size in order of submission, then one size more to each in turn.

    A job whose least size does not fit is passed over. The speed-up of a larger size is not looked
    at. Source: Voda scheduler (heyfey/vodascheduler, commit 756e4d0), Elastic-FIFO; there jobs
    that do not fit may be given GPUs in the second pass, here they are not.
    """

    name: ClassVar[str] = "elastic-fifo"
    preempts: ClassVar[bool] = True
    sizes: ClassVar[bool] = True

    def initial(self) -> None:
        """Return None: the policy has no memory."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Return the plan in which all GPUs are used that the jobs can use."""
        problem = SizingProblem.from_snapshot(snapshot)
        return problem.plan(problem.grants(problem.solve_sizes(_sizes)), _reason), memory


def _sizes(problem: SizingProblem) -> dict[JobId, int]:
    """Return the least sizes; the GPUs left give each job in turn its next larger size."""
    sizes, left = least_sizes(problem)
    grew = True
    while left and grew:
        grew = False
        for job in problem.jobs:
            size = sizes.get(job.id, 0)
            more = job.size_above(size, size + left) if size else None
            if more is not None:
                left -= more - size
                sizes[job.id], grew = more, True
    return sizes


def least_sizes(problem: SizingProblem) -> tuple[dict[JobId, int], int]:
    """Give jobs their least size in order of submission; return the sizes, and the GPUs left."""
    sizes: dict[JobId, int] = {}
    left = problem.gpus
    for job in problem.jobs:
        if job.min_gpus <= left:
            sizes[job.id] = job.min_gpus
            left -= job.min_gpus
    return sizes, left


def _reason(job: Job, is_granted: bool) -> Reason:  # noqa: ARG001 - the same for every job
    if is_granted:
        return Reason("has its turn: jobs share the GPUs in order of submission")
    return Reason("waits for jobs submitted before it", would_change="one of them ending")

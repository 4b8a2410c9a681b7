"""Policies that wrap a policy: their base, and the view of jobs of one size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from hermes_ops.core.model import Job, Plan, Policy, Snapshot

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Wrapper(Generic[M]):
    """A policy around a policy, with its name, preemption and memory; a subclass decides."""

    policy: Policy[M]

    @property
    def name(self) -> str:
        """The inner policy's name."""
        return self.policy.name

    @property
    def preempts(self) -> bool:
        """Whether the inner policy stops jobs."""
        return self.policy.preempts

    def initial(self) -> M:
        """Return the inner policy's memory before the first decision."""
        return self.policy.initial()


class OneSize(Wrapper[M]):
    """Show each job with one number of GPUs, for a policy that does not size jobs.

    It is the number that the job holds, else the one that its user requests: a job that another
    policy has widened keeps its GPUs until it is stopped.
    """

    def decide(self, snapshot: Snapshot, memory: M) -> tuple[Plan, M]:
        """Return the inner policy's plan for jobs of one size."""
        if all(job.min_gpus == job.max_gpus for job in snapshot.jobs):
            return self.policy.decide(snapshot, memory)
        groups = (_of_one_size(g) for g in (snapshot.holding, snapshot.queue, snapshot.others))
        holding, queue, others = groups
        fixed = Snapshot.prepared(
            snapshot.time_s, snapshot.gpus, holding=holding, queue=queue, others=others
        )
        return self.policy.decide(fixed, memory)


def _of_one_size(jobs: Sequence[Job]) -> tuple[Job, ...]:
    return tuple(job if job.min_gpus == job.max_gpus else _fixed(job) for job in jobs)


def _fixed(job: Job) -> Job:
    size = len(job.gpus_held) or job.requested_gpus or job.min_gpus
    return replace(job, min_gpus=size, max_gpus=size, sizes=())

"""Policies that wrap a policy: their base, and the view of jobs of one size and batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from hermes_ops.core.model import Grant, Job, JobId, Plan, Policy, Snapshot

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


@dataclass(frozen=True, slots=True)
class OneSize(Wrapper[M]):
    """Show each job with one number of GPUs and one batch, for a policy that does not size jobs.

    Both are what the job holds, else what its user requests: a job that another policy has widened
    keeps its GPUs and its batch until it is stopped. Grants name the batch.
    """

    _shown: dict[JobId, tuple[Job, Job]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # the jobs of the last snapshot as they are, and as shown: most stay the same

    def decide(self, snapshot: Snapshot, memory: M) -> tuple[Plan, M]:
        """Return the inner policy's plan for jobs of one size."""
        if not any(map(_has_choice, snapshot.jobs)):
            return self.policy.decide(snapshot, memory)
        shown = {job.id: (job, self._fixed(job)) for job in snapshot.jobs}
        self._shown.clear()
        self._shown.update(shown)
        groups = (snapshot.holding, snapshot.queue, snapshot.others)
        holding, queue, others = (tuple(shown[job.id][1] for job in jobs) for jobs in groups)
        fixed = Snapshot.prepared(
            snapshot.time_s,
            snapshot.gpus,
            holding=holding,
            queue=queue,
            others=others,
            retained=snapshot.retained,
            held=snapshot.held,
            free=snapshot.free,
        )
        plan, after = self.policy.decide(fixed, memory)
        grants = tuple(_with_batch(grant, snapshot.index.get(grant.job)) for grant in plan.grants)
        return replace(plan, grants=grants), after

    def _fixed(self, job: Job) -> Job:
        """Return the job as shown: the same object as before if nothing of it has changed."""
        before = self._shown.get(job.id)
        if before is not None and before[0] is job:
            return before[1]
        if not _has_choice(job):
            return job
        size = _size(job)
        return replace(job, min_gpus=size, max_gpus=size, sizes=(), batch_range=None)


def _has_choice(job: Job) -> bool:
    return job.min_gpus != job.max_gpus or job.batch_range is not None


def _size(job: Job) -> int:
    numbers = (len(job.gpus_held), job.requested_gpus, job.min_gpus)
    return next((n for n in numbers if n and job.takes(n)), job.min_gpus)


def _with_batch(grant: Grant, job: Job | None) -> Grant:
    """Return the grant with the batch that the job holds, else the one that its user requests."""
    if job is None or job.batch_range is None or grant.batch is not None:
        return grant
    batch = job.batch_held if job.holds_gpus else job.requested_batch
    return grant if batch is None else replace(grant, batch=batch)

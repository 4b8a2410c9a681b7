"""The base of policies that are an order of priority: give a key, get plans with reasons."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from hermes_ops.core.model import Grant, Job, JobId, Plan, Reason, Snapshot, Term
from hermes_ops.core.order import by_submission
from hermes_ops.policies.toolbox.answer import answer
from hermes_ops.policies.toolbox.fill import Chooser, fill, lowest

Key = float | tuple[float, ...]
"""The key by which jobs are ordered, ascending; of a tuple the first number is shown to people."""


@dataclass(frozen=True, slots=True)
class PriorityPolicy(ABC):
    """Serve the jobs in ascending order of a key, each with `min_gpus`; ties go by submission.

    A subclass gives a `name`, a `key` and, in words, what the key is (`measure`). The class
    variables choose the rest: whether running jobs are stopped for jobs that come first
    (`preempts`), and whether a job that fits on what is left runs before a job that comes first
    but does not fit (`backfill`). Reasons follow from the order; they say what the plan did.

    The policy has no memory. The fields of the dataclass, if any, are its parameters.
    """

    name: ClassVar[str]
    measure: ClassVar[str] = "of the key"  # completes "less …", as in "less GPU time left"
    term: ClassVar[str] = "key"  # the name of the number among the terms of a reason
    preempts: ClassVar[bool] = False
    backfill: ClassVar[bool] = True

    @abstractmethod
    def key(self, job: Job, now_s: float) -> Key:
        """Return the job's place in the order: the smallest is served first; never NaN."""

    def initial(self) -> None:
        """Return None: the policy remembers nothing."""
        return

    def order(self, snapshot: Snapshot) -> tuple[Sequence[Job], Mapping[JobId, Key]]:
        """Return the jobs to serve, the first served first, and their keys.

        With `preempts` they are the running and the waiting jobs, else the waiting jobs alone.
        """
        jobs: Sequence[Job] = snapshot.queue
        if self.preempts:
            jobs = by_submission((*snapshot.holding, *snapshot.queue))
        keys = {job.id: self.key(job, snapshot.time_s) for job in jobs}
        return sorted(jobs, key=lambda job: keys[job.id]), keys

    def admitted(self, snapshot: Snapshot, jobs: Sequence[Job]) -> Iterable[Job]:  # noqa: ARG002 - for subclasses
        """Return those of the ordered jobs that may get GPUs now: all of them."""
        return jobs

    def chooser(self, snapshot: Snapshot) -> Chooser:  # noqa: ARG002 - for subclasses
        """Return what picks a starting job's GPUs: those with the lowest indices."""
        return lowest

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Return the plan that serves the jobs in this order."""
        jobs, keys = self.order(snapshot)
        grants = fill(
            snapshot,
            self.admitted(snapshot, jobs),
            backfill=self.backfill,
            preempt=self.preempts,
            choose=self.chooser(snapshot),
        )
        service = ServiceOrder(snapshot, jobs, keys, grants)

        def explain(job: Job, is_granted: bool) -> Reason:
            return self.reason(job, is_granted, service)

        return answer(snapshot, grants, jobs, explain), memory

    def reason(self, job: Job, is_granted: bool, service: ServiceOrder) -> Reason:
        """Return why the job has GPUs by the plan, or has none."""
        if job.holds_gpus and not self.preempts:
            return Reason(f"runs until it ends: {self.name} never stops a job", (), None, "its end")
        terms = (*self._terms(job, service), Term("GPUs needed", job.min_gpus))
        behind = service.first_waiting_before(job)
        if is_granted:
            return self._served(job, terms, behind)
        if behind is not None and not self.backfill:
            text = f"waits behind {behind.id}, which comes first and does not fit yet"
            return Reason(text, terms, behind.id, "a running job ending")
        text = f"waits: the GPUs go to jobs with less {self.measure}, and what is left is too small"
        change = f"one of them ending, or less {self.measure} for this job"
        return Reason(text, terms, None, change)

    def _terms(self, job: Job, service: ServiceOrder) -> tuple[Term, ...]:
        key = service.keys.get(job.id)
        if key is None:
            return ()
        return (Term(self.term, key[0] if isinstance(key, tuple) else key),)

    def _served(self, job: Job, terms: tuple[Term, ...], behind: Job | None) -> Reason:
        verb = "runs" if job.holds_gpus else "starts"
        change = f"a job with less {self.measure}"
        if not job.preemptible and job.holds_gpus:
            return Reason("runs until it ends: it must not be stopped", terms, None, "its end")
        if behind is None:
            text = f"{verb}: it has less {self.measure} than all that wait"
            return Reason(text, terms, None, change)
        text = f"{verb}: it fits on GPUs that {behind.id}, which comes first, cannot use"
        return Reason(text, terms, behind.id, f"enough GPUs for {behind.id}")


@dataclass(frozen=True)
class ServiceOrder:
    """One order of the jobs and the grants that came of it; the views are for reasons."""

    snapshot: Snapshot
    jobs: Sequence[Job]
    keys: Mapping[JobId, Key]
    grants: Collection[Grant]

    def first_waiting_before(self, job: Job) -> Job | None:
        """Return the first waiting job if it comes before this job in the order, or None.

        Jobs larger than the whole pool do not count: they block nobody.
        """
        first, not_behind = self._head
        return None if job.id in not_behind else first

    def place_in_line(self, job: Job) -> int:
        """Return the job's place, from 1, among the jobs that wait and fit into the pool."""
        return self._line[job.id]

    @cached_property
    def _line(self) -> Mapping[JobId, int]:
        return {job.id: place for place, job in enumerate(self._waiting, start=1)}

    @cached_property
    def _head(self) -> tuple[Job | None, Collection[JobId]]:
        """The first job that waits, and the ids up to it; a long queue is read no further."""
        seen: set[JobId] = set()
        for job in self.jobs:
            seen.add(job.id)
            if self._is_waiting(job):
                return job, seen
        return None, seen

    @cached_property
    def _waiting(self) -> Sequence[Job]:
        return [job for job in self.jobs if self._is_waiting(job)]

    @cached_property
    def _granted(self) -> Collection[JobId]:
        return {grant.job for grant in self.grants}

    def _is_waiting(self, job: Job) -> bool:
        return job.min_gpus <= len(self.snapshot.gpus) and job.id not in self._granted

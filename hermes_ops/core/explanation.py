"""Complete the reasons of a plan: the runner-up, and what would have changed each choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from hermes_ops.core.model import (
    QUEUED_PHASES,
    Job,
    JobId,
    LazyReasons,
    Phase,
    Plan,
    Reason,
    Snapshot,
)


def explained(snapshot: Snapshot, plan: Plan) -> Plan:
    """Return the plan with reasons that name a runner-up, where there is one, and a change.

    What the policy says itself stays. Otherwise the runner-up of a job that has GPUs is the first
    of the ranking; of a job that is stopped, the job that takes its GPUs; of a job that waits, the
    one before it in the ranking, and for the first one the job that the plan grants GPUs last.
    A job that has ended or is stopping has neither: nothing is decided about it.
    """
    completion = _Completion(snapshot, plan)
    return replace(plan, reasons=LazyReasons(plan.reasons, completion.reason))


@dataclass(frozen=True)
class _Completion:
    """One plan, with what several of its reasons share."""

    snapshot: Snapshot
    plan: Plan

    def reason(self, job_id: JobId) -> Reason:
        """Return the completed reason of a job of the plan's reasons."""
        reason, job = self.plan.reasons[job_id], self.snapshot.index.get(job_id)
        if job is None or job.phase in (Phase.ENDED, Phase.STOPPING):
            return reason
        runner_up = reason.runner_up or self._runner_up(job)
        change = reason.would_change or self._change(job, runner_up)
        return replace(reason, runner_up=runner_up, would_change=change)

    def _runner_up(self, job: Job) -> JobId | None:
        if job.id in self._granted:
            return next((other for other in self.plan.ranking if other != job.id), None)
        if job.id in self.plan.ends:
            return None
        if job.phase in QUEUED_PHASES:
            return self._before(job.id)
        return next((self._users[gpu] for gpu in job.gpus_held if gpu in self._users), None)

    def _before(self, job_id: JobId) -> JobId | None:
        place = self._places.get(job_id, len(self.plan.ranking))
        if place > 0:
            return self.plan.ranking[place - 1]
        return self.plan.grants[-1].job if self.plan.grants else None

    def _change(self, job: Job, runner_up: JobId | None) -> str:
        if job.id in self._granted:
            return f"its end, or {runner_up} coming before it" if runner_up else "its end"
        if job.phase in QUEUED_PHASES:
            return "a GPU becoming free"
        return f"coming before {runner_up}" if runner_up else "another decision of the policy"

    @cached_property
    def _granted(self) -> Mapping[JobId, tuple[int, ...]]:
        return {grant.job: grant.gpus for grant in self.plan.grants}

    @cached_property
    def _users(self) -> Mapping[int, JobId]:
        return {gpu: job for job, gpus in self._granted.items() for gpu in gpus}

    @cached_property
    def _places(self) -> Mapping[JobId, int]:
        return {job: place for place, job in enumerate(self.plan.ranking)}

"""From grants and a line of waiting jobs to a plan that says why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from hermes_ops.core.model import (
    Grant,
    Job,
    JobId,
    LazyReasons,
    Phase,
    Plan,
    Reason,
    Snapshot,
)

RANKED = 64  # a ranking's head: what may start next is there
QUEUED = (Phase.PENDING, Phase.WAITING)

Explain = Callable[[Job, bool], Reason]
"""Why a job has GPUs by this plan (True), or has none (False)."""


def answer(
    snapshot: Snapshot,
    grants: tuple[Grant, ...],
    line: Iterable[Job],
    explain: Explain,
    review_at_s: float | None = None,
) -> Plan:
    """The plan with these grants; `line` is everybody in order of priority, and may be lazy.

    `explain` is asked only for reasons that somebody reads.
    """
    granted: set[JobId] = set()

    def has(job: JobId) -> bool:
        if not granted:
            granted.update(grant.job for grant in grants)
        return job in granted

    waiting = (job.id for job in line if job.phase in QUEUED and not has(job.id))
    ranking = tuple(islice(waiting, RANKED))

    def reason(job_id: JobId) -> Reason:
        job = snapshot.index[job_id]
        return plain(snapshot, job) or explain(job, has(job_id))

    return Plan(
        grants,
        ranking=ranking,
        review_at_s=review_at_s,
        reasons=LazyReasons(_ids(snapshot), reason),
    )


def plain(snapshot: Snapshot, job: Job) -> Reason | None:
    """The reasons that no policy can change; None for a job that a policy decides about."""
    if job.phase is Phase.ENDED:
        return Reason("has ended")
    if job.phase is Phase.STOPPING:
        return Reason("is stopping: it waits from then on")
    if job.holds_gpus and job.id not in snapshot.held:
        return Reason("stops: its GPUs left the pool or another job has them")
    if not job.holds_gpus and job.min_gpus > len(snapshot.gpus):
        return Reason("waits: it needs more GPUs than the pool has", would_change="a larger pool")
    return None


def _ids(snapshot: Snapshot) -> dict[JobId, Job]:
    index = snapshot.index
    return index if isinstance(index, dict) else dict(index)

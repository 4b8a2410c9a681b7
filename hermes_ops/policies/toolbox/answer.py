"""Make a plan with reasons from grants and an order of jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from operator import attrgetter

from hermes_ops.core.model import QUEUED_PHASES, Grant, Job, JobId, Phase, Plan, Reason, Snapshot
from hermes_ops.core.nodes import unplaceable
from hermes_ops.core.plan import LazyReasons

RANKED = 32  # a ranking's head: what may start next is there

Explain = Callable[[Job, bool], Reason]
"""Why a job has GPUs by this plan (True), or has none (False)."""

_job = attrgetter("job")


def answer(
    snapshot: Snapshot,
    grants: tuple[Grant, ...],
    order: Iterable[Job],
    explain: Explain,
    review_at_s: float | None = None,
) -> Plan:
    """Return the plan with these grants; `order` has all waiting jobs, next first, maybe lazily.

    `explain` is called only for reasons that are read.
    """
    granted: set[JobId] = set(map(_job, grants))
    waiting = (job.id for job in order if job.phase in QUEUED_PHASES and job.id not in granted)
    ranking = tuple(islice(waiting, RANKED))

    def reason(job_id: JobId) -> Reason:
        job = snapshot.index[job_id]
        return forced_reason(snapshot, job) or explain(job, job_id in granted)

    reasons = LazyReasons(snapshot.index, reason)
    return Plan(grants, ranking=ranking, review_at_s=review_at_s, reasons=reasons)


def forced_reason(snapshot: Snapshot, job: Job) -> Reason | None:
    """Return the reason that no policy can change; None for a job that a policy decides about."""
    if job.phase is Phase.ENDED:
        return Reason("has ended")
    if job.phase is Phase.STOPPING:
        return Reason("is stopping: it waits from then on")
    if job.holds_gpus and job.id not in snapshot.retained:
        text = "stops: its GPUs left the pool or another job has them"
        return Reason(text, would_change="those GPUs back in the pool")
    if not job.holds_gpus and job.min_gpus > len(snapshot.gpus):
        return Reason("waits: it needs more GPUs than the pool has", would_change="a larger pool")
    if job.nodes and not job.holds_gpus and unplaceable(snapshot, job):
        return _away(job)
    return None


def _away(job: Job) -> Reason:
    """Return why a job waits whose nodes are not in the pool, or are too small for it."""
    text = f"waits: its checkpoints are on {' or '.join(job.nodes)}, where the pool has "
    text += "no GPU" if job.min_gpus == 1 else f"no {job.min_gpus} GPUs"
    change = "that node back in the pool, or clearing the trial with --from-scratch"
    return Reason(text, would_change=change)

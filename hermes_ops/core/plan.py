"""Refuse an impossible plan; turn a possible one into actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hermes_ops.core.model import (
    SHARE_EPS,
    Action,
    Grant,
    Job,
    JobId,
    Phase,
    Plan,
    Reason,
    Resize,
    Snapshot,
    Start,
    Stop,
)
from hermes_ops.core.order import by_submission
from hermes_ops.core.placement import holdings
from hermes_ops.errors import PlanError

_UNEXPLAINED = Reason("the policy gave no reason")


def check(snapshot: Snapshot, plan: Plan) -> None:
    """Raise PlanError when the plan cannot be applied to this snapshot; change nothing.

    Refused: an unknown job; a grant to a job that has ended, is stopping, is ended by the same
    plan or has another grant; a GPU that is not in the snapshot or is given twice; a number of
    GPUs outside the job's range; a non-preemptible running job dropped or moved, unless it is
    ended or its GPUs cannot be kept (`holdings`).
    """
    jobs = snapshot.index
    for job_id in (*(g.job for g in plan.grants), *plan.ends, *plan.ranking):
        _require(job_id in jobs, f"{job_id} is not a job of the snapshot")
    for job_id in plan.ends:
        _require(jobs[job_id].phase is not Phase.ENDED, f"{job_id} is to be ended, but has ended")
    _check_grants(snapshot, plan, jobs)
    granted = {grant.job: tuple(sorted(grant.gpus)) for grant in plan.grants}
    for job_id, gpus in holdings(snapshot).items():
        job = jobs[job_id]
        if job.phase is Phase.RUNNING and not job.preemptible and job_id not in plan.ends:
            kept = granted.get(job_id) == gpus
            _require(kept, f"{job_id} runs and is not preemptible, but loses GPUs {gpus}")


def diff(snapshot: Snapshot, plan: Plan) -> tuple[Action, ...]:
    """The actions that lead from the snapshot to the plan: Stop, then Resize, then Start.

    Each kind is in the order of submission. A job that holds GPUs and has no grant is stopped,
    a STARTING one too. Another number of GPUs gives Resize; as many but other GPUs give Stop, and
    the job starts on the new ones in a later round, once it waits.
    """
    granted = {grant.job: grant for grant in plan.grants}
    ends = set(plan.ends)
    stops: list[Action] = []
    resizes: list[Action] = []
    starts: list[Action] = []
    holding = {job.id for job in snapshot.holding}
    fresh = [snapshot.index[j] for j in {*granted, *ends} if j not in holding]
    for job in by_submission((*_touched(snapshot, granted, ends), *fresh)):
        reason = plan.reasons.get(job.id, _UNEXPLAINED)
        grant = granted.get(job.id)
        if job.id in ends:
            stops.append(Stop(job.id, reason, final=True))
        elif not job.holds_gpus:
            starts += [Start(g.job, g.gpus, reason, g.batch_size, g.share) for g in (grant,) if g]
        elif grant is None or _moved(job, grant):
            stops.append(Stop(job.id, reason))
        else:
            resizes.append(Resize(job.id, grant.gpus, reason, grant.batch_size, grant.share))
    return (*stops, *resizes, *starts)


def _touched(snapshot: Snapshot, granted: Mapping[JobId, Grant], ends: set[JobId]) -> Iterator[Job]:
    """The jobs that hold GPUs and for which the plan changes something."""
    for job in snapshot.holding:
        grant = granted.get(job.id)
        kept = grant is not None and grant.share == job.share_held and job.id not in ends
        if not (kept and grant and (grant.gpus == job.gpus_held or _same(grant, job))):
            yield job


def _same(grant: Grant, job: Job) -> bool:
    return set(grant.gpus) == set(job.gpus_held)


def _moved(job: Job, grant: Grant) -> bool:
    same_number = len(grant.gpus) == len(job.gpus_held)
    return same_number and not _same(grant, job)


def _check_grants(snapshot: Snapshot, plan: Plan, jobs: Mapping[JobId, Job]) -> None:
    left = {gpu.index: 1.0 for gpu in snapshot.gpus}
    seen: set[JobId] = set()
    for grant in plan.grants:
        job = jobs[grant.job]
        _require(job.id not in seen, f"{job.id} has two grants")
        seen.add(job.id)
        _require(job.id not in plan.ends, f"{job.id} has a grant and is to be ended")
        leaving = job.phase in (Phase.ENDED, Phase.STOPPING)
        _require(not leaving, f"{job.id} has a grant, but is {job.phase.value}")
        in_range = job.min_gpus <= len(grant.gpus) <= job.max_gpus
        allowed = f"{job.min_gpus} to {job.max_gpus}"
        _require(in_range, f"{job.id} is given {len(grant.gpus)} GPUs, it takes {allowed}")
        _require(0 < grant.share <= 1, f"{job.id} is given a share of {grant.share}")
        for gpu in grant.gpus:
            _require(gpu in left, f"{job.id} is given GPU {gpu}, which the pool does not have")
            left[gpu] -= grant.share
            _require(left[gpu] >= -SHARE_EPS, f"{job.id} is given GPU {gpu}, which is given twice")


def _require(condition: bool, fact: str) -> None:
    if not condition:
        raise PlanError(f"{fact}; nothing was applied: report this as a defect of the policy")

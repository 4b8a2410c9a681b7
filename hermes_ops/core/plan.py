"""Refuse an impossible plan; turn a possible one into actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, compress
from operator import attrgetter, is_not
from typing import NamedTuple

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
from hermes_ops.core.nodes import at_home
from hermes_ops.core.order import by_submission
from hermes_ops.errors import PlanError

_JOB, _GPUS, _INDEX = attrgetter("job"), attrgetter("gpus"), attrgetter("index")
_UNEXPLAINED = Reason("the policy gave no reason")


def check(snapshot: Snapshot, plan: Plan) -> None:
    """Raise PlanError when the plan cannot be applied to this snapshot; change nothing.

    Refused: an unknown job; a grant to a job that has ended, is stopping, is ended by the same
    plan or has another grant; a GPU that is not in the snapshot or is given twice; a number of
    GPUs outside the job's range, or of nodes on which it may not run; a non-preemptible running
    job dropped or moved, unless it is ended or its GPUs cannot be kept (`Snapshot.stays`).
    """
    jobs, ends = snapshot.index, set(plan.ends)
    changes = _changes(snapshot, plan)
    fresh, lost, doubled = changes
    known = jobs.__contains__
    if not (all(map(known, plan.ranking)) and all(map(known, ends))):
        _refuse_unknown(jobs, (*plan.ranking, *plan.ends))
    for job_id in ends:
        if jobs[job_id].phase is Phase.ENDED:
            raise _impossible(f"{job_id} is to be ended, but has ended")
        if job_id not in lost and job_id in snapshot.stays:
            raise _impossible(f"{job_id} has a grant and is to be ended")
    if doubled:
        raise _impossible(f"{_doubled(plan)} has two grants")
    if fresh:
        _check_fresh(snapshot, plan, changes, ends)
    _check_firm(snapshot, fresh, lost.difference(ends))


def diff(snapshot: Snapshot, plan: Plan) -> tuple[Action, ...]:
    """The actions that lead from the snapshot to the plan: Stop, then Resize, then Start.

    Each kind is in the order of submission. A job that holds GPUs and has no grant is stopped,
    a STARTING one too. Another number of GPUs gives Resize; as many but other GPUs give Stop, and
    the job starts on the new ones in a later round, once it waits.
    """
    fresh, lost, _ = _changes(snapshot, plan)
    granted = {grant.job: grant for grant in fresh}
    ends = set(plan.ends)
    stops: list[Action] = []
    resizes: list[Action] = []
    starts: list[Action] = []
    affected = lost.union(granted, ends)
    if len(snapshot.stays) < len(snapshot.holding):  # a drift: some hold what they cannot keep
        affected.update(job.id for job in snapshot.holding if job.id not in snapshot.stays)
    for job in by_submission(snapshot.index[job_id] for job_id in affected):
        reason = plan.reasons.get(job.id, _UNEXPLAINED)
        grant = granted.get(job.id)
        if job.id in ends:
            stops.append(Stop(job.id, reason, final=True))
        elif not job.holds_gpus:
            starts += [Start(g.job, g.gpus, reason, g.share) for g in (grant,) if g]
        elif grant is None or _moved(job, grant):
            stops.append(Stop(job.id, reason))
        elif not (grant.share == job.share_held and _same(grant, job)):
            resizes.append(Resize(job.id, grant.gpus, reason, grant.share))
    return (*stops, *resizes, *starts)


class _Changes(NamedTuple):
    """The grants that are not what a job keeps, who keeps nothing, and if one has two grants."""

    fresh: list[Grant]
    lost: set[JobId]
    doubled: bool


def _changes(snapshot: Snapshot, plan: Plan) -> _Changes:
    """What the plan changes: most plans change little.

    Kept with the snapshot, beside its views, as `check` and `diff` both ask for it.
    """
    grants, before = plan.grants, snapshot.__dict__.get("changes")
    if before is not None and before[0] is grants:
        found: _Changes = before[1]
        return found
    found = _compared(snapshot.stays, grants)
    snapshot.__dict__["changes"] = (grants, found)
    return found


def _compared(stays: Mapping[JobId, Grant], grants: tuple[Grant, ...]) -> _Changes:
    if grants[: len(stays)] == tuple(stays.values()):  # quick: equal parts are the same objects
        new = grants[len(stays) :]
        named = set(map(_JOB, new))
        return _Changes(list(new), set(), len(named) < len(new) or not named.isdisjoint(stays))
    line = list(map(_JOB, grants))
    fresh = compress(grants, map(is_not, grants, map(stays.get, line)))
    named = set(line)
    return _Changes(
        [grant for grant in fresh if stays.get(grant.job) != grant],
        stays.keys() - named,
        len(named) < len(line),
    )


def _doubled(plan: Plan) -> JobId:
    """The job that has the most grants."""
    return Counter(grant.job for grant in plan.grants).most_common(1)[0][0]


def _same(grant: Grant, job: Job) -> bool:
    return grant.gpus == job.gpus_held or set(grant.gpus) == set(job.gpus_held)


def _moved(job: Job, grant: Grant) -> bool:
    same_number = len(grant.gpus) == len(job.gpus_held)
    return same_number and not _same(grant, job)


def _refuse_unknown(jobs: Mapping[JobId, Job], named: Iterable[JobId]) -> None:
    unknown = next(job_id for job_id in named if job_id not in jobs)
    raise _impossible(f"{unknown} is not a job of the snapshot")


def _check_fresh(
    snapshot: Snapshot, plan: Plan, changes: _Changes, ends: Collection[JobId]
) -> None:
    for grant in changes.fresh:
        if grant.job not in snapshot.index:
            _refuse_unknown(snapshot.index, (grant.job,))
        if grant.job in ends:
            raise _impossible(f"{grant.job} has a grant and is to be ended")
        _check_grant(snapshot, snapshot.index[grant.job], grant)
    if not (_are_free(snapshot, changes) or _fits_at_once(snapshot, plan)):
        _check_gpus(snapshot, plan)


def _check_grant(snapshot: Snapshot, job: Job, grant: Grant) -> None:
    if job.phase in (Phase.ENDED, Phase.STOPPING):
        raise _impossible(f"{job.id} has a grant, but is {job.phase.value}")
    if not job.min_gpus <= len(grant.gpus) <= job.max_gpus:
        allowed = f"{job.min_gpus} to {job.max_gpus}"
        raise _impossible(f"{job.id} is given {len(grant.gpus)} GPUs, it takes {allowed}")
    if not (_same(grant, job) or at_home(snapshot, job, grant.gpus)):
        nodes = " or ".join(job.nodes)
        raise _impossible(f"{job.id} is given GPUs {grant.gpus}, its checkpoints are on {nodes}")
    if not 0 < grant.share <= 1:
        raise _impossible(f"{job.id} is given a share of {grant.share}")


def _are_free(snapshot: Snapshot, changes: _Changes) -> bool:
    """True when the GPUs of new grants are named once, and no job keeps any of them."""
    given = list(chain.from_iterable(map(_GPUS, changes.fresh)))
    named = set(given)
    if len(named) < len(given):
        return False
    return named <= snapshot.free or named <= snapshot.free_without(changes.lost)


def _fits_at_once(snapshot: Snapshot, plan: Plan) -> bool:
    """True when no GPU is named twice and each is in the pool: then it need not be counted."""
    given = list(chain.from_iterable(map(_GPUS, plan.grants)))
    named = set(given)
    return len(named) == len(given) and named.issubset(map(_INDEX, snapshot.gpus))


def _check_gpus(snapshot: Snapshot, plan: Plan) -> None:
    left = {gpu.index: 1.0 for gpu in snapshot.gpus}
    for grant in plan.grants:
        for gpu in grant.gpus:
            if gpu not in left:
                raise _impossible(f"{grant.job} is given GPU {gpu}, which the pool does not have")
            left[gpu] -= grant.share
            if left[gpu] < -SHARE_EPS:
                raise _impossible(f"{grant.job} is given GPU {gpu}, which is given twice")


def _check_firm(snapshot: Snapshot, fresh: Iterable[Grant], lost: set[JobId]) -> None:
    """Refuse that a job which must not be stopped loses GPUs that it can keep."""
    stays, jobs = snapshot.stays, snapshot.index
    moved = (g.job for g in fresh if g.job in stays and {*g.gpus} != {*stays[g.job].gpus})
    for job_id in lost.union(moved):
        job = jobs[job_id]
        if job.phase is Phase.RUNNING and not job.preemptible:
            gpus = stays[job_id].gpus
            raise _impossible(f"{job_id} runs and is not preemptible, but loses GPUs {gpus}")


def _impossible(fact: str) -> PlanError:
    return PlanError(f"{fact}; nothing was applied: report this as a defect of the policy")

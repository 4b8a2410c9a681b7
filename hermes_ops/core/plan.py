"""What becomes of a plan: its check, its reasons, each made on demand, and its actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress
from operator import attrgetter, is_not
from typing import Any, NamedTuple

from hermes_ops.core.model import (
    QUEUED_PHASES,
    SHARE_EPS,
    Grant,
    Job,
    JobId,
    Phase,
    Plan,
    Reason,
    Snapshot,
)
from hermes_ops.core.nodes import on_allowed_node
from hermes_ops.core.order import by_submission
from hermes_ops.errors import PlanError

_JOB, _GPUS, _INDEX = attrgetter("job"), attrgetter("gpus"), attrgetter("index")
_UNEXPLAINED = Reason("the policy gave no reason")


def check(snapshot: Snapshot, plan: Plan) -> PlanChanges:
    """Raise PlanError when the plan cannot be applied; return what it changes, for `diff`.

    Refused are: an unknown job; a grant to a job that has ended, is stopping, is ended by the same
    plan or has another grant; a GPU that is not in the snapshot or is granted twice; a number of
    GPUs that the job does not take; nodes on which it may not run; a batch outside the job's range,
    or for a job without one; a non-preemptible running job that is dropped or moved, unless it is
    ended or its GPUs cannot be kept (`Snapshot.retained`).
    """
    jobs, ends = snapshot.index, set(plan.ends)
    changes = _changes(snapshot, plan)
    added, removed, doubled = changes
    is_job = jobs.__contains__
    if not (all(map(is_job, plan.ranking)) and all(map(is_job, ends))):
        _refuse_unknown(jobs, (*plan.ranking, *plan.ends))
    for job_id in ends:
        if jobs[job_id].phase is Phase.ENDED:
            raise _impossible(f"{job_id} is to be ended, but has ended")
        if job_id not in removed and job_id in snapshot.retained:
            raise _impossible(f"{job_id} has a grant and is to be ended")
    if doubled:
        raise _impossible(f"{_doubled(plan)} has two grants")
    if added:
        _check_added(snapshot, plan, changes, ends)
    _check_pinned(snapshot, added, removed.difference(ends))
    return changes


def diff(snapshot: Snapshot, plan: Plan, changes: PlanChanges | None = None) -> tuple[Action, ...]:
    """Return the actions that lead from the snapshot to the plan: Stop, then Resize, then Start.

    Each kind is in the order of submission. A job that holds GPUs and has no grant is stopped, a
    STARTING one too. Another number of GPUs or another batch gives Resize. The same number of other
    GPUs gives Stop, and the job starts there in a later round, once it waits. `changes` are those
    that `check` has returned for this plan; without them they are computed again.
    """
    added, removed, _ = changes or _changes(snapshot, plan)
    granted = {grant.job: grant for grant in added}
    ends = set(plan.ends)
    stops: list[Action] = []
    resizes: list[Action] = []
    starts: list[Action] = []
    affected = removed.union(granted, ends)
    if len(snapshot.retained) < len(snapshot.holding):  # a drift: some hold what they cannot keep
        affected.update(job.id for job in snapshot.holding if job.id not in snapshot.retained)
    for job in by_submission(snapshot.index[job_id] for job_id in affected):
        reason = plan.reasons.get(job.id, _UNEXPLAINED)
        grant = granted.get(job.id)
        if job.id in ends:
            stops.append(Stop(job.id, reason, final=True))
        elif not job.holds_gpus:
            starts += [Start(g.job, g.gpus, reason, g.share, g.batch) for g in (grant,) if g]
        elif grant is None or _moved(job, grant):
            stops.append(Stop(job.id, reason))
        elif not (grant.share == job.share_held and _same(grant, job) and _keeps_batch(grant, job)):
            resizes.append(Resize(job.id, grant.gpus, reason, grant.share, grant.batch))
    return (*stops, *resizes, *starts)


class PlanChanges(NamedTuple):
    """The changes of a plan: added grants, jobs that lose theirs, a job with two grants."""

    added: list[Grant]
    removed: set[JobId]
    doubled: bool


def _changes(snapshot: Snapshot, plan: Plan) -> PlanChanges:
    """Compare the plan with what jobs hold: most plans change little."""
    retained, grants = snapshot.retained, plan.grants
    if grants[: len(retained)] == tuple(retained.values()):  # equal parts: same objects
        new = grants[len(retained) :]
        named = set(map(_JOB, new))
        return PlanChanges(
            list(new), set(), len(named) < len(new) or not named.isdisjoint(retained)
        )
    job_ids = list(map(_JOB, grants))
    added = compress(grants, map(is_not, grants, map(retained.get, job_ids)))
    named = set(job_ids)
    return PlanChanges(
        [grant for grant in added if retained.get(grant.job) != grant],
        retained.keys() - named,
        len(named) < len(job_ids),
    )


def _doubled(plan: Plan) -> JobId:
    """Return the job that has the most grants."""
    return Counter(grant.job for grant in plan.grants).most_common(1)[0][0]


def _same(grant: Grant, job: Job) -> bool:
    return grant.gpus == job.gpus_held or set(grant.gpus) == set(job.gpus_held)


def _keeps_batch(grant: Grant, job: Job) -> bool:
    return grant.batch is None or grant.batch == job.batch_held


def _moved(job: Job, grant: Grant) -> bool:
    same_number = len(grant.gpus) == len(job.gpus_held)
    return same_number and not _same(grant, job)


def _refuse_unknown(jobs: Mapping[JobId, Job], named: Iterable[JobId]) -> None:
    unknown = next(job_id for job_id in named if job_id not in jobs)
    raise _impossible(f"{unknown} is not a job of the snapshot")


def _check_added(
    snapshot: Snapshot, plan: Plan, changes: PlanChanges, ends: Collection[JobId]
) -> None:
    for grant in changes.added:
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
    if not job.takes(len(grant.gpus)):
        sizes = " or ".join(map(str, job.sizes))
        allowed = sizes or f"{job.min_gpus} to {job.max_gpus}"
        raise _impossible(f"{job.id} is given {len(grant.gpus)} GPUs, it takes {allowed}")
    if grant.batch not in (None, job.batch_held, job.requested_batch):
        _check_batch(job, grant.batch, len(grant.gpus))
    if not (_same(grant, job) or on_allowed_node(snapshot, job, grant.gpus)):
        nodes = " or ".join(job.nodes)
        raise _impossible(f"{job.id} is given GPUs {grant.gpus}, its checkpoints are on {nodes}")
    if not 0 < grant.share <= 1:
        raise _impossible(f"{job.id} is given a share of {grant.share}")


def _check_batch(job: Job, batch: int | None, gpus: int) -> None:
    if job.batch_range is None:
        raise _impossible(f"{job.id} is given a batch of {batch}, but has no range of batches")
    if batch is not None and not job.batch_range.allows(batch, gpus):
        least, most = job.batch_range.initial, job.batch_range.most
        fact = f"{job.id} is given a batch of {batch} on {gpus} GPUs, it takes {least} to {most}"
        raise _impossible(f"{fact} with {job.batch_range.least_local} or more on each GPU")


def _are_free(snapshot: Snapshot, changes: PlanChanges) -> bool:
    """Return whether the GPUs of new grants are named once, and no job keeps any of them."""
    gpus = list(chain.from_iterable(map(_GPUS, changes.added)))
    named = set(gpus)
    if len(named) < len(gpus):
        return False
    return named <= snapshot.free or named <= snapshot.free_without(changes.removed)


def _fits_at_once(snapshot: Snapshot, plan: Plan) -> bool:
    """Return whether no GPU is named twice and each is in the pool: no count is needed."""
    gpus = list(chain.from_iterable(map(_GPUS, plan.grants)))
    named = set(gpus)
    return len(named) == len(gpus) and named.issubset(map(_INDEX, snapshot.gpus))


def _check_gpus(snapshot: Snapshot, plan: Plan) -> None:
    left = {gpu.index: 1.0 for gpu in snapshot.gpus}
    for grant in plan.grants:
        for gpu in grant.gpus:
            if gpu not in left:
                raise _impossible(f"{grant.job} is given GPU {gpu}, which the pool does not have")
            left[gpu] -= grant.share
            if left[gpu] < -SHARE_EPS:
                raise _impossible(f"{grant.job} is given GPU {gpu}, which is given twice")


def _check_pinned(snapshot: Snapshot, added: Iterable[Grant], removed: set[JobId]) -> None:
    """Refuse to stop or move a non-preemptible running job that can keep its GPUs."""
    retained, jobs = snapshot.retained, snapshot.index
    moved = (g.job for g in added if g.job in retained and {*g.gpus} != {*retained[g.job].gpus})
    for job_id in removed.union(moved):
        job = jobs[job_id]
        if job.phase is Phase.RUNNING and not job.preemptible:
            gpus = retained[job_id].gpus
            raise _impossible(f"{job_id} runs and is not preemptible, but loses GPUs {gpus}")


def _impossible(fact: str) -> PlanError:
    return PlanError(f"{fact}; nothing was applied: report this as a defect of the policy")


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


class LazyReasons(Mapping[JobId, "Reason"]):
    """The reasons of the keys of `ids`, each made on demand: most are never read."""

    def __init__(self, ids: Collection[JobId], explain: Callable[[JobId], Reason]) -> None:
        self._ids, self._explain = ids, explain

    def __getitem__(self, job: JobId) -> Reason:
        if job not in self._ids:
            raise KeyError(job)
        return self._explain(job)

    def get(self, job: JobId, default: Any = None) -> Any:  # noqa: ANN401 - as in Mapping
        """Return the reason or the default, without the cost of a caught KeyError."""
        return self._explain(job) if job in self._ids else default

    def __contains__(self, job: object) -> bool:
        return job in self._ids

    def __iter__(self) -> Iterator[JobId]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


class DeferredReasons(Mapping[JobId, "Reason"]):
    """Reasons that are put together when the first of them is read, if any is."""

    def __init__(self, make: Callable[[], Mapping[JobId, Reason]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> Mapping[JobId, Reason]:
        return self._make()

    def __getitem__(self, job: JobId) -> Reason:
        return self._made[job]

    def __contains__(self, job: object) -> bool:
        return job in self._made

    def __iter__(self) -> Iterator[JobId]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


class JobIds(Collection[JobId]):
    """The ids of two collections, each once, in their order.

    They are put together when they are listed: of thousands of reasons few are asked for.
    """

    def __init__(self, first: Collection[JobId], second: Collection[JobId]) -> None:
        self._first, self._second = first, second

    def __contains__(self, job: object) -> bool:
        return job in self._second or job in self._first

    def __iter__(self) -> Iterator[JobId]:
        return iter(dict.fromkeys(chain(self._first, self._second)))

    def __len__(self) -> int:
        return len(dict.fromkeys(chain(self._first, self._second)))


def overlay(base: Mapping[JobId, Reason], over: Mapping[JobId, Reason]) -> Mapping[JobId, Reason]:
    """Return `base` with the entries of `over` in their place, nothing evaluated."""

    def reason(job: JobId) -> Reason:
        return over[job] if job in over else base[job]

    return LazyReasons(JobIds(base, over), reason)


@dataclass(frozen=True, slots=True)
class Stop:
    """Checkpoint and stop the job; `final` ends it for good (stopped early)."""

    job: JobId
    reason: Reason
    final: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Open or resume the job on these GPUs."""

    job: JobId
    gpus: tuple[int, ...]
    reason: Reason
    share: float = 1.0
    batch: int | None = None


@dataclass(frozen=True, slots=True)
class Resize:
    """Checkpoint, stop and restart the job on these GPUs; another share needs no restart."""

    job: JobId
    gpus: tuple[int, ...]
    reason: Reason
    share: float = 1.0
    batch: int | None = None


Action = Stop | Start | Resize

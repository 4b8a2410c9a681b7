"""AFS-L: each GPU goes to the job that wins a comparison of short and long jobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from hermes_ops.core.model import Job, JobId, Plan, Reason, Snapshot
from hermes_ops.policies.toolbox.job_speeds import JobSpeeds
from hermes_ops.policies.toolbox.planned_sizes import PlannedSizes, SpeedPolicy, planned
from hermes_ops.policies.toolbox.sized_grants import SizingProblem


@dataclass(frozen=True, slots=True)
class Afs(SpeedPolicy):
    """Give GPUs one by one to the job with the top priority, found by a scan in submission order.

    Of two jobs without GPUs the one with less time left wins. Else let l be the one with more time
    left at its present size (a job without GPUs: infinite) and s the other one: l wins if
    (f_l(w+1) - f_l(w)) / f_l(w+1) > (f_s(w+1) - f_s(w)) / f_s(w), with the speed f. So a long job
    gets the GPU if it shortens its time by a larger part than it delays the short one.

    With an oracle, speeds and the work left are known; without one, or with `blind`, they are those
    of `MeasuredSpeeds`. Sizes are planned when a job arrives or ends, and every `interval_s` (with
    measured speeds 600).

    Source: Hwang et al., "Elastic Resource Sharing for Distributed Deep Learning" (NSDI 2021),
    AFS-L, as in the Voda scheduler (heyfey/vodascheduler, commit 756e4d0). Our choices: a job goes
    to its next size, one that does not fit is no longer asked; of the jobs without GPUs only the
    one with the least time left is compared; the time left of each job is that at its own size
    (Voda's code takes that of the other job).
    """

    name: ClassVar[str] = "afs"

    def decide(self, snapshot: Snapshot, memory: PlannedSizes) -> tuple[Plan, PlannedSizes]:
        """Return the plan in which each GPU has gone to the job with the top priority."""
        problem = SizingProblem.from_snapshot(snapshot)
        speeds, interval_s = self.speeds(snapshot), self.period_s
        after = planned(memory, problem, interval_s, lambda subproblem: _sizes(subproblem, speeds))
        grants = problem.grants(dict(after.sizes))
        return problem.plan(grants, _reason, None, after.review_s(interval_s)), after


@dataclass(slots=True)
class _Contestant:
    """A job with a size (0: none), its next one, and what the comparison asks of them.

    `part_s` is the growth of its speed over the present speed, `part_l` over the larger one.
    """

    job: Job
    rank: int
    left: float
    left_s: float = inf
    size: int = 0
    more: int | None = None
    part_s: float = inf
    part_l: float = 1.0
    speeds: JobSpeeds = field(kw_only=True)

    def take(self, size: int) -> None:
        """Take that size."""
        speed = self.speeds.speed(self.job, size)
        self.size, self.left_s = size, self.left / speed
        self.more = self.job.size_above(size)
        if self.more is not None:
            larger = self.speeds.speed(self.job, self.more)
            added = (larger - speed) / (self.more - size)
            self.part_s, self.part_l = added / speed, added / larger


def _sizes(problem: SizingProblem, speeds: JobSpeeds) -> dict[JobId, int]:
    everybody = [
        _Contestant(job, rank, speeds.left(job), speeds=speeds)
        for rank, job in enumerate(problem.jobs)
    ]
    waiting = sorted(everybody, key=lambda c: (_alone_s(c), c.rank), reverse=True)
    served: list[_Contestant] = []
    left = problem.gpus
    while left:
        while waiting and waiting[-1].job.min_gpus > left:
            waiting.pop()
        served = [c for c in served if c.more is not None and c.more - c.size <= left]
        first = _champion(_by_rank(served, waiting[-1] if waiting else None))
        if first is None:
            break
        size = first.more if first.more is not None and first.size else first.job.min_gpus
        left -= size - first.size
        if not first.size:
            served.append(waiting.pop())
            served.sort(key=lambda c: c.rank)
        first.take(size)
    return {c.job.id: c.size for c in everybody if c.size}


def _alone_s(contestant: _Contestant) -> float:
    """Return the seconds left on the least size."""
    job = contestant.job
    return contestant.left / contestant.speeds.speed(job, job.min_gpus)


def _by_rank(served: Iterable[_Contestant], waiting: _Contestant | None) -> Iterator[_Contestant]:
    """Yield the served ones, by rank, with the waiting one in its place."""
    for contestant in served:
        if waiting is not None and waiting.rank < contestant.rank:
            yield waiting
            waiting = None
        yield contestant
    if waiting is not None:
        yield waiting


def _champion(contestants: Iterable[_Contestant]) -> _Contestant | None:
    champion: _Contestant | None = None
    for other in contestants:
        if champion is None or _wins(other, champion):
            champion = other
    return champion


def _wins(other: _Contestant, champion: _Contestant) -> bool:
    """Return whether the other job is to have the next GPU."""
    if other.left_s < champion.left_s:
        return not champion.part_l > other.part_s
    return other.part_l > champion.part_s


def _reason(job: Job, is_granted: bool) -> Reason:  # noqa: ARG001 - the same for every job
    if is_granted:
        return Reason("runs: it gains more by its GPUs than another job would")
    return Reason("waits: others gain more by the GPUs", would_change="one of them ending")

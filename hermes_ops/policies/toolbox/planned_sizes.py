"""Sizes of jobs by what they gain, planned anew when a job comes or ends, or after a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import ClassVar

from hermes_ops.core.model import Job, JobId, Snapshot
from hermes_ops.core.oracle import Oracle
from hermes_ops.policies.toolbox.job_speeds import JobSpeeds, KnownSpeeds, MeasuredSpeeds
from hermes_ops.policies.toolbox.parameter_checks import positive_or_none
from hermes_ops.policies.toolbox.sized_grants import SizingProblem

INTERVAL_S = 600.0
"""Seconds between two plans of the sizes by measured speeds."""


@dataclass(frozen=True, slots=True)
class PlannedSizes:
    """The memory of a policy: the sizes by job, for which jobs and GPUs, and when planned."""

    jobs: tuple[tuple[JobId, int, int], ...] = ()
    gpus: int = 0
    sizes: tuple[tuple[JobId, int], ...] = ()
    at_s: float = -inf

    def review_s(self, interval_s: float | None) -> float | None:
        """Return when the sizes are to be planned again; None: only when something happens."""
        return None if interval_s is None or not self.jobs else self.at_s + interval_s


def planned(
    memory: PlannedSizes,
    problem: SizingProblem,
    interval_s: float | None,
    plan: Callable[[SizingProblem], dict[JobId, int]],
) -> PlannedSizes:
    """Return the memory if its sizes still hold, else the sizes by `plan` that can be placed.

    They hold for the same jobs with the same ranges on the same number of GPUs.
    """
    jobs = tuple([(job.id, job.min_gpus, job.max_gpus) for job in problem.jobs])
    now_s = problem.snapshot.time_s
    ends_s = inf if interval_s is None else memory.at_s + interval_s
    same = memory.jobs == jobs and memory.gpus == problem.gpus
    if same and memory.at_s <= now_s < ends_s and _takes(memory, problem):
        return memory
    return PlannedSizes(jobs, problem.gpus, tuple(problem.solve_sizes(plan).items()), now_s)


@dataclass(frozen=True, slots=True)
class SpeedPolicy:
    """Base of policies that plan sizes by speeds and the work left, and keep them for a while.

    With an oracle both are known; without one, or with `blind`, they are those of `MeasuredSpeeds`,
    and sizes are planned every `interval_s` (600 by default) too.
    """

    oracle: Oracle | None = None
    blind: bool = False
    interval_s: float | None = None
    preempts: ClassVar[bool] = True
    sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive_or_none("interval_s", self.interval_s)

    def initial(self) -> PlannedSizes:
        """Return the memory without planned sizes."""
        return PlannedSizes()

    @property
    def known(self) -> bool:
        """True when an oracle knows the speeds and the work left."""
        return self.oracle is not None and not self.blind

    @property
    def period_s(self) -> float | None:
        """Seconds between two plans of the sizes; None: only when a job arrives or ends."""
        return self.interval_s if self.known or self.interval_s else INTERVAL_S

    def speeds(self, snapshot: Snapshot) -> JobSpeeds:
        """Return the known speeds, or the measured ones."""
        if self.oracle is None or self.blind:
            return MeasuredSpeeds(snapshot)
        return KnownSpeeds(self.oracle, snapshot)


def _takes(memory: PlannedSizes, problem: SizingProblem) -> bool:
    """Return whether each job still takes its size: its list of sizes may have changed."""
    index = problem.snapshot.index
    return all(index[job].takes(size) for job, size in memory.sizes)


Gain = Callable[[Job, int, int], float]
"""The gain of a job for each GPU when it goes from the first size to the second."""

Larger = Callable[[Job, int], int | None]
"""The size to which a job may go next from that size; None: it has none."""


def speed_up_gain(speeds: JobSpeeds) -> Gain:
    """Return the gain of speed-up over one GPU, or over the least size of a job that needs more."""

    def gain(job: Job, size: int, more: int) -> float:
        one = speeds.speed(job, 1 if job.takes(1) else job.min_gpus)
        now = speeds.speed(job, size) if size else 0.0
        return (speeds.speed(job, more) - now) / one / (more - size)

    return gain


def time_gain(speeds: JobSpeeds) -> Gain:
    """Return the seconds that a job saves until its end for each GPU that is added."""

    def gain(job: Job, size: int, more: int) -> float:
        saved_s = 1 / speeds.speed(job, size) - 1 / speeds.speed(job, more)
        return speeds.left(job) * saved_s / (more - size)

    return gain


def twice(job: Job, size: int) -> int | None:
    """Return the least size of the job that is at least twice as large; None without one."""
    if job.sizes:
        return next((more for more in job.sizes if more >= 2 * size), None)
    return 2 * size if 2 * size <= job.max_gpus else None


def widened(jobs: Sequence[Job], gpus: int, gain: Gain, larger: Larger = twice) -> dict[JobId, int]:
    """Return the sizes on `gpus` GPUs; jobs that get none are left out.

    `jobs` are in the order in which they get their least size; one whose least size does not fit
    is passed over. Then the job with the greatest gain above 0 is widened to its `larger` size,
    ties in the order of `jobs`, until nothing fits. A step that does not fit is not tried again.
    Source of the doubling: Capes et al. (arXiv 1908.08082), section 4.1: a step of one GPU often
    gains nothing where twice as many do.
    """
    sizes: dict[JobId, int] = {}
    left = gpus
    for job in jobs:
        if job.min_gpus <= left:
            sizes[job.id] = job.min_gpus
            left -= job.min_gpus
        elif not left:
            break
    widen([job for job in jobs if job.id in sizes], sizes, left, gain, larger)
    return sizes


def widen(
    jobs: Sequence[Job], sizes: dict[JobId, int], left: int, gain: Gain, larger: Larger
) -> None:
    """Widen the `sizes` of jobs (0 for one that has none), in place, while `left` GPUs suffice."""
    candidates: list[tuple[float, int, int]] = []

    def consider(rank: int) -> None:
        size = sizes.get(jobs[rank].id, 0)
        more = larger(jobs[rank], size)
        gained = 0.0 if more is None else gain(jobs[rank], size, more)
        if more is not None and gained > 0:
            heappush(candidates, (-gained, rank, more))

    for rank in range(len(jobs)):
        consider(rank)
    while candidates and left:
        _, rank, more = heappop(candidates)
        added = more - sizes.get(jobs[rank].id, 0)
        if added <= left:
            left -= added
            sizes[jobs[rank].id] = more
            consider(rank)

"""Give each job its least size, then widen the job that gains most by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from hermes_ops.core.model import Job, JobId
from hermes_ops.policies.toolbox.job_speeds import JobSpeeds

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

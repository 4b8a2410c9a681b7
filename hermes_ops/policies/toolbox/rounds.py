"""Round robin: the job with the fewest quanta is next."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, inf

from hermes_ops.core.model import Job, JobId, Snapshot
from hermes_ops.core.order import by_submission, submission

EPSILON = 1e-9  # of a quantum: clocks are floats


@dataclass(frozen=True, slots=True)
class JoinedRounds:
    """The round in which each open job joined."""

    joined: tuple[tuple[JobId, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TimeSlices:
    """The quantum: `seconds` on a grid that all jobs share, or `steps` of the job.

    On the grid all slices end at the same instant, so that a job of several GPUs finds them free
    together; a job that starts between has a shorter first slice.
    """

    seconds: float = 60.0
    steps: int | None = None

    def rounds(self, job: Job, now_s: float) -> int:
        """Return the rounds that the job has had: `weight` quanta each, to the nearest."""
        if self.steps is not None:
            quanta = job.last_step / self.steps
        else:
            quanta = job.attained_gpu_s(now_s) / job.min_gpus / self.seconds
        return floor(floor(quanta + 0.5) / job.weight + EPSILON)

    def in_slice(self, job: Job, now_s: float) -> bool:
        """Return whether the time slice of a job that has GPUs is not over."""
        if self.steps is not None:
            return job.last_step - job.steps_at_start < self.steps
        if job.started_s is None:
            return False
        return self._grid(now_s) == self._grid(job.started_s)

    def ends_s(self, now_s: float) -> float | None:
        """Return when the slices of the grid end next; None for slices of steps."""
        return None if self.steps is not None else (self._grid(now_s) + 1) * self.seconds

    def _grid(self, at_s: float) -> int:
        return floor(at_s / self.seconds + EPSILON)


class RoundOrder:
    """The rounds that each open job has had, and the order that follows."""

    def __init__(self, snapshot: Snapshot, memory: JoinedRounds, quanta: TimeSlices) -> None:
        self._now_s = snapshot.time_s
        self._quanta = quanta
        self._jobs = (*snapshot.holding, *snapshot.queue)
        joined = dict(memory.joined)
        remembered = [job for job in self._jobs if job.id in joined]
        rounds = {job.id: joined[job.id] + self._rounds_had(job) for job in remembered}
        present = min(rounds.values(), default=0)
        for job in self._jobs:
            if job.id not in rounds:
                joined[job.id] = present if self._rounds_had(job) == 0 else 0
                rounds[job.id] = joined[job.id] + self._rounds_had(job)
        self.rounds = rounds
        self._stopping = tuple(job.id for job in snapshot.others if job.is_open)
        self._joined = joined

    def _rounds_had(self, job: Job) -> int:
        return self._quanta.rounds(job, self._now_s)

    def memory(self) -> JoinedRounds:
        """Return the rounds to remember, in order of submission."""
        kept = {*self.rounds, *self._stopping}
        open_jobs = (job.id for job in by_submission(self._jobs))
        ids = (*open_jobs, *sorted(self._stopping))
        return JoinedRounds(
            tuple((job, self._joined[job]) for job in ids if job in self._joined and job in kept)
        )

    def in_slice(self, job: Job) -> bool:
        """Return whether the job has GPUs and its time slice is not over."""
        return job.holds_gpus and self._quanta.in_slice(job, self._now_s)

    def key(self, job: Job) -> tuple[object, ...]:
        """Return the sort key: fewest rounds, then waiting, the longest first, then submission."""
        since_s = job.started_s if job.holds_gpus else job.waiting_since_s
        return (
            self.rounds[job.id],
            job.holds_gpus,
            -inf if since_s is None else since_s,
            submission(job),
        )

    def order(self) -> list[Job]:
        """Return the jobs within their time slice, then the others by their sort key."""
        return sorted(self._jobs, key=lambda job: (not self.in_slice(job), *self.key(job)))

"""Jobs in the order of submission, kept in order while they come and go."""

from __future__ import annotations

from bisect import bisect_left

from hermes_ops.core.model import Job


class Line:
    """Jobs by their rank; `jobs()` is the same tuple until something changes."""

    def __init__(self) -> None:
        self._ranks: list[int] = []
        self._jobs: list[Job] = []
        self._tuple: tuple[Job, ...] | None = ()

    def put(self, rank: int, job: Job) -> None:
        """Insert the job at its rank, in the place of an earlier fact about it."""
        at = bisect_left(self._ranks, rank)
        if at < len(self._ranks) and self._ranks[at] == rank:
            self._jobs[at] = job
        else:
            self._ranks.insert(at, rank)
            self._jobs.insert(at, job)
        self._tuple = None

    def drop(self, rank: int) -> None:
        """Remove the job of that rank, which must be there."""
        at = bisect_left(self._ranks, rank)
        del self._ranks[at], self._jobs[at]
        self._tuple = None

    def jobs(self) -> tuple[Job, ...]:
        """The jobs, first submitted first."""
        if self._tuple is None:
            self._tuple = tuple(self._jobs)
        return self._tuple

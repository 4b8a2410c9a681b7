"""Jobs in the order of submission, kept in order while they come and go."""

from __future__ import annotations

from bisect import bisect_left

from hermes_ops.core.model import Job


class ByRank:
    """Jobs by their rank. `jobs` itself changes: `part` before somebody else is to keep it."""

    def __init__(self) -> None:
        self._ranks: list[int] = []
        self.jobs: list[Job] = []

    def put(self, rank: int, job: Job) -> None:
        """Insert the job at its rank, in the place of an earlier fact about it."""
        at = bisect_left(self._ranks, rank)
        if at < len(self._ranks) and self._ranks[at] == rank:
            self.jobs[at] = job
        else:
            self._ranks.insert(at, rank)
            self.jobs.insert(at, job)

    def drop(self, rank: int) -> None:
        """Remove the job of that rank, which must be there."""
        at = bisect_left(self._ranks, rank)
        del self._ranks[at], self.jobs[at]

    def part(self) -> None:
        """Go on with a copy of `jobs`; who was given the former list keeps it as it is."""
        self.jobs = self.jobs.copy()

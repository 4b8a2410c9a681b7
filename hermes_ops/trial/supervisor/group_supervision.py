"""What the supervisor of a trial does for several workers: their last words, and who failed."""

from __future__ import annotations

from hermes_ops.trial.outcome import SegmentEnding, SegmentOutcome
from hermes_ops.trial.processes.workers import WorkerGroup


class GroupSupervision:
    """The workers of a segment beside the first one, whose output the supervisor reads itself."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers
        self._tails_at_stop: dict[int, list[str]] = {}

    def note_stop(self) -> None:
        """Remember what the workers have said when they are told to stop."""
        self._tails_at_stop = {n: log.tail for n, log in enumerate(self.workers.logs, start=1)}

    def tail(self, first: list[str]) -> list[str]:
        """Return the last lines of the worker that failed first; `first`: those of rank 0."""
        rank = self._failed_rank
        return self.workers.logs[rank - 1].tail if rank else first

    def tail_at_stop(self, first: list[str]) -> list[str]:
        """Return what that worker had said when it was told to stop."""
        rank = self._failed_rank
        return self._tails_at_stop.get(rank, []) if rank else first

    def name_failed(self, ending: SegmentEnding) -> SegmentEnding:
        """Return the ending with the worker that failed first in its reason."""
        failure = self.workers.failure
        if failure is None or ending.outcome is not SegmentOutcome.FAILED:
            return ending
        rank, size = failure.rank, self.workers.size
        where = f" (rank-{rank}.log in the trial's folder)" if rank else ""
        return ending._replace(reason=f"rank {rank} of {size} failed first{where}: {ending.reason}")

    @property
    def _failed_rank(self) -> int:
        failure = self.workers.failure
        return failure.rank if failure is not None else 0

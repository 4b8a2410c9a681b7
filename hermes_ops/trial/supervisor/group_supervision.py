"""Supervision of several workers: which one failed, their last lines, their agreement on a stop."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hermes_ops.trial.optimizer_steps import asked_path, mark_path
from hermes_ops.trial.outcome import PREEMPTED, SegmentEnding, SegmentOutcome
from hermes_ops.trial.processes.workers import WorkerProcesses
from hermes_ops.trial.supervisor.group_watchdog import GroupWatchdog, why_stuck

_LOOK_S = 1.0
_SHARE_TO_AGREE = 0.5  # of the grace; after it they have what is left to write a checkpoint


class GroupSupervision:
    """The workers of a segment beside the first one, whose output the supervisor reads itself.

    `folder`: the one that they share. `lost_nodes`: those of its nodes that have fallen silent.
    """

    def __init__(
        self,
        workers: WorkerProcesses,
        folder: Path,
        watchdog: GroupWatchdog,
        start_timeout_s: float,
        lost_nodes: Callable[[], Sequence[str]],
    ) -> None:
        self._lost_nodes = lost_nodes
        self.workers = workers
        self.watchdog = watchdog
        self._folder = folder
        self._start_timeout_s = start_timeout_s
        self._look_at_s = 0.0
        self._tails_at_stop: dict[int, list[str]] = {}
        self._signal_at_s: float | None = None

    def why_stuck(self, step: int, now_s: float) -> str | None:
        """Return why the group is to be ended, by what its workers show once a second."""
        if now_s < self._look_at_s:
            return None
        self._look_at_s = now_s + _LOOK_S
        progress = self.watchdog.observe(self._marks(), step, now_s)
        return why_stuck(progress, self._start_timeout_s, now_s)

    def _marks(self) -> dict[int, int]:
        """Return when the files of the ranks that train were touched last, in ns."""
        marks = {}
        for rank in range(self.workers.size):
            try:
                marks[rank] = os.stat(self._folder / f"{rank}.fit").st_mtime_ns
            except OSError:
                continue
        return marks

    def note_stop(self) -> None:
        """Remember what the workers have said when they are told to stop."""
        self._tails_at_stop = {n: log.tail for n, log in enumerate(self.workers.logs, start=1)}

    def ask_to_stop(self, now_s: float, grace_s: float) -> bool:
        """Have all ranks get SIGTERM after the same step; False if they cannot.

        Those that have not got it after half of the grace, because no steps are made, get it then.
        """
        if not self.workers.all_run or len(self._ranks_in_steps()) < self.workers.size:
            return False
        self.workers.expect_stop()
        try:
            asked_path(self._folder).touch()
        except OSError:
            return False
        self._signal_at_s = now_s + grace_s * _SHARE_TO_AGREE
        return True

    def signal_late(self, now_s: float, is_at_once: bool) -> bool:
        """Send SIGTERM to the ranks that have not come to the step after which they leave.

        `is_at_once`: they are given no more time for it. On several nodes the signal reaches all
        ranks of the other nodes, also those that have left after that step. Return whether it was
        sent.
        """
        if self._signal_at_s is None or (now_s < self._signal_at_s and not is_at_once):
            return False
        self._signal_at_s = None
        self.workers.stop_ranks(self._ranks_in_steps())
        return True

    def _ranks_in_steps(self) -> list[int]:
        """Return the ranks that leave after a named step, and have not had SIGTERM."""
        return [n for n in range(self.workers.size) if mark_path(self._folder, n).exists()]

    def tail(self, first: list[str]) -> list[str]:
        """Return the last lines of the worker that failed first; `first`: those of rank 0."""
        rank = self._failed_rank
        return self.workers.logs[rank - 1].tail if rank else first

    def tail_at_stop(self, first: list[str]) -> list[str]:
        """Return what that worker had said when it was told to stop."""
        rank = self._failed_rank
        return self._tails_at_stop.get(rank, []) if rank else first

    def name_failed(self, ending: SegmentEnding) -> SegmentEnding:
        """Return the ending with the worker that failed first in its reason.

        Where a node is lost the script has not failed: the trial goes on from its checkpoint.
        """
        failure = self.workers.failure
        if failure is None or ending.outcome is not SegmentOutcome.FAILED:
            return ending
        if lost := self._lost_nodes():
            reason = f"nothing is heard of the trial's workers on {' and '.join(lost)}"
            return SegmentEnding(SegmentOutcome.INTERRUPTED, reason, PREEMPTED)
        rank, size = failure.rank, self.workers.size
        where = f" (rank-{rank}.log in the trial's folder)" if rank else ""
        return ending._replace(reason=f"rank {rank} of {size} failed first{where}: {ending.reason}")

    @property
    def _failed_rank(self) -> int:
        failure = self.workers.failure
        return failure.rank if failure is not None else 0

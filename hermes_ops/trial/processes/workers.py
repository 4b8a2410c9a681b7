"""A trial of several processes: one command, started once for each worker, that ends as one."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from hermes_ops.trial.outcome import FINISHED, PREEMPTED
from hermes_ops.trial.output.rank_log import WorkerLog
from hermes_ops.trial.processes.tree import Child

FAILED_WAIT_S = 3.0
"""Seconds that the other workers have to end by themselves once one has failed."""

LEFT_WAIT_S = 60.0
"""Seconds that the others have once the first worker has finished, or any is preempted."""

_STOPPED, _KILLED = -int(signal.SIGTERM), -int(signal.SIGKILL)


class WorkerChild(Child, Protocol):
    """One worker's process."""

    @property
    def ended_s(self) -> float:
        """Return when it ended, on the monotonic clock."""

    def expect_stop(self) -> None:
        """Prepare for a stop that it learns of by other means: hold a shell that runs it."""


class WorkerEnd(NamedTuple):
    """How one worker ended.

    `ended_s`: on the monotonic clock; `told_to_stop`, `was_killed`: by us, before it ended.
    """

    rank: int
    code: int
    ended_s: float
    told_to_stop: bool = False
    was_killed: bool = False

    @property
    def has_failed(self) -> bool:
        """Tell whether it ended by an error or a signal that is not ours."""
        is_stopped = self.told_to_stop and self.code == _STOPPED
        return not (self.code in (FINISHED, PREEMPTED) or self.was_killed or is_stopped)


def others_end_by_s(ends: Sequence[WorkerEnd]) -> float | None:
    """Return when the workers that are left are to be killed; None while they may go on.

    Workers that are told to stop have their grace, whether the others end or not.
    """
    by_s = []
    for end in ends:
        if end.told_to_stop or end.was_killed:
            continue
        if end.has_failed:
            by_s.append(end.ended_s + FAILED_WAIT_S)
        elif end.code == PREEMPTED or end.rank == 0:
            by_s.append(end.ended_s + LEFT_WAIT_S)
    return min(by_s, default=None)


def first_failure(
    ends: Sequence[WorkerEnd], is_aftermath: Callable[[int], bool]
) -> WorkerEnd | None:
    """Return the end of the worker that failed first; None if none has.

    A worker that has lost another may end before that one: `is_aftermath(rank)` tells by its last
    lines. It counts only if all failures are of that kind, and not at all after a stop, at which
    workers leave, nor where the first worker has finished: then that is the one that was lost.
    """
    has_finished = any(end.rank == 0 and end.code == FINISHED for end in ends)
    failures = sorted((e for e in ends if e.has_failed), key=lambda e: (e.ended_s, e.rank))
    causes = [end for end in failures if not is_aftermath(end.rank)]
    others = [end for end in failures if not (end.told_to_stop or has_finished)]
    return next(iter(causes or others), None)


def group_code(ends: Sequence[WorkerEnd], failure: WorkerEnd | None) -> int:
    """Return the exit code of a group that has ended, with that first failure.

    Workers that we killed do not count, unless all were killed, nor do those that failed because
    they lost others. If some workers have finished and others were preempted or stopped, their
    progress is not known, and the trial is to resume.
    """
    if failure is not None:
        return failure.code
    codes = {end.code for end in ends if not end.was_killed}
    return next((code for code in (PREEMPTED, _STOPPED, FINISHED) if code in codes), _KILLED)


class WorkerProcesses:
    """The workers of one segment, as one child: its output and its process id are the first's.

    `logs`: the output of the others, in the order of their ranks from 1. `is_aftermath` tells by
    the last lines of a worker whether it has failed because another had.
    """

    def __init__(
        self,
        children: Sequence[WorkerChild],
        logs: Sequence[WorkerLog],
        is_aftermath: Callable[[int], bool],
    ) -> None:
        self.pid, self.output = children[0].pid, children[0].output
        self.size = len(children)
        self.logs = tuple(logs)
        self._running = dict(enumerate(children))
        self._ends: list[WorkerEnd] = []
        self._is_aftermath = is_aftermath
        self._told_to_stop = self._killed = False

    def poll(self) -> int | None:
        """Return the exit code of the group, None while a worker lives; end those left behind."""
        for rank, child in list(self._running.items()):
            code = child.poll()
            if code is not None:
                del self._running[rank]
                flags = self._told_to_stop, self._killed and code == _KILLED
                self._ends.append(WorkerEnd(rank, code, child.ended_s, *flags))
        if not self._running:
            return self.code
        by_s = others_end_by_s(self._ends)
        if by_s is not None and time.monotonic() >= by_s:
            self.kill()
        return None

    @property
    def all_run(self) -> bool:
        """Tell whether no worker has ended."""
        return len(self._running) == self.size

    @property
    def code(self) -> int:
        """Return the exit code of the group, once all have ended."""
        return group_code(self._ends, self.failure)

    @property
    def failure(self) -> WorkerEnd | None:
        """Return the end of the worker that failed first; None while none has."""
        return first_failure(self._ends, self._is_aftermath)

    def stop(self) -> None:
        """Send SIGTERM to all workers."""
        self._told_to_stop = True
        self.stop_ranks(self._running)

    def stop_ranks(self, ranks: Iterable[int]) -> None:
        """Send SIGTERM to those of these workers that run."""
        for rank in ranks:
            if rank in self._running:
                self._running[rank].stop()

    def expect_stop(self) -> None:
        """Prepare for a stop that the workers learn of by other means."""
        self._told_to_stop = True
        for child in self._running.values():
            child.expect_stop()

    def kill(self) -> None:
        """Send SIGKILL to all workers; all that they have started ends with them."""
        self._killed = True
        for child in self._running.values():
            child.kill()

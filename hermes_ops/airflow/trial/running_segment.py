"""A running segment, and its supervision: obey the stop flag, pass on its status and its output.

The same in a task's process, which has one segment, and in Airflow's triggerer, which has many.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from airflow.sdk.exceptions import AirflowRuntimeError

from hermes_ops.airflow.folders import TrialFolder, WakeFile
from hermes_ops.airflow.records import Lease, StopFlag
from hermes_ops.error_message import MOST_CHARACTERS, detail_message

if TYPE_CHECKING:
    from airflow.triggers.base import BaseTrigger

T = TypeVar("T")

POLL_S = 0.02
"""Seconds between two checks of a running segment; its exit is noticed at once."""
FLAG_PERIOD_S = 1.0
"""Seconds between two requests for the stop flag when no wake file announces one."""
REMOTE_FLAG_PERIOD_S = 0.5
"""The same on a machine that sees no wake file of the controller: a switch waits for it."""
STATUS_PERIOD_S = 0.5
WITHDRAWN = "It keeps its GPUs: nobody wants them back any more."
RESIZE_WAIT_S = 30.0
"""Seconds that a task keeps its slots after a segment's end for the next lease of its trial.

That is the grace of a trial whose slots it may wait for. Nobody else can use its slots meanwhile: a
task that gets no GPUs is told so.
"""


class RunningSegment(Protocol):
    """A segment that runs, in a process or a pod.

    `trouble` is an error that was observed from outside; `handed_over` is True once `holder` can
    supervise it instead of the task that started it.
    """

    trouble: str

    @property
    def ran_s(self) -> float | None:
        """Return the observed run time of a pod's container, in seconds; None if it is unknown."""

    @property
    def holder(self) -> BaseTrigger | None:
        """The trigger that supervises it once it has started; None: the task that started it."""

    @property
    def handed_over(self) -> bool:
        """Whether it goes on without the task that started it."""

    def start(self) -> None:
        """Start the segment; HermesError when it cannot be started."""

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if it still runs after that time."""

    def stop(self) -> None:
        """Have it write a checkpoint and exit."""

    def hurry(self) -> None:
        """Shorten the grace period: the trial has ended for good."""

    def finish(self) -> None:
        """Remove everything of it; may be called again."""

    def release(self) -> None:
        """Let go of it: what the task's next try can take over lives on."""


class WatchedTrial(Protocol):
    """The trial of a running segment: its stop flag, and its status to pass on."""

    def wake_file(self) -> WakeFile:
        """Return the file that is touched when there is a stop flag."""

    def stop_flag(self) -> StopFlag | None:
        """Return the stop flag of the segment's lease; None without one."""

    def notice(self) -> str:
        """Return why and until when it keeps its GPUs; empty while nobody else wants them."""

    def relay(self, ran_s: float | None) -> None:
        """Pass on the trial's status; `ran_s` is the observed run time of its container."""


def watch_segment(
    segment: RunningSegment,
    trial: WatchedTrial,
    say: Callable[[str], None],
    *,
    poll_s: Callable[[], float] = lambda: POLL_S,
    given_up: Callable[[], bool] = lambda: False,
    flag_period_s: float = FLAG_PERIOD_S,
) -> tuple[StopFlag | None, int | None]:
    """Supervise the segment; return its stop flag, and its exit code once it has exited.

    The code is None where it was given up or handed over before: it still runs then.
    """
    flag: StopFlag | None = None
    notice = ""
    relayed_at = asked_at = 0.0
    wake_file = trial.wake_file()
    while (code := segment.wait(poll_s())) is None and not (segment.handed_over or given_up()):
        if wake_file.woken() or time.monotonic() - asked_at >= flag_period_s:
            asked_at = time.monotonic()
            final = flag is not None and flag.final is not None
            newest = flag if final else if_airflow_answers(trial.stop_flag, say)
            if newest is not None and newest != flag:
                _obey(segment, newest, say if flag is None else None)
                flag = newest
            if flag is None and (now := trial.notice()) != notice:
                say(now or WITHDRAWN)
                notice = now
        if time.monotonic() - relayed_at >= STATUS_PERIOD_S:
            relayed_at = time.monotonic()
            if_airflow_answers(functools.partial(trial.relay, segment.ran_s), say)
    return flag, code


class ResizedTrial(Protocol):
    """A trial whose segment has ended for another size: its next lease, or that there is none."""

    def wake_file(self) -> WakeFile:
        """Return the file that is touched when there is a lease, or none to come."""

    def next_lease(self) -> Lease | None:
        """Return the lease with which the task goes on; None: none yet."""

    def stop_flag(self) -> StopFlag | None:
        """Return the stop flag of the segment that has ended."""


def await_lease(
    trial: ResizedTrial,
    say: Callable[[str], None],
    is_over: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease | StopFlag | None:
    """Return the next lease, the stop flag that ends the wait, or None if it has lasted too long.

    It is also over once `is_over` says so.
    """
    until_s, asked_at_s = clock() + RESIZE_WAIT_S, -inf
    wake_file = trial.wake_file()
    while clock() < until_s and not is_over():
        if wake_file.woken() or clock() - asked_at_s >= FLAG_PERIOD_S:
            asked_at_s = clock()
            if (lease := if_airflow_answers(trial.next_lease, say)) is not None:
                return lease
            flag = if_airflow_answers(trial.stop_flag, say)
            if flag is not None and not flag.resize:
                return flag
        sleep(POLL_S)
    return None


def if_airflow_answers(call: Callable[[], T], say: Callable[[str], None]) -> T | None:
    """Return what the call returns; None during an outage of Airflow's API: the trial trains on."""
    try:
        return call()
    except AirflowRuntimeError as error:
        say(f"Airflow does not answer now, the trial goes on: {_describe(error)}")
        return None


def _describe(error: AirflowRuntimeError) -> str:
    """Return Airflow's answer without the request, which may hold secrets."""
    kind, detail = error.error.error.value, error.error.detail or {}
    status = detail.get("status_code")
    message = detail_message(detail.get("detail")) or str(detail.get("message") or "")
    return " ".join(filter(None, (kind, str(status or ""), message[:MOST_CHARACTERS])))


def _obey(segment: RunningSegment, flag: StopFlag, say: Callable[[str], None] | None) -> None:
    """Stop it, if that is not done yet (`say`); shorten the grace if its trial has ended."""
    if say is not None:
        say(f"It is to stop: {flag.reason}")
        segment.stop()
    if flag.final is not None:
        segment.hurry()


@dataclass(slots=True)
class TaskLogCopy:
    """Logs each line and copies it; a pod's log that is read again replaces the copy.

    Airflow's triggerer (3.3.2) truncates its file of a task's log with each trigger of a try. So
    the lines of a segment also go to a file next to the trial's folder, and the task repeats
    those of its earlier segments before it defers again.
    """

    path: Path
    say: Callable[[str], None]
    _file: int | None = None
    _closed: bool = False

    @classmethod
    def from_segment(
        cls, folder: TrialFolder, epoch: int, say: Callable[[str], None]
    ) -> TaskLogCopy:
        """Return the copy for one segment's lines."""
        return cls(folder.path.with_name(f"{folder.path.name}.{epoch}.log"), say)

    def __call__(self, line: str) -> None:
        """Log a line and copy it; where it cannot be copied it is only logged."""
        if self._closed:
            return
        self.say(line)
        with contextlib.suppress(OSError):
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
                self._file = os.open(self.path, flags, 0o644)
            os.write(self._file, f"{line}\n".encode(errors="replace"))

    def close(self) -> None:
        """Stop the log: another process supervises the pod, or it is gone."""
        self._closed = True
        if self._file is not None:
            os.close(self._file)
            self._file = None


def pop_log_copies(folder: TrialFolder) -> Iterator[str]:
    """Yield the copied lines of all segments, oldest first; delete each file once it was read."""
    for path in _log_copies(folder):
        with path.open(errors="replace") as lines:
            for line in lines:
                yield line.rstrip("\n")
        path.unlink(missing_ok=True)


def delete_log_copies(folder: TrialFolder) -> None:
    """Delete the copies: the trial has ended, and its log has the last segment's lines."""
    for path in _log_copies(folder):
        path.unlink(missing_ok=True)


def _log_copies(folder: TrialFolder) -> list[Path]:
    def epoch(path: Path) -> int:
        return int(path.name.split(".")[-2])

    logs = folder.path.parent.glob(f"{folder.path.name}.*.log")
    return sorted((p for p in logs if p.name.split(".")[-2].isdigit()), key=epoch)

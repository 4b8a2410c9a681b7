"""Looking after a segment under way: obey its stop flag, pass on what its trial says.

The same in a task's process, which has one segment, and in Airflow's triggerer, which has many.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from airflow.sdk.exceptions import AirflowRuntimeError

from hermes_ops.airflow.folders import Nudge
from hermes_ops.airflow.records import StopFlag

if TYPE_CHECKING:
    from airflow.triggers.base import BaseTrigger

T = TypeVar("T")

POLL_S = 0.02
"""How often a running segment is looked after; its exit is noticed at once."""
FLAG_PERIOD_S = 1.0
"""How often the stop flag is asked for when no nudge says that there is one."""
STATUS_PERIOD_S = 0.5


class Running(Protocol):
    """A segment under way, wherever it runs.

    `trouble` is what is known of its end from outside; `handed_over` is True once `holder` can look
    after it in the place of the task that started it.
    """

    trouble: str

    @property
    def holder(self) -> BaseTrigger | None:
        """Who looks after it once it has started; None: whoever started it."""

    @property
    def handed_over(self) -> bool:
        """Whether it goes on without the one who started it."""

    def start(self) -> None:
        """Start it; HermesError when it cannot be started at all."""

    def wait(self, seconds: float) -> int | None:
        """Its exit code, or None when it still runs after that long."""

    def stop(self) -> None:
        """Tell it to checkpoint and exit."""

    def hurry(self) -> None:
        """Its trial is over: cut off soon what it has not done."""

    def finish(self) -> None:
        """Leave nothing of it behind; may be called again."""

    def release(self) -> None:
        """Its task cannot go on with it: what the task's next try can take over lives on."""


class Watched(Protocol):
    """What is to be known of a segment's trial meanwhile."""

    def nudge(self) -> Nudge:
        """Given when there is a stop flag."""

    def stop_flag(self) -> StopFlag | None:
        """The stop flag of the segment's lease."""

    def relay(self) -> None:
        """Pass on what the trial says of itself."""


def look_after(
    segment: Running,
    trial: Watched,
    say: Callable[[str], None],
    *,
    poll_s: Callable[[], float] = lambda: POLL_S,
    given_up: Callable[[], bool] = lambda: False,
) -> tuple[StopFlag | None, int | None]:
    """Its stop flag, and its exit code once it has exited.

    The code is None where it was given up or handed over before: then it goes on.
    """
    flag: StopFlag | None = None
    told_at = asked_at = 0.0
    nudge = trial.nudge()
    while (code := segment.wait(poll_s())) is None and not (segment.handed_over or given_up()):
        if nudge.taken() or time.monotonic() - asked_at >= FLAG_PERIOD_S:
            asked_at = time.monotonic()
            final = flag is not None and flag.final is not None
            fresh = flag if final else if_airflow_answers(trial.stop_flag, say)
            if fresh is not None and fresh != flag:
                _obey(segment, fresh, say if flag is None else None)
                flag = fresh
        if time.monotonic() - told_at >= STATUS_PERIOD_S:
            told_at = time.monotonic()
            if_airflow_answers(trial.relay, say)
    return flag, code


def if_airflow_answers(call: Callable[[], T], say: Callable[[str], None]) -> T | None:
    """What it returns; None while Airflow's API is away: the trial trains on meanwhile."""
    try:
        return call()
    except AirflowRuntimeError as error:
        say(f"Airflow does not answer now, the trial goes on: {error}")
        return None


def _obey(segment: Running, flag: StopFlag, say: Callable[[str], None] | None) -> None:
    """Stop it, if it has not been told before (`say`); cut it off soon if its trial is over."""
    if say is not None:
        say(f"It is to stop: {flag.reason}")
        segment.stop()
    if flag.final is not None:
        segment.hurry()

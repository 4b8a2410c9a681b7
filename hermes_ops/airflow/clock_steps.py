"""Steps of the clock: a person or NTP sets it, or the machine was suspended.

A duration that is computed from a recorded time would be wrong by the size of the step. The uptime
(the monotonic clock) makes no steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

LEAST_STEP_S = 2.0
"""A smaller difference is drift."""

SETTLED_S = 10.0
"""Seconds after a step in which the tasks of trials have corrected their records."""


@dataclass(slots=True)
class ClockSteps:
    """Detects steps of the clock by comparing it with the uptime."""

    clock: Callable[[], float] = time.time
    uptime: Callable[[], float] = time.monotonic
    _ahead_s: float = field(init=False)
    _stepped_s: float = -inf

    def __post_init__(self) -> None:
        self._ahead_s = self.clock() - self.uptime()

    def step_s(self) -> float:
        """Return by how many seconds the clock was set since the last call; 0 if it was not."""
        ahead_s = self.clock() - self.uptime()
        step_s = ahead_s - self._ahead_s
        if abs(step_s) < LEAST_STEP_S:
            return 0.0
        self._ahead_s, self._stepped_s = ahead_s, self.uptime()
        return step_s

    def is_settled(self) -> bool:
        """Return whether the last step is at least SETTLED_S ago: records fit the clock again."""
        self.step_s()
        return self.uptime() - self._stepped_s >= SETTLED_S


def is_due(now_s: float, due_s: float, most_s: float) -> bool:
    """Return whether work that was postponed until `due_s`, by at most `most_s`, is due.

    It is due too when the clock has been set back since: otherwise it would be delayed by the size
    of that step.
    """
    return not due_s - most_s <= now_s < due_s

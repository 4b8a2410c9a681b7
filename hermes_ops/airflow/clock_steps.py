"""Steps of the clock: somebody or NTP sets it, or the machine was suspended meanwhile.

What is counted from a time on record would be wrong by as much. The uptime knows of no steps.
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
    """Notices the steps of the clock since it was made."""

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
        """Return whether the records on which usage is counted fit the clock now."""
        self.step_s()
        return self.uptime() - self._stepped_s >= SETTLED_S

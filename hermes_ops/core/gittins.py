"""The Gittins index of a job's attained service, from the sizes of past jobs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import inf

MOST_LEARNT = 1_000  # sizes of finished jobs that are remembered


@dataclass(frozen=True, slots=True)
class Sizes:
    """An empirical distribution of GPU-seconds, ascending."""

    gpu_s: tuple[float, ...] = ()
    sums: tuple[float, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.gpu_s))
        object.__setattr__(self, "gpu_s", ordered)
        object.__setattr__(self, "sums", (0.0, *accumulate(ordered)))

    def index(self, attained_gpu_s: float, delta_gpu_s: float) -> float:
        """How likely the job ends within `delta_gpu_s` more, for what it will have cost then.

        Of the past sizes S above a: P(S <= a + delta) / E, in 1/GPU-s, where E is the mean of S
        where S <= a + delta, of delta elsewhere; 0 when there are none. It is looked up 1 GPU-s
        below the next past size, so that it changes only where a passes one.

        Source: the public simulator of Tiresias; the figures of the paper's example, 2 / E[S |
        S > a], are these for a delta without end, times 2.
        """
        above = bisect_right(self.gpu_s, attained_gpu_s)
        if above == len(self.gpu_s):
            return 0.0
        within = bisect_right(self.gpu_s, self.gpu_s[above] - 1 + delta_gpu_s)
        left, ending = len(self.gpu_s) - above, within - above
        rest_gpu_s = delta_gpu_s * (left - ending) if left > ending else 0.0
        return _ratio(ending, self.sums[within] - self.sums[above] + rest_gpu_s)

    def textbook_index(self, attained_gpu_s: float, delta_gpu_s: float) -> float:
        """P(S <= a + delta) / E[min(S - a, delta)] over S > a, in 1/GPU-s: Gittins' own."""
        above = bisect_right(self.gpu_s, attained_gpu_s)
        within = bisect_right(self.gpu_s, attained_gpu_s + delta_gpu_s)
        left, ending = len(self.gpu_s) - above, within - above
        rest_gpu_s = delta_gpu_s * (left - ending) if left > ending else 0.0
        ending_gpu_s = self.sums[within] - self.sums[above] - attained_gpu_s * ending
        return _ratio(ending, ending_gpu_s + rest_gpu_s)


def _ratio(ending: int, cost_gpu_s: float) -> float:
    if not ending:
        return 0.0
    return ending / cost_gpu_s if cost_gpu_s > 0 else inf


@lru_cache(maxsize=16)  # they change with a finished job at most
def sizes(gpu_s: tuple[float, ...]) -> Sizes:
    """The distribution of these sizes."""
    return Sizes(gpu_s)


def learnt(known: tuple[float, ...], more: Iterable[float]) -> tuple[float, ...]:
    """The newest `MOST_LEARNT` sizes."""
    return (*known, *more)[-MOST_LEARNT:]

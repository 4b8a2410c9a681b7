"""Known configurations first, then those of another sampler (warm start)."""

from __future__ import annotations

from collections.abc import Sequence

from hermes_ops.search.interface import Observation, Sampler
from hermes_ops.search.space import Config


class KnownFirst:
    """Give the listed points to the first trials; `inner` goes on with the numbers after them."""

    def __init__(self, inner: Sampler, points: Sequence[Config]) -> None:
        self._inner = inner
        self._points = tuple(points)

    @property
    def size(self) -> int | None:
        """That of the inner sampler."""
        return self._inner.size

    def exhausted(self, number: int) -> bool:
        """Behind the points, as the inner sampler says."""
        return number >= len(self._points) and self._inner.exhausted(number)

    def ask(self, number: int, history: Sequence[Observation]) -> Config:
        """The point of that number, or the inner sampler's answer."""
        if number < len(self._points):
            return dict(self._points[number])
        return self._inner.ask(number, history)


class Limited:
    """The first `max_trials` configurations of another sampler."""

    def __init__(self, inner: Sampler, max_trials: int) -> None:
        self._inner = inner
        self._max_trials = max_trials

    @property
    def size(self) -> int:
        """The limit, or less if the inner sampler has less."""
        inner = self._inner.size
        return self._max_trials if inner is None else min(inner, self._max_trials)

    def exhausted(self, number: int) -> bool:
        """True behind the limit."""
        return number >= self._max_trials or self._inner.exhausted(number)

    def ask(self, number: int, history: Sequence[Observation]) -> Config:
        """The inner sampler's answer; IndexError behind the limit."""
        if number >= self._max_trials:
            raise IndexError(f"the sweep has {self._max_trials} trials, none of number {number}")
        return self._inner.ask(number, history)

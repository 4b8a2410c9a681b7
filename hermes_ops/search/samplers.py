"""Grid and random search, and samplers around another one: points first, a limit, a check.

No configuration is used twice before all have been used.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from hermes_ops.errors import HermesError
from hermes_ops.search.feasible import (
    Feasible,
    Key,
    Untried,
    approach,
    feasible_positions,
    key_of,
    random_quantiles,
    size_of,
    witnesses,
)
from hermes_ops.search.interface import Observation, Sampler
from hermes_ops.search.space import Config
from hermes_ops.search.tree import Combinations, axes, can_repeat, from_units


class GridSampler:
    """Try all combinations that satisfy the constraints, except the points that were tried first.

    The first numbers belong to the points, which `KnownPointsFirst` gives. The order is that of
    `Combinations`. The history is ignored.
    """

    def __init__(self, feasible: Feasible, points: Sequence[Mapping[str, object]] = ()) -> None:
        """Raise ValueError for a continuous parameter, a point outside, or nothing to try."""
        self._positions = feasible_positions(feasible)
        if not self._positions:
            raise ValueError("no combination satisfies the constraints")
        self._combinations = Combinations(feasible.space)
        self._point_count = len(points)
        places = {self._combinations.position(feasible.canonical(point)) for point in points}
        self._taken = sorted(bisect_left(self._positions, place) for place in places)

    @property
    def size(self) -> int:
        """The number of combinations."""
        return len(self._positions)

    def exhausted(self, number: int) -> bool:
        """Return True after the last combination."""
        return number >= self.size

    def ask(self, number: int, history: Sequence[Observation]) -> Config:  # noqa: ARG002 - interface
        """Return the combination of that number."""
        if self.exhausted(number):
            raise IndexError(f"the grid has {self.size} combinations: there is no number {number}")
        place = number - self._point_count
        for taken in self._taken:  # ascending: each one at or before this place shifts it by one
            place += taken <= place
        return self._combinations.at(self._positions[place])


ATTEMPTS = 32
"""Draws of one trial."""


def seed_of(*numbers: int) -> int:
    """Derive a 32-bit seed for one trial of one sweep, independent of its neighbours'."""
    import numpy as np

    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


_LOCAL = threading.local()


def _uniform(names: Sequence[str], seed: int) -> dict[str, float]:
    """Return the quantiles that `RandomState(seed)` draws, which takes 50 times as long to make."""
    import numpy as np

    if not hasattr(_LOCAL, "chance"):
        _LOCAL.chance = np.random.RandomState(0)
    _LOCAL.chance.seed(seed)
    return {name: float(_LOCAL.chance.uniform()) for name in sorted(names)}


class RandomSampler:
    """Draw every trial at random; trial `number` depends on the seed, the number and the points.

    No configuration is used twice before all have been used: a draw that equals an earlier trial
    is repeated, and after `ATTEMPTS` draws an untried configuration near the last draw is taken.
    That matters in a space whose values can be counted, and for values of a choice that leave no
    continuous parameter. The first trials are the points to evaluate. No later trial gets one of
    them, though the same seed would draw the best of an earlier sweep again.

    A draw that does not satisfy the constraints is drawn again, `ATTEMPTS` times at most; then the
    last one is approached from one of some configurations that do (our choice).

    Source: Bergstra and Bengio, "Random search for hyper-parameter optimization", JMLR 2012.
    """

    size = None

    def __init__(self, feasible: Feasible, seed: int, points: Sequence[Config] = ()) -> None:
        """Raise ValueError when nothing is found that satisfies the constraints."""
        self._feasible = feasible
        self._seed = seed
        self._points = tuple(points)
        self._point_count = frozenset(map(key_of, self._points))
        self._witnesses = witnesses(feasible) if feasible.constraints else ()
        if feasible.constraints and not self._witnesses:
            raise ValueError("no configuration was found that satisfies the constraints")
        self._can_repeat = can_repeat(feasible.space)
        self._size = size_of(feasible)
        self._sequence: list[Config] = []  # where draws can repeat: the trials 0, 1, ... as drawn
        self._taken: set[Key] = set()  # among them, since all were drawn the last time

    def exhausted(self, number: int) -> bool:  # noqa: ARG002 - interface
        """Return False: there is always another draw."""
        return False

    def ask(self, number: int, history: Sequence[Observation]) -> Config:  # noqa: ARG002 - interface
        """Return the draw of that number."""
        if not self._can_repeat:
            return self._fresh(number)
        while len(self._sequence) <= number:
            self._extend(len(self._sequence))
        return dict(self._sequence[number])

    def _fresh(self, number: int) -> Config:
        """Return the first feasible draw that is not one of the points to evaluate."""
        for drawn in self._draws(number):
            config = from_units(self._feasible.space, drawn)
            if key_of(config) not in self._point_count and self._feasible.holds(config):
                return config
        return from_units(self._feasible.space, self.units(number))

    def units(self, number: int) -> Mapping[str, float]:
        """Return the quantiles of the first feasible draw, whether another trial has it or not.

        Those of inactive parameters are included.
        """
        drawn: Mapping[str, float] = {}
        for drawn in self._draws(number):
            if self._feasible.holds(from_units(self._feasible.space, drawn)):
                return drawn
        start = self._witnesses[number % len(self._witnesses)]
        return approach(self._feasible, start, drawn)

    def _extend(self, number: int) -> None:
        """Add the trial of that number to the sequence."""
        config = self._points[number] if number < len(self._points) else self._untried(number)
        self._sequence.append(config)
        self._taken.add(key_of(config))
        if self._size is not None and len(self._taken) >= self._size:
            self._taken.clear()

    def _untried(self, number: int) -> Config:
        space = self._feasible.space
        for drawn in self._draws(number):
            config = from_units(space, drawn)
            if key_of(config) not in self._taken and self._feasible.holds(config):
                return config
        wanted = self.units(number)
        near = Untried(self._feasible).near(wanted, self._taken, seed_of(self._seed, number))
        return from_units(space, wanted) if near is None else near

    def _draws(self, number: int) -> Iterator[Mapping[str, float]]:
        """Yield the draw of that number, then further draws in case it is refused.

        The first one is that of scikit-learn's `ParameterSampler` with this seed.
        """
        names = [name for name, _ in axes(self._feasible.space)]
        seed = seed_of(self._seed, number)
        yield _uniform(names, seed)
        yield from islice(random_quantiles(names, seed), ATTEMPTS - 1)


class KnownPointsFirst:
    """Give the listed points to the first trials; `inner` answers for the numbers after them."""

    def __init__(self, inner: Sampler, points: Sequence[Config]) -> None:
        self._inner = inner
        self._points = tuple(points)

    @property
    def size(self) -> int | None:
        """The size of the inner sampler, or the number of points if that is more."""
        inner = self._inner.size
        return None if inner is None else max(inner, len(self._points))

    def exhausted(self, number: int) -> bool:
        """Ask the inner sampler for numbers after the points."""
        return number >= len(self._points) and self._inner.exhausted(number)

    def ask(self, number: int, history: Sequence[Observation]) -> Config:
        """Return the point of that number, or the inner sampler's answer."""
        if number < len(self._points):
            return dict(self._points[number])
        return self._inner.ask(number, history)


class LimitedSampler:
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
        """Return True from the limit on, or when the inner sampler is exhausted."""
        return number >= self._max_trials or self._inner.exhausted(number)

    def ask(self, number: int, history: Sequence[Observation]) -> Config:
        """Return the inner sampler's answer; IndexError from the limit on."""
        if number >= self._max_trials:
            raise IndexError(
                f"the sweep has {self._max_trials} trials: there is no number {number}"
            )
        return self._inner.ask(number, history)


class CheckedSampler:
    """Another package's sampler, whose configurations are checked against the space."""

    def __init__(self, inner: Sampler, name: str, feasible: Feasible) -> None:
        self._inner = inner
        self._name = name
        self._feasible = feasible

    @property
    def size(self) -> int | None:
        """The size of the inner sampler, as a plain number."""
        size = self._inner.size
        return None if size is None else int(size)

    def exhausted(self, number: int) -> bool:
        """Ask the inner sampler."""
        return self._inner.exhausted(number)

    def ask(self, number: int, history: Sequence[Observation]) -> Config:
        """Return the inner sampler's answer.

        Raise HermesError if the sampler fails, or answers with a configuration outside the space.
        """
        fact = f"the sampler {self._name!r} gave trial {number}"
        try:
            config = self._inner.ask(number, history)
        except Exception as error:  # whatever a package raises
            reason = f"{type(error).__name__}: {error}"
            raise HermesError(
                f"{fact} no configuration ({reason}): correct its package."
            ) from error
        try:
            return self._feasible.canonical(config)
        except (KeyError, TypeError, ValueError) as error:
            what = f"a configuration outside the search space: {config!r} ({error})"
            raise HermesError(f"{fact} {what}.") from error

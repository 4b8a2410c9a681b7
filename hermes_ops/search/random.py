"""Random search: draws of numpy's, each configuration of a finite space once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from hermes_ops.search.distinct import Key, Untried, key_of, size_of
from hermes_ops.search.feasible import Feasible, approach, quantiles, witnesses
from hermes_ops.search.interface import Observation
from hermes_ops.search.space import Config
from hermes_ops.search.tree import axes, from_units, grid_size

ATTEMPTS = 32
"""Draws of one trial."""


def seed_of(*numbers: int) -> int:
    """A 32-bit seed for one trial of one sweep, unrelated to its neighbours'."""
    import numpy as np

    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


class RandomSampler:
    """Draw every trial at random; trial `number` depends on the seed, the number and the points.

    In a space whose values can be counted no configuration is drawn again before all of them have
    been: a draw that an earlier trial has is drawn again, and after `ATTEMPTS` draws an untried
    configuration near the last one is taken. The first trials have the points to evaluate.

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
        self._witnesses = witnesses(feasible) if feasible.constraints else ()
        if feasible.constraints and not self._witnesses:
            raise ValueError("no configuration was found that satisfies the constraints")
        self._is_finite = grid_size(feasible.space) is not None
        self._size = size_of(feasible)
        self._sequence: list[Config] = []  # of a finite space: the trials 0, 1, ... as drawn
        self._taken: set[Key] = set()  # among them, since all were drawn the last time

    def exhausted(self, number: int) -> bool:  # noqa: ARG002 - interface
        """Never."""
        return False

    def ask(self, number: int, history: Sequence[Observation]) -> Config:  # noqa: ARG002 - interface
        """The draw of that number."""
        if not self._is_finite:
            return from_units(self._feasible.space, self.units(number))
        while len(self._sequence) <= number:
            self._extend(len(self._sequence))
        return dict(self._sequence[number])

    def units(self, number: int) -> Mapping[str, float]:
        """The quantiles of the first draw that satisfies the constraints, whoever has it already.

        Those of inactive parameters are included.
        """
        drawn: Mapping[str, float] = {}
        for drawn in self._draws(number):
            if self._feasible.holds(from_units(self._feasible.space, drawn)):
                return drawn
        start = self._witnesses[number % len(self._witnesses)]
        return approach(self._feasible, start, drawn)

    def _extend(self, number: int) -> None:
        """Add the trial of that number to those of a finite space."""
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
        """The draw of that number, and more of them in case it cannot be taken.

        The first one is that of scikit-learn's `ParameterSampler` with this seed.
        """
        import numpy as np

        names = [name for name, _ in axes(self._feasible.space)]
        seed = seed_of(self._seed, number)
        chance = np.random.RandomState(seed)
        yield {name: float(chance.uniform()) for name in sorted(names)}
        yield from islice(quantiles(names, seed), ATTEMPTS - 1)

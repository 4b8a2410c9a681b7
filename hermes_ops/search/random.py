"""Random search, by scikit-learn's `ParameterSampler` over scipy distributions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from hermes_ops.search.feasible import Feasible, approach, quantiles, witnesses
from hermes_ops.search.interface import Observation
from hermes_ops.search.space import Config
from hermes_ops.search.tree import axes, from_units

ATTEMPTS = 32
"""Draws of one trial."""


def seed_of(*numbers: int) -> int:
    """A 32-bit seed for one trial of one sweep, unrelated to its neighbours'."""
    import numpy as np

    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


class RandomSampler:
    """Draw every trial independently; trial `number` depends on the seed and the number alone.

    A draw that does not satisfy the constraints is drawn again, `ATTEMPTS` times at most; then the
    last one is approached from one of some configurations that do (our choice).

    Source: Bergstra and Bengio, "Random search for hyper-parameter optimization", JMLR 2012.
    """

    size = None

    def __init__(self, feasible: Feasible, seed: int) -> None:
        """Raise ValueError when nothing is found that satisfies the constraints."""
        self._feasible = feasible
        self._seed = seed
        self._witnesses = witnesses(feasible) if feasible.constraints else ()
        if feasible.constraints and not self._witnesses:
            raise ValueError("no configuration was found that satisfies the constraints")

    def exhausted(self, number: int) -> bool:  # noqa: ARG002 - interface
        """Never."""
        return False

    def ask(self, number: int, history: Sequence[Observation]) -> Config:  # noqa: ARG002 - interface
        """The draw of that number."""
        return from_units(self._feasible.space, self.units(number))

    def units(self, number: int) -> Mapping[str, float]:
        """The quantiles of that draw, those of inactive parameters included."""
        drawn: Mapping[str, float] = {}
        for drawn in self._draws(number):
            if self._feasible.holds(from_units(self._feasible.space, drawn)):
                return drawn
        start = self._witnesses[number % len(self._witnesses)]
        return approach(self._feasible, start, drawn)

    def _draws(self, number: int) -> Iterator[Mapping[str, float]]:
        """The draw of that number, and more of them in case it does not satisfy the constraints."""
        from scipy.stats import uniform
        from sklearn.model_selection import ParameterSampler

        names = [name for name, _ in axes(self._feasible.space)]
        marginals = dict.fromkeys(names, uniform(0.0, 1.0))
        yield from ParameterSampler(marginals, 1, random_state=seed_of(self._seed, number))
        yield from islice(quantiles(names, seed_of(self._seed, number)), ATTEMPTS - 1)

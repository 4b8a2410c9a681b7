"""Random search, by scikit-learn's `ParameterSampler` over scipy distributions."""

from __future__ import annotations

from collections.abc import Sequence

from hermes_ops.search.interface import Observation
from hermes_ops.search.space import Config, Space, from_units


def seed_of(seed: int, number: int) -> int:
    """A 32-bit seed for one trial of one sweep, unrelated to its neighbours'."""
    import numpy as np

    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


class RandomSampler:
    """Draw every trial independently; trial `number` depends on the seed and the number alone.

    Source: Bergstra and Bengio, "Random search for hyper-parameter optimization", JMLR 2012.
    """

    size = None

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._seed = seed

    def exhausted(self, number: int) -> bool:  # noqa: ARG002 - interface
        """Never."""
        return False

    def ask(self, number: int, history: Sequence[Observation]) -> Config:  # noqa: ARG002 - interface
        """The draw of that number."""
        from scipy.stats import uniform
        from sklearn.model_selection import ParameterSampler

        axes = {name: uniform(0.0, 1.0) for name, _ in self._space}
        draws = ParameterSampler(axes, n_iter=1, random_state=seed_of(self._seed, number))
        return from_units(self._space, next(iter(draws)))

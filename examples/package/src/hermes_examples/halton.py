"""A sampler: points of a scrambled Halton sequence, which cover a space evenly."""

from collections.abc import Iterator, Mapping, Sequence

from hermes_ops.search import SearchSettings
from hermes_ops.search.interface import Observation
from hermes_ops.search.space import Config
from hermes_ops.search.tree import axes, from_units

MOST_DRAWS = 10_000
"""Points of the sequence that are looked at for a configuration that satisfies the constraints."""


class HaltonSampler:
    """Give each trial a point of its own among those that satisfy the constraints.

    The first trials have the known points, which no later one has. The sequence depends on the
    seed alone; results play no part. Source: Halton, "Algorithm 247", Communications of the ACM
    1964, by `scipy.stats.qmc.Halton`.
    """

    size = None

    def __init__(self, settings: SearchSettings) -> None:
        """Keep the settings; nothing is drawn yet."""
        self._settings = settings
        self._names = sorted(name for name, _ in axes(settings.feasible.space))

    def exhausted(self, number: int) -> bool:
        """Return False: there is always another point."""
        return False

    def ask(self, number: int, history: Sequence[Observation]) -> Config:
        """Return the configuration; ValueError when too few points satisfy the constraints."""
        feasible, known = self._settings.feasible, self._settings.points
        left = number - len(known)  # the first trials are those of the known points
        for units in self._points():
            config = from_units(feasible.space, units)
            if feasible.holds(config) and config not in known:
                if not left:
                    return config
                left -= 1
        raise ValueError(f"too few of {MOST_DRAWS:,} points satisfy the constraints")

    def _points(self) -> Iterator[Mapping[str, float]]:
        """The sequence as quantiles by name, in (0, 1)."""
        from scipy.stats import qmc

        sequence = qmc.Halton(len(self._names), scramble=True, rng=self._settings.seed)
        for _ in range(MOST_DRAWS):
            (row,) = sequence.random(1)
            yield {name: float(value) for name, value in zip(self._names, row, strict=True)}

"""Configurations of a space that can be counted, each of them tried once before any is repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import cast

from hermes_ops.search.combinations import Combinations
from hermes_ops.search.feasible import Feasible, countable, positions, quantiles
from hermes_ops.search.space import Choice, Config, Discrete, Parameter, Value, text
from hermes_ops.search.tree import axes, from_units, grid_size

Key = tuple[tuple[str, str], ...]

MOST_NEIGHBOURS = 1_000
"""Configurations beside one that are looked at."""

MOST_WALKED = 1_000_000
"""Configurations of a space that is walked through; in a larger one a random draw is untried."""

RANDOM_DRAWS = 64
"""Random configurations that are looked at when all beside one have been tried."""


def size_of(feasible: Feasible) -> int | None:
    """The number of configurations; None where one parameter is continuous.

    None too where constraints leave a part of more combinations than are looked through.
    """
    size = grid_size(feasible.space)
    if size is None or not feasible.constraints:
        return size
    return len(positions(feasible)) if size <= countable(feasible) else None


def key_of(config: Mapping[str, Value]) -> Key:
    """What two configurations share exactly when they are the same for a trial."""
    return tuple(sorted((name, text(value)) for name, value in config.items()))


def tried(configs: Iterable[Mapping[str, Value]], size: int | None) -> frozenset[Key]:
    """The configurations that are not to be tried now.

    Those of the configurations that were tried; once all `size` of them were, those that were tried
    more often than others.
    """
    counts = Counter(key_of(config) for config in configs)
    whole_rounds = min(counts.values()) if size is not None and len(counts) >= size else 0
    return frozenset(key for key, count in counts.items() if count > whole_rounds)


@dataclass(frozen=True, slots=True)
class Untried:
    """Finds an untried configuration near a wanted one, the same one for the same arguments."""

    feasible: Feasible

    def near(self, wanted: Mapping[str, float], taken: Collection[Key], seed: int) -> Config | None:
        """Return the nearest untried configuration that is found; None when none is.

        `wanted`: quantiles of all parameters. Looks at the configurations that differ in one
        parameter, then at random ones, then through the whole space where it can be.
        """
        for group in (self._beside(wanted, seed), self._anywhere(seed), self._all(seed)):
            for config in group:
                if key_of(config) not in taken and self.feasible.holds(config):
                    return config
        return None

    def _beside(self, wanted: Mapping[str, float], seed: int) -> Iterator[Config]:
        """Yield what differs in one parameter, the nearest first; equally near ones in any order.

        Values of a choice have no order: each is as far as half of a range.
        """
        space = self.feasible.space
        config = from_units(space, wanted)
        moves: list[tuple[float, float, str, float]] = []
        ties = quantiles(("tie",), seed)
        for name, parameter in axes(space):
            if name not in config:
                continue
            for distance, unit in islice(_moves(parameter, config[name]), MOST_NEIGHBOURS):
                moves.append((distance, next(ties)["tie"], name, unit))
        for _, _, name, unit in sorted(moves)[:MOST_NEIGHBOURS]:
            yield from_units(space, {**wanted, name: unit})

    def _anywhere(self, seed: int) -> Iterator[Config]:
        names = [name for name, _ in axes(self.feasible.space)]
        for units in islice(quantiles(names, seed), RANDOM_DRAWS):
            yield from_units(self.feasible.space, units)

    def _all(self, seed: int) -> Iterator[Config]:
        """Yield every configuration from a place that the seed tells; none of a large space."""
        size = size_of(self.feasible)
        if size is None or size > MOST_WALKED:
            return
        places, combinations = positions(self.feasible), Combinations(self.feasible.space)
        for step in range(len(places)):
            yield combinations.at(places[(seed + step) % len(places)])


def _moves(parameter: Parameter, value: Value) -> Iterator[tuple[float, float]]:
    """Yield the distance and the quantile of every other value, the nearest first if ordered."""
    axis = cast(Discrete, parameter)
    levels, here = axis.cardinality, axis.index_of(value)
    if isinstance(axis, Choice):
        for index in range(levels):
            if index != here:
                yield 0.5, axis.to_unit(axis.at(index))
        return
    start = axis.to_unit(value)
    for step in range(1, levels):
        for index in (here - step, here + step):
            if 0 <= index < levels:
                unit = axis.to_unit(axis.at(index))
                yield abs(unit - start), unit

"""The configurations of a space that satisfy its constraints: search, count, projection.

No configuration is used twice before all have been used.

Every search is bounded: a space in which nothing is found is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import cast

from hermes_ops.search.constraint import Constraint
from hermes_ops.search.space import (
    ChoiceParameter,
    Config,
    Discrete,
    SearchParameter,
    Space,
    Value,
    text,
)
from hermes_ops.search.tree import (
    Combinations,
    axes,
    canonical,
    from_units,
    grid_size,
    is_branching,
    to_units,
)

MOST_COMBINATIONS = 100_000
MOST_EVALUATIONS = 10_000_000
MOST_DRAWN = 2_000_000  # values and operations, over all draws
DRAWS = 10_000
FEWEST_DRAWS = 200
WITNESSES = 16
SHARES = tuple(0.5**n for n in range(6))


@dataclass(frozen=True, slots=True)
class Feasible:
    """A space with its constraints.

    Equality is that of the written form: 1, 1.0 and true, equal in Python, are told apart.
    """

    space: Space = field(compare=False)
    constraints: tuple[Constraint, ...] = field(default=(), compare=False)
    written: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "written", f"{self.space!r} {self.constraints!r}")

    def holds(self, config: Config) -> bool:
        """Return True if every constraint is satisfied."""
        return all(constraint.holds(config) for constraint in self.constraints)

    def canonical(self, config: Mapping[str, object]) -> Config:
        """Return it as the space would produce it; ValueError or KeyError if it never would."""
        canonical_config = canonical(self.space, config)
        for constraint in self.constraints:
            if not constraint.holds(canonical_config):
                raise ValueError(f"does not satisfy {constraint.source}")
        return canonical_config


def most_combinations(feasible: Feasible) -> int:
    """Return how many combinations a constrained grid may have before its constraints apply."""
    size = sum(constraint.size for constraint in feasible.constraints)
    return min(MOST_COMBINATIONS, MOST_EVALUATIONS // max(size, 1))


@lru_cache(maxsize=16)
def feasible_positions(feasible: Feasible) -> Sequence[int]:
    """Return the positions in the whole grid of the feasible combinations, ascending.

    Raises ValueError for a grid that cannot be counted or is too large to enumerate.
    """
    size = grid_size(feasible.space)
    if size is None:
        raise ValueError("a grid needs parameters whose values can be counted")
    if not feasible.constraints:
        return range(size)
    if size > most_combinations(feasible):
        raise ValueError(f"{size} combinations are too many for a grid with constraints")
    return tuple(
        n for n, config in enumerate(Combinations(feasible.space)) if feasible.holds(config)
    )


@lru_cache(maxsize=64)
def witnesses(feasible: Feasible) -> tuple[Mapping[str, float], ...]:
    """Return the quantiles of up to `WITNESSES` feasible configurations; empty if none is found.

    A space that can be counted is enumerated. Of any other up to `DRAWS` random configurations
    are drawn (fewer of very long constraints), the same ones each time.
    """
    space, size = feasible.space, grid_size(feasible.space)
    units: Iterator[Mapping[str, float]]
    if size is not None and size <= most_combinations(feasible):
        units = (to_units(space, c) for c in Combinations(space) if feasible.holds(c))
    else:
        units = (u for u in _draws(feasible) if feasible.holds(from_units(space, u)))
    return tuple(islice(units, WITNESSES))


def _draws(feasible: Feasible) -> Iterator[dict[str, float]]:
    names = [name for name, _ in axes(feasible.space)]
    size = len(names) + sum(constraint.size for constraint in feasible.constraints)
    return islice(random_quantiles(names, 0), max(FEWEST_DRAWS, min(DRAWS, MOST_DRAWN // size)))


def random_quantiles(names: Sequence[str], seed: int) -> Iterator[dict[str, float]]:
    """Yield random quantiles of those names, without end."""
    import numpy as np

    rng = np.random.default_rng(seed)
    while True:
        yield dict(zip(names, rng.random(len(names)).tolist(), strict=True))


def approach(
    feasible: Feasible, start: Mapping[str, float], wanted: Mapping[str, float]
) -> dict[str, float]:
    """Move from a feasible configuration towards `wanted`; return the feasible quantiles reached.

    `start` satisfies the constraints. One after the other, in the order of the space, its
    quantiles go the whole way to the wanted ones, or half of it, a quarter, and so on, as the
    constraints allow.
    """
    named = frozenset[str]().union(*(constraint.names for constraint in feasible.constraints))
    held = {name for name, p in axes(feasible.space) if name in named or is_branching(p)}
    reached = {**start, **{n: u for n, u in wanted.items() if n not in held}}
    for name in (name for name, _ in axes(feasible.space) if name in held and name in wanted):
        reached[name] = _nearest(feasible, reached, name, wanted[name])
    return reached


def _nearest(feasible: Feasible, reached: Mapping[str, float], name: str, wanted: float) -> float:
    here = reached[name]
    for share in SHARES:
        there = here + share * (wanted - here)
        if feasible.holds(from_units(feasible.space, {**reached, name: there})):
            return there
    return here


Key = tuple[tuple[str, str], ...]

MOST_NEIGHBOURS = 1_000
"""Neighbours of a configuration that are examined."""

MOST_ENUMERATED = 1_000_000
"""Configurations of a space that is enumerated; in a larger one a random draw is untried."""

RANDOM_DRAWS = 64
"""Random configurations that are examined when all neighbours have been tried."""


def size_of(feasible: Feasible) -> int | None:
    """Return the number of configurations; None where one parameter is continuous.

    None too where constraints leave a part of more combinations than are enumerated.
    """
    size = grid_size(feasible.space)
    if size is None or not feasible.constraints:
        return size
    return len(feasible_positions(feasible)) if size <= most_combinations(feasible) else None


def key_of(config: Mapping[str, Value]) -> Key:
    """Return a key that is equal for configurations that are the same for a trial."""
    return tuple(sorted((name, text(value)) for name, value in config.items()))


def taken_keys(configs: Iterable[Mapping[str, Value]], size: int | None) -> frozenset[Key]:
    """Return the keys of the configurations that must not be tried now.

    These are the given configurations; once all `size` of them were tried, only those that were
    tried more often than others.
    """
    counts = Counter(key_of(config) for config in configs)
    whole_rounds = min(counts.values()) if size is not None and len(counts) >= size else 0
    return frozenset(key for key, count in counts.items() if count > whole_rounds)


@dataclass(frozen=True, slots=True)
class Untried:
    """A search for an untried configuration near a wanted one, deterministic in its arguments."""

    feasible: Feasible

    def near(self, wanted: Mapping[str, float], taken: Collection[Key], seed: int) -> Config | None:
        """Return the nearest untried configuration that is found; None when none is.

        `wanted`: quantiles of all parameters. Candidates are the configurations that differ in one
        parameter, then random ones, then the whole space where it can be enumerated.
        """
        for group in (self._neighbours(wanted, seed), self._random(seed), self._all(seed)):
            for config in group:
                if key_of(config) not in taken and self.feasible.holds(config):
                    return config
        return None

    def _neighbours(self, wanted: Mapping[str, float], seed: int) -> Iterator[Config]:
        """Yield configurations that differ in one parameter, nearest first; ties in random order.

        Values of a choice have no order: each is as far as half of a range.
        """
        space = self.feasible.space
        config = from_units(space, wanted)
        moves: list[tuple[float, float, str, float]] = []
        ties = random_quantiles(("tie",), seed)
        for name, parameter in axes(space):
            if name not in config:
                continue
            for distance, unit in islice(_moves(parameter, config[name]), MOST_NEIGHBOURS):
                moves.append((distance, next(ties)["tie"], name, unit))
        for _, _, name, unit in sorted(moves)[:MOST_NEIGHBOURS]:
            yield from_units(space, {**wanted, name: unit})

    def _random(self, seed: int) -> Iterator[Config]:
        names = [name for name, _ in axes(self.feasible.space)]
        for units in islice(random_quantiles(names, seed), RANDOM_DRAWS):
            yield from_units(self.feasible.space, units)

    def _all(self, seed: int) -> Iterator[Config]:
        """Yield every configuration from a position given by the seed; none of a large space."""
        size = size_of(self.feasible)
        if size is None or size > MOST_ENUMERATED:
            return
        places, combinations = feasible_positions(self.feasible), Combinations(self.feasible.space)
        for step in range(len(places)):
            yield combinations.at(places[(seed + step) % len(places)])


def _moves(parameter: SearchParameter, value: Value) -> Iterator[tuple[float, float]]:
    """Yield the distance and the quantile of every other value, the nearest first if ordered.

    A continuous parameter yields nothing.
    """
    if parameter.cardinality is None:
        return
    axis = cast(Discrete, parameter)
    levels, here = axis.cardinality, axis.index_of(value)
    if isinstance(axis, ChoiceParameter):
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

"""The configurations of a space that satisfy its constraints: found, counted, come nearest to.

All of it is bounded: a space in which nothing is found is reported, never searched for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

from hermes_ops.search.combinations import Combinations
from hermes_ops.search.constraint import Constraint
from hermes_ops.search.space import Config, Space
from hermes_ops.search.tree import axes, branching, canonical, from_units, grid_size, to_units

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

    Two are equal when they are written alike: 1, 1.0 and true, equal in Python, are told apart.
    """

    space: Space = field(compare=False)
    constraints: tuple[Constraint, ...] = field(default=(), compare=False)
    written: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "written", f"{self.space!r} {self.constraints!r}")

    def holds(self, config: Config) -> bool:
        """True if every constraint is satisfied."""
        return all(constraint.holds(config) for constraint in self.constraints)

    def canonical(self, config: Mapping[str, object]) -> Config:
        """As the space itself would produce it; ValueError or KeyError if it never would."""
        made = canonical(self.space, config)
        for constraint in self.constraints:
            if not constraint.holds(made):
                raise ValueError(f"does not satisfy {constraint.source}")
        return made


def countable(feasible: Feasible) -> int:
    """How many combinations a constrained grid may have before its constraints are applied."""
    size = sum(constraint.size for constraint in feasible.constraints)
    return min(MOST_COMBINATIONS, MOST_EVALUATIONS // max(size, 1))


@lru_cache(maxsize=16)
def positions(feasible: Feasible) -> Sequence[int]:
    """Where the combinations that satisfy the constraints stand in the whole grid, ascending.

    Raises ValueError for a grid that cannot be counted or is too large to be looked through.
    """
    size = grid_size(feasible.space)
    if size is None:
        raise ValueError("a grid needs parameters whose values can be counted")
    if not feasible.constraints:
        return range(size)
    if size > countable(feasible):
        raise ValueError(f"{size} combinations are too many for a grid with constraints")
    return tuple(
        n for n, config in enumerate(Combinations(feasible.space)) if feasible.holds(config)
    )


@lru_cache(maxsize=64)
def witnesses(feasible: Feasible) -> tuple[Mapping[str, float], ...]:
    """The quantiles of some configurations that satisfy the constraints; none when none is found.

    A space that can be counted is looked through; of any other up to `DRAWS` random
    configurations are tried (fewer of very long constraints), the same ones each time. The search
    ends with the first `WITNESSES`.
    """
    space, size = feasible.space, grid_size(feasible.space)
    found: Iterator[Mapping[str, float]]
    if size is not None and size <= countable(feasible):
        found = (to_units(space, c) for c in Combinations(space) if feasible.holds(c))
    else:
        found = (u for u in _draws(feasible) if feasible.holds(from_units(space, u)))
    return tuple(islice(found, WITNESSES))


def _draws(feasible: Feasible) -> Iterator[dict[str, float]]:
    names = [name for name, _ in axes(feasible.space)]
    size = len(names) + sum(constraint.size for constraint in feasible.constraints)
    return islice(quantiles(names, 0), max(FEWEST_DRAWS, min(DRAWS, MOST_DRAWN // size)))


def quantiles(names: Sequence[str], seed: int) -> Iterator[dict[str, float]]:
    """Random quantiles of those names, without end."""
    import numpy as np

    rng = np.random.default_rng(seed)
    while True:
        yield dict(zip(names, rng.random(len(names)).tolist(), strict=True))


def approach(
    feasible: Feasible, start: Mapping[str, float], wanted: Mapping[str, float]
) -> dict[str, float]:
    """The quantiles of a configuration that satisfies the constraints, as `wanted` as it can be.

    `start` satisfies them. One after the other, in the order of the space, its quantiles go the
    whole way to the wanted ones, or half of it, a quarter, and so on, as the constraints allow.
    """
    named = frozenset[str]().union(*(constraint.names for constraint in feasible.constraints))
    held = {name for name, p in axes(feasible.space) if name in named or branching(p)}
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

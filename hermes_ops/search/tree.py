"""A space as a tree: a value of a choice may bring parameters of its own.

Names are unique over the whole tree. A configuration holds the parameters that are active in it, a
choice before what its value brings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from hermes_ops.search.space import Choice, Config, Parameter, Space, Value

Signature = tuple[tuple[str, int], ...]


def branching(parameter: Parameter) -> bool:
    """True for a choice of which any value brings parameters with it."""
    return isinstance(parameter, Choice) and any(parameter.spaces)


def brought(parameter: Parameter, value: Value) -> Space:
    """The parameters that this value of a parameter brings with it; mostly none."""
    return parameter.space_of(value) if isinstance(parameter, Choice) else ()


def axes(space: Space) -> Iterator[tuple[str, Parameter]]:
    """Every parameter that any configuration may hold, a choice before those under it."""
    for name, parameter in space:
        yield name, parameter
        if isinstance(parameter, Choice):
            for below in parameter.spaces:
                yield from axes(below)


def grid_size(space: Space) -> int | None:
    """The number of configurations of a space; None with a continuous parameter in it."""
    size = 1
    for _, parameter in space:
        below = _sizes(parameter)
        if below is None:
            return None
        size *= below
    return size


def _sizes(parameter: Parameter) -> int | None:
    if not isinstance(parameter, Choice) or not parameter.spaces:
        return parameter.cardinality
    sizes = [grid_size(below) for below in parameter.spaces]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def branches(space: Space) -> Iterator[tuple[Signature, Space]]:
    """Every way to settle the branching choices, each with the flat space that is left.

    In it a settled choice has one value. The signature tells which: (name, index) of each. The
    last choice changes fastest.
    """
    for parts in product(*(list(_branches(name, parameter)) for name, parameter in space)):
        signature = tuple(step for settled, _ in parts for step in settled)
        yield signature, tuple(axis for _, flat in parts for axis in flat)


def _branches(name: str, parameter: Parameter) -> Iterator[tuple[Signature, Space]]:
    if not isinstance(parameter, Choice) or not branching(parameter):
        yield (), ((name, parameter),)
        return
    for index, below in enumerate(parameter.spaces):
        alone = (name, Choice((parameter.values[index],)))
        for signature, flat in branches(below):
            yield ((name, index), *signature), (alone, *flat)


def signature_of(space: Space, config: Mapping[str, Value]) -> Signature:
    """Which branch a configuration of the space belongs to."""
    steps: list[tuple[str, int]] = []
    for name, parameter in space:
        if isinstance(parameter, Choice) and branching(parameter):
            index = parameter.index_of(config[name])
            steps += [(name, index), *signature_of(parameter.spaces[index], config)]
    return tuple(steps)


def from_units(space: Space, units: Mapping[str, float]) -> Config:
    """The configuration at those quantiles, in the order of the space.

    Quantiles of parameters that are not active in it play no part.
    """
    config: Config = {}
    for name, parameter in space:
        config[name] = parameter.from_unit(float(units[name]))
        config |= from_units(brought(parameter, config[name]), units)
    return config


def to_units(space: Space, config: Mapping[str, Value]) -> dict[str, float]:
    """The quantiles of a configuration of the space."""
    units: dict[str, float] = {}
    for name, parameter in space:
        units[name] = parameter.to_unit(config[name])
        units |= to_units(brought(parameter, config[name]), config)
    return units


def canonical(space: Space, config: Mapping[str, object]) -> Config:
    """A configuration as the space itself would produce it; ValueError or KeyError if never."""
    made: Config = {}
    for name, parameter in space:
        made[name] = parameter.canonical(config[name])
        made |= canonical(brought(parameter, made[name]), config)
    return made

"""A space as a tree: a value of a choice may activate further parameters.

Names are unique over the whole tree. A configuration holds the parameters that are active in it, a
choice before the parameters that its value activates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate, product
from math import prod
from operator import itemgetter
from typing import cast

from hermes_ops.search.space import ChoiceParameter, Config, Discrete, SearchParameter, Space, Value

Signature = tuple[tuple[str, int], ...]


def is_branching(parameter: SearchParameter) -> bool:
    """Return True for a choice of which any value activates further parameters."""
    return isinstance(parameter, ChoiceParameter) and any(parameter.spaces)


def active_space(parameter: SearchParameter, value: Value) -> Space:
    """Return the parameters that this value of a parameter activates; mostly none."""
    return parameter.space_of(value) if isinstance(parameter, ChoiceParameter) else ()


def axes(space: Space) -> Iterator[tuple[str, SearchParameter]]:
    """Yield every parameter that any configuration may hold, a choice before those under it."""
    for name, parameter in space:
        yield name, parameter
        if isinstance(parameter, ChoiceParameter):
            for below in parameter.spaces:
                yield from axes(below)


def grid_size(space: Space) -> int | None:
    """Return the number of configurations of a space; None with a continuous parameter in it."""
    size = 1
    for _, parameter in space:
        below = _sizes(parameter)
        if below is None:
            return None
        size *= below
    return size


def _sizes(parameter: SearchParameter) -> int | None:
    if not isinstance(parameter, ChoiceParameter) or not parameter.spaces:
        return parameter.cardinality
    sizes = [grid_size(below) for below in parameter.spaces]
    counts = [size for size in sizes if size is not None]
    return sum(counts) if len(counts) == len(sizes) else None


def can_repeat(space: Space) -> bool:
    """Return True if two draws may be equal: some values leave no continuous parameter."""
    return all(_can_repeat(parameter) for _, parameter in space)


def _can_repeat(parameter: SearchParameter) -> bool:
    if isinstance(parameter, ChoiceParameter) and parameter.spaces:
        return any(map(can_repeat, parameter.spaces))
    return parameter.cardinality is not None


def branches(space: Space) -> Iterator[tuple[Signature, Space]]:
    """Yield every assignment of the branching choices, each with the flat space that is left.

    In the flat space an assigned choice has one value. The signature lists the (name, index) of
    each. The last choice changes fastest.
    """
    for parts in product(*(list(_branches(name, parameter)) for name, parameter in space)):
        signature = tuple(step for assigned, _ in parts for step in assigned)
        yield signature, tuple(axis for _, flat in parts for axis in flat)


def _branches(name: str, parameter: SearchParameter) -> Iterator[tuple[Signature, Space]]:
    if not isinstance(parameter, ChoiceParameter) or not is_branching(parameter):
        yield (), ((name, parameter),)
        return
    for index, below in enumerate(parameter.spaces):
        alone = (name, ChoiceParameter((parameter.values[index],)))
        for signature, flat in branches(below):
            yield ((name, index), *signature), (alone, *flat)


def signature_of(space: Space, config: Mapping[str, Value]) -> Signature:
    """Return the signature of the branch that a configuration of the space belongs to."""
    steps: list[tuple[str, int]] = []
    for name, parameter in space:
        if isinstance(parameter, ChoiceParameter) and is_branching(parameter):
            index = parameter.index_of(config[name])
            steps += [(name, index), *signature_of(parameter.spaces[index], config)]
    return tuple(steps)


def from_units(space: Space, units: Mapping[str, float]) -> Config:
    """Return the configuration at those quantiles, in the order of the space.

    Quantiles of parameters that are not active in it are ignored.
    """
    config: Config = {}
    for name, parameter in space:
        config[name] = parameter.from_unit(float(units[name]))
        config |= from_units(active_space(parameter, config[name]), units)
    return config


def to_units(space: Space, config: Mapping[str, Value]) -> dict[str, float]:
    """Return the quantiles of a configuration of the space."""
    units: dict[str, float] = {}
    for name, parameter in space:
        units[name] = parameter.to_unit(config[name])
        units |= to_units(active_space(parameter, config[name]), config)
    return units


def canonical(space: Space, config: Mapping[str, object]) -> Config:
    """Return a configuration as the space would produce it; ValueError or KeyError if never."""
    result: Config = {}
    for name, parameter in space:
        result[name] = parameter.canonical(config[name])
        result |= canonical(active_space(parameter, result[name]), config)
    return result


class Combinations:
    """All combinations of a finite space, in the order of scikit-learn's `ParameterGrid`.

    That is branch after branch of the choices that activate parameters, and in each the
    parameters' names ascending, the last one changing fastest.
    """

    def __init__(self, space: Space) -> None:
        """`space`: every parameter in it has a cardinality."""
        self._space = space
        all_branches = list(branches(space))
        self._branches = [flat for _, flat in all_branches]
        self._ascending = [_by_name(flat) for flat in self._branches]
        sizes = (prod(axis.cardinality for _, axis in ascending) for ascending in self._ascending)
        self._starts = list(accumulate(sizes, initial=0))
        self._places = {signature: place for place, (signature, _) in enumerate(all_branches)}

    def __iter__(self) -> Iterator[Config]:
        """Yield all combinations; the parameters of each are in no order."""
        for ascending in self._ascending:
            names = [name for name, _ in ascending]
            for values in product(*(_values(axis) for _, axis in ascending)):
                yield dict(zip(names, values, strict=True))

    def at(self, position: int) -> Config:
        """Return the combination at that position, its parameters in the order of the space."""
        place = bisect_right(self._starts, position) - 1
        position -= self._starts[place]
        drawn: Config = {}
        for name, axis in reversed(self._ascending[place]):
            position, index = divmod(position, axis.cardinality)
            drawn[name] = axis.at(index)
        return {name: drawn[name] for name, _ in self._branches[place]}

    def position(self, config: Config) -> int:
        """Return the position of a combination."""
        place = self._places[signature_of(self._space, config)]
        position = 0
        for name, axis in self._ascending[place]:
            position = position * axis.cardinality + axis.index_of(config[name])
        return self._starts[place] + position


def _by_name(flat: Space) -> list[tuple[str, Discrete]]:
    """Return the parameters of a finite flat space, their names ascending."""
    parameters = ((name, cast(Discrete, parameter)) for name, parameter in flat)
    return sorted(parameters, key=itemgetter(0))


def _values(parameter: Discrete) -> list[Value]:
    return [parameter.at(index) for index in range(parameter.cardinality)]

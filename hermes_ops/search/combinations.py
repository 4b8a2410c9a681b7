"""The combinations of a space whose values can be counted, by scikit-learn's `ParameterGrid`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from math import prod
from typing import Any, cast

from hermes_ops.search.space import Config, Discrete, Space, Value
from hermes_ops.search.tree import branches, signature_of


class Combinations:
    """All combinations of a space whose values can be counted, in `ParameterGrid`'s order.

    That is branch after branch of the choices that bring parameters with them, and in each the
    parameters' names ascending, the last one changing fastest.
    """

    def __init__(self, space: Space) -> None:
        """Every parameter has a cardinality."""
        self._space = space
        found = list(branches(space))
        self._branches = [flat for _, flat in found]
        sizes = (prod(p.cardinality or 0 for _, p in flat) for flat in self._branches)
        self._starts = list(accumulate(sizes, initial=0))
        self._places = {signature: place for place, (signature, _) in enumerate(found)}

    def __iter__(self) -> Iterator[Config]:
        """All of them; the parameters stand in no order."""
        for flat in self._branches:
            yield from _grid(flat)

    def at(self, position: int) -> Config:
        """The combination of that position, in the order of the space."""
        place = bisect_right(self._starts, position) - 1
        flat = self._branches[place]
        drawn = _grid(flat)[position - self._starts[place]]
        return {name: drawn[name] for name, _ in flat}

    def position(self, config: Config) -> int:
        """Where a combination stands."""
        place = self._places[signature_of(self._space, config)]
        position = 0
        for name, parameter in sorted(self._branches[place], key=lambda item: item[0]):
            axis = cast(Discrete, parameter)
            position = position * axis.cardinality + axis.index_of(config[name])
        return self._starts[place] + position


def _grid(flat: Space) -> Any:  # noqa: ANN401 - scikit-learn is untyped
    from sklearn.model_selection import ParameterGrid

    return ParameterGrid({name: _values(cast(Discrete, parameter)) for name, parameter in flat})


def _values(parameter: Discrete) -> list[Value]:
    return [parameter.at(index) for index in range(parameter.cardinality)]

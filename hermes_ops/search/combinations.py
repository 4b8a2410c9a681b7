"""The combinations of a space whose values can be counted, by scikit-learn's `ParameterGrid`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, cast

from hermes_ops.search.space import Config, Discrete, Space
from hermes_ops.search.tree import branches, signature_of


class Combinations:
    """All combinations of a space whose values can be counted, in `ParameterGrid`'s order.

    That is branch after branch of the choices that bring parameters with them, and in each the
    parameters' names ascending, the last one changing fastest.
    """

    def __init__(self, space: Space) -> None:
        from sklearn.model_selection import ParameterGrid

        found = list(branches(space))
        axes = [{name: _values(parameter) for name, parameter in flat} for _, flat in found]
        sizes = [len(ParameterGrid(values)) for values in axes]
        starts = [0, *accumulate(sizes)]
        self._space = space
        self._grid: Any = ParameterGrid(axes)
        self._names = [[name for name, _ in flat] for _, flat in found]
        self._starts = starts[:-1]
        self._ends = starts[1:]
        self._flat = {sign: (s, f) for (sign, f), s in zip(found, self._starts, strict=True)}

    def __iter__(self) -> Iterator[Config]:
        """All of them; the parameters stand in no order."""
        yield from self._grid

    def at(self, position: int) -> Config:
        """The combination of that position, in the order of the space."""
        drawn: Config = self._grid[position]
        names = self._names[bisect_left(self._ends, position + 1)]
        return {name: drawn[name] for name in names}

    def position(self, config: Config) -> int:
        """Where a combination stands."""
        start, flat = self._flat[signature_of(self._space, config)]
        position = 0
        for name, parameter in sorted(flat, key=lambda item: item[0]):
            axis = cast(Discrete, parameter)
            position = position * axis.cardinality + axis.index_of(config[name])
        return start + position


def _values(parameter: Any) -> list[Any]:  # noqa: ANN401 - a Discrete, and values of any kind
    return [parameter.at(index) for index in range(parameter.cardinality)]

"""Grid search: every combination once, by scikit-learn's `ParameterGrid`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from hermes_ops.search.interface import Observation
from hermes_ops.search.space import Config, Discrete, Space, canonical, grid_size


class GridSampler:
    """Try the points to evaluate, then all other combinations in `ParameterGrid`'s order.

    That order is the parameters' names ascending, the last one changing fastest. The history plays
    no part.
    """

    def __init__(self, space: Space, points: Sequence[Mapping[str, object]] = ()) -> None:
        """Raise ValueError for a continuous parameter or a point outside the space."""
        size = grid_size(space)
        if size is None:
            raise ValueError("a grid needs parameters whose values can be counted")
        self._space = space
        self._size = size
        self._points = tuple(canonical(space, point) for point in points)
        self._taken = sorted({self._position(point) for point in self._points})

    @property
    def size(self) -> int:
        """The number of combinations."""
        return self._size

    def exhausted(self, number: int) -> bool:
        """True behind the last combination."""
        return number >= self._size

    def ask(self, number: int, history: Sequence[Observation]) -> Config:  # noqa: ARG002 - interface
        """The combination of that number."""
        if self.exhausted(number):
            raise IndexError(f"the grid has {self._size} combinations, none of number {number}")
        if number < len(self._points):
            return dict(self._points[number])
        position = number - len(self._points)
        for taken in self._taken:  # ascending: each one at or before us shifts us by one
            position += taken <= position
        return self._at(position)

    def _at(self, position: int) -> Config:
        from sklearn.model_selection import ParameterGrid

        axes = {name: range(cast(Discrete, p).cardinality) for name, p in self._space}
        indices: dict[str, Any] = ParameterGrid(axes)[position]
        return {name: cast(Discrete, p).at(int(indices[name])) for name, p in self._space}

    def _position(self, config: Config) -> int:
        position = 0
        for name, parameter in sorted(self._space, key=lambda item: item[0]):
            axis = cast(Discrete, parameter)
            position = position * axis.cardinality + axis.index_of(config[name])
        return position

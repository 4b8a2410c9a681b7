"""Grid search: every combination once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from hermes_ops.search.combinations import Combinations
from hermes_ops.search.feasible import Feasible, positions
from hermes_ops.search.interface import Observation
from hermes_ops.search.space import Config


class GridSampler:
    """Try the points to evaluate, then all other combinations that satisfy the constraints.

    The order is that of `Combinations`. The history plays no part.
    """

    def __init__(self, feasible: Feasible, points: Sequence[Mapping[str, object]] = ()) -> None:
        """Raise ValueError for a continuous parameter, a point outside, or nothing to try."""
        self._positions = positions(feasible)
        if not self._positions:
            raise ValueError("no combination satisfies the constraints")
        self._combinations = Combinations(feasible.space)
        self._points = tuple(feasible.canonical(point) for point in points)
        places = {self._combinations.position(point) for point in self._points}
        self._taken = sorted(bisect_left(self._positions, place) for place in places)

    @property
    def size(self) -> int:
        """The number of combinations."""
        return len(self._positions)

    def exhausted(self, number: int) -> bool:
        """True behind the last combination."""
        return number >= self.size

    def ask(self, number: int, history: Sequence[Observation]) -> Config:  # noqa: ARG002 - interface
        """The combination of that number."""
        if self.exhausted(number):
            raise IndexError(f"the grid has {self.size} combinations, none of number {number}")
        if number < len(self._points):
            return dict(self._points[number])
        place = number - len(self._points)
        for taken in self._taken:  # ascending: each one at or before us shifts us by one
            place += taken <= place
        return self._combinations.at(self._positions[place])

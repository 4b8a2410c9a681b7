"""Which steps of a metric have been stored: a set of whole numbers in little memory."""

from __future__ import annotations

import math
from bisect import bisect_right

MOST_RANGES = 10_000


class Steps:
    """Steps that follow one another at equal distance take one range, however many they are.

    Past 10,000 ranges, which takes steps without any order, every step up to the highest counts
    as stored.
    """

    def __init__(self) -> None:
        self._ranges: list[range] = []  # from the lowest to the highest; none reaches into another
        self._starts: list[int] = []
        self._closed_below = -math.inf
        self.highest = 0

    def __contains__(self, step: int) -> bool:
        if step < self._closed_below:
            return True
        at = bisect_right(self._starts, step) - 1
        return at >= 0 and step in self._ranges[at]

    def add(self, step: int) -> None:
        """Note a step; nothing happens if it is there."""
        if step in self:
            return
        self.highest = max(self.highest, step)
        at = bisect_right(self._starts, step)
        begin = max(0, at - 1)
        pieces = [p for whole in self._ranges[begin:at] for p in _with(whole, step)]
        self._put(begin, at, pieces or [range(step, step + 1)])
        if len(self._ranges) > MOST_RANGES:
            self._put(0, len(self._ranges), [])
            self._closed_below = self.highest + 1

    def _put(self, begin: int, end: int, pieces: list[range]) -> None:
        self._ranges[begin:end] = pieces
        self._starts[begin:end] = [piece.start for piece in pieces]


def _with(whole: range, step: int) -> list[range]:
    """The ranges of the members of one that begins before `step`, and of `step`."""
    count = (step - whole.start) // whole.step + 1
    below, above = whole[:count], whole[count:]
    distance = step - below[-1]
    if not above and (len(below) == 1 or distance == whole.step):
        return [range(whole.start, step + 1, distance)]
    return [part for part in (below, range(step, step + 1), above) if part]

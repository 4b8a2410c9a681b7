"""An exact multiple-choice knapsack: one option of each job, the greatest value that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

FEW = 192
"""So many jobs are solved at once; of more, those that cannot change are decided first."""

STEPS = 36
"""Halvings of the price of a GPU; a price a little too high rules out less, as exactly."""

TOLERANCE = 1e-9
"""Relative: an option this near to being ruled out stays, for what floating point rounds off."""


def knapsack(sizes: Integers, values: Floats, capacity: int) -> Integers:
    """Return for each job the column of its option, so that the sum of values is the greatest.

    `sizes` and `values` have shape (jobs, options); an option that a job does not have has the
    value -inf. The sizes chosen sum up to at most `capacity`. Of two equally good solutions the one
    is returned in which the last job has its first option, then the one before, and so on: with
    options by ascending size, earlier jobs get more.

    The answer is exact. A price of one unit of capacity (a Lagrange multiplier) gives a bound on
    the value; an option that cannot be part of any solution as good as a known one is ruled out,
    and a dynamic program over the capacity decides about the jobs that are left. Cost: jobs x
    options for the price, (jobs left) x options x capacity for the program.

    Raise ValueError if not even the smallest options fit.
    Source: Sinha and Zoltners, "The multiple-choice knapsack problem", Operations Research 1979;
    Pisinger, "A minimal algorithm for the multiple-choice knapsack problem", EJOR 1995.
    """
    if not len(sizes):
        return np.zeros(0, dtype=np.int64)
    allowed = np.isfinite(values)
    smallest = np.where(allowed, sizes, np.iinfo(np.int64).max).min(axis=1)
    if not allowed.any(axis=1).all() or smallest.sum() > capacity:
        raise ValueError("the smallest options of all jobs exceed the capacity")
    if len(sizes) <= FEW:
        return _program(sizes, values, capacity)
    return _Priced(sizes, values, capacity).solve()


def option_table(options: Sequence[Sequence[int]], nothing: float) -> tuple[Integers, Floats]:
    """Return the sizes and the values of jobs for `knapsack`, shape (jobs, 1 + most options).

    Column 0 is no GPU, of the value `nothing`; the others are the job's options, in order, their
    values -inf until they are set.
    """
    width = 1 + max(map(len, options), default=0)
    sizes = np.zeros((len(options), width), dtype=np.int64)
    values = np.full((len(options), width), -np.inf)
    values[:, 0] = nothing
    for row, numbers in enumerate(options):
        sizes[row, 1 : len(numbers) + 1] = numbers
    return sizes, values


def _program(sizes: Integers, values: Floats, capacity: int) -> Integers:
    """Solve by dynamic programming over the capacity."""
    best = np.zeros(capacity + 1)
    columns = np.zeros((len(sizes), capacity + 1), dtype=np.int16)
    for job in range(len(sizes)):
        after = np.full(capacity + 1, -np.inf)
        column = columns[job]
        for option in np.flatnonzero((values[job] > -np.inf) & (sizes[job] <= capacity)):
            size = sizes[job, option]
            reached = best[: capacity + 1 - size] + values[job, option]
            target = after[size:]
            better = reached > target
            target[better] = reached[better]
            column[size:][better] = option
        best = after
    chosen = np.zeros(len(sizes), dtype=np.int64)
    left = capacity
    for job in reversed(range(len(sizes))):
        chosen[job] = columns[job, left]
        left -= sizes[job, chosen[job]]
    return chosen


@dataclass(slots=True)
class _Priced:
    """The problem of many jobs with a price on each unit of capacity."""

    sizes: Integers
    values: Floats
    capacity: int

    def solve(self) -> Integers:
        """Return the same as `_program`, of which few jobs are left to decide about."""
        price = self._price()
        priced = self.values - price * self.sizes
        chosen = self._cheapest(priced)
        best = np.take_along_axis(priced, chosen[:, None], axis=1)
        regret = best - priced  # what an option loses against the job's best at this price
        bound = price * self.capacity + float(best.sum())
        others = regret.copy()
        np.put_along_axis(others, chosen[:, None], np.inf, axis=1)
        nearest = others.min(axis=1)
        number = FEW // 2
        while True:
            number = min(2 * number, len(chosen))
            core = np.sort(np.argpartition(nearest, number - 1)[:number])
            self._decide(core, chosen)
            slack = TOLERANCE * max(1.0, abs(bound))
            gap = bound - self._value(chosen) + slack
            undecided = np.flatnonzero(nearest <= gap)
            if len(undecided) <= number and set(undecided) <= set(core):
                return chosen
            if number == len(chosen):
                return chosen

    def _value(self, chosen: Integers) -> float:
        return float(np.take_along_axis(self.values, chosen[:, None], axis=1).sum())

    def _decide(self, core: Integers, chosen: Integers) -> None:
        """Solve for the jobs of `core` with the capacity that the others leave, in place."""
        picked = np.take_along_axis(self.sizes, chosen[:, None], axis=1)[:, 0]
        left = self.capacity - int(picked.sum() - picked[core].sum())
        chosen[core] = _program(self.sizes[core], self.values[core], left)

    def _cheapest(self, priced: Floats) -> Integers:
        """Return each job's best option at the price, of equals the smallest."""
        best = priced.max(axis=1, keepdims=True)
        width = np.where(priced == best, self.sizes, np.iinfo(np.int64).max)
        chosen: Integers = width.argmin(axis=1)
        return chosen

    def _price(self) -> float:
        """Return about the least price at which the jobs' best options fit."""
        low, high = 0.0, 1.0
        while not self._fits(high):
            low, high = high, 2.0 * high
        for _ in range(STEPS):
            price = (low + high) / 2
            if price in (low, high):
                break
            if self._fits(price):
                high = price
            else:
                low = price
        return high

    def _fits(self, price: float) -> bool:
        chosen = self._cheapest(self.values - price * self.sizes)
        return int(np.take_along_axis(self.sizes, chosen[:, None], axis=1).sum()) <= self.capacity

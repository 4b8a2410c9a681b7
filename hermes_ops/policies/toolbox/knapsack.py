"""An exact multiple-choice knapsack: one option of each job, the greatest value that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, count

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.speed_model import Floats

Integers = NDArray[np.int64]

FEW = 192
"""The most jobs that are solved at once; of more, those that cannot change are decided first."""

STEPS = 36
"""Halvings of the price of a GPU; a price a little too high rules out less, as exactly."""

ROUNDING = 16
"""A gap of at most this many tolerances is taken for rounding, which more jobs would not narrow."""

TOLERANCE = 1e-12
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
    best, after = np.zeros(capacity + 1), np.empty(capacity + 1)
    columns = np.zeros((len(sizes), capacity + 1), dtype=np.int16)
    usable = (values > -np.inf) & (sizes <= capacity)
    rows = zip(columns, usable.tolist(), sizes.tolist(), values.tolist(), strict=True)
    for column, able, widths, gains in rows:
        options = compress(zip(count(), widths, gains), able)
        first, size, gain = next(options, (0, capacity + 1, 0.0))
        after[:size] = -np.inf
        np.add(best[: capacity + 1 - size], gain, out=after[size:])
        if first:
            column[size:] = first
        for option, size, gain in options:
            reached = best[: capacity + 1 - size] + gain
            target = after[size:]
            better = reached > target
            np.putmask(column[size:], better, option)
            np.maximum(reached, target, out=target)
        best, after = after, best
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
        chosen = _cheapest(self.sizes, priced)
        best = np.take_along_axis(priced, chosen[:, None], axis=1)
        regret = best - priced  # what an option loses against the job's best at this price
        bound = price * self.capacity + float(best.sum())
        slack = TOLERANCE * max(1.0, price * self.capacity + float(np.abs(best).sum()))
        others = regret.copy()
        np.put_along_axis(others, chosen[:, None], np.inf, axis=1)
        nearest = others.min(axis=1)
        self._fill(chosen, np.flatnonzero(nearest <= slack), regret <= slack)
        number = FEW // 2
        while True:
            number = min(2 * number, len(chosen))
            core = np.sort(np.argpartition(nearest, number - 1)[:number])
            self._decide(core, self.values[core], chosen)
            gap = bound - self._value(chosen) + slack
            undecided = np.flatnonzero(nearest <= gap)
            possible = np.where(regret[undecided] <= gap, self.values[undecided], -np.inf)
            left = self.capacity - self._taken(chosen) + self._taken(chosen, undecided)
            kept = _first_of_equals(self.sizes[undecided], possible, left)
            if len(kept) <= 2 * number or number == len(chosen) or gap <= ROUNDING * slack:
                chosen[undecided] = 0
                self._decide(undecided[kept], possible[kept], chosen)
                return chosen

    def _fill(self, chosen: Integers, jobs: Integers, equal: NDArray[np.bool_]) -> None:
        """Give the jobs, in order, the largest of their equally good options while they fit."""
        widest = np.where(equal[jobs], self.sizes[jobs], -1).argmax(axis=1)
        picked = self.sizes[jobs, chosen[jobs]]
        more = np.cumsum(self.sizes[jobs, widest] - picked)
        fits = more <= self.capacity - self._taken(chosen)
        chosen[jobs[fits]] = widest[fits]

    def _taken(self, chosen: Integers, jobs: Integers | None = None) -> int:
        """Return the capacity that these jobs take, all if they are not given."""
        rows = np.arange(len(chosen)) if jobs is None else jobs
        return int(self.sizes[rows, chosen[rows]].sum())

    def _value(self, chosen: Integers) -> float:
        return float(np.take_along_axis(self.values, chosen[:, None], axis=1).sum())

    def _decide(self, core: Integers, values: Floats, chosen: Integers) -> None:
        """Solve for the jobs of `core` with the capacity that the others leave, in place."""
        left = self.capacity - self._taken(chosen) + self._taken(chosen, core)
        chosen[core] = _program(self.sizes[core], values, left)

    def _price(self) -> float:
        """Return about the least price at which the jobs' best options fit.

        A job whose best option is the same at a lower and a higher price has it in between as well.
        """
        low, high, fixed = 0.0, 1.0, 0
        sizes: Integers = np.ascontiguousarray(self.sizes.T)
        values: Floats = np.ascontiguousarray(self.values.T)
        priced = np.empty_like(values)
        at_low = _picked(sizes, values, low, priced)
        while (at_high := _picked(sizes, values, high, priced)).sum() > self.capacity:
            low, high, at_low = high, 2.0 * high, at_high
        for _ in range(STEPS):
            unsettled = at_low != at_high
            if not unsettled.all():
                fixed += int(at_high[~unsettled].sum())
                sizes = np.compress(unsettled, sizes, axis=1)  # row by row, unlike an index
                values = np.compress(unsettled, values, axis=1)
                at_low, at_high = at_low[unsettled], at_high[unsettled]
                priced = np.empty_like(values)
            price = (low + high) / 2
            if price in (low, high):
                break
            at_price = _picked(sizes, values, price, priced)
            if fixed + at_price.sum() <= self.capacity:
                high, at_high = price, at_price
            else:
                low, at_low = price, at_price
        return high


def _cheapest(sizes: Integers, priced: Floats) -> Integers:
    """Return each job's best option at the price, of equals the smallest."""
    best = priced.max(axis=1, keepdims=True)
    chosen: Integers = np.where(priced == best, sizes, np.iinfo(np.int64).max).argmin(axis=1)
    return chosen


def _picked(sizes: Integers, values: Floats, price: float, priced: Floats) -> Integers:
    """Return the size of each job's best option at the price, of equals the smallest.

    All have the shape (options, jobs); `priced` is overwritten: a new array a call costs more.
    """
    np.subtract(values, np.multiply(sizes, price, out=priced), out=priced)
    best = priced.max(axis=0)
    picked: Integers = np.where(priced == best, sizes, np.iinfo(np.int64).max).min(axis=0)
    return picked


def _first_of_equals(sizes: Integers, values: Floats, capacity: int) -> Integers:
    """Return the rows of jobs that may get something: of equal ones no more than have room.

    Earlier ones get more; a job whose first option is not a size of 0 is returned always.
    """
    allowed = np.isfinite(values)
    least = np.where(allowed & (sizes > 0), sizes, np.iinfo(np.int64).max).min(axis=1).tolist()
    free = allowed & (sizes == 0)
    droppable = free[:, 0] & (free.sum(axis=1) == 1)
    counts: dict[bytes, int] = {}
    kept = []
    rows = np.concatenate((np.where(allowed, sizes, 0), values), axis=1)
    for row, (may_drop, size) in enumerate(zip(droppable.tolist(), least, strict=True)):
        equal = rows[row].tobytes()
        counts[equal] = counts.get(equal, 0) + 1
        if not may_drop or counts[equal] * size <= capacity:
            kept.append(row)
    return np.array(kept, dtype=np.int64)

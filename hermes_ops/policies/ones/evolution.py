"""The evolutionary search of ONES: a population of schedules, and the operators that change it.

A schedule says which job each GPU serves. A job's GPUs stand together, in one order of the jobs
for all schedules (the paper's reorder), so that a row of sizes by job says the same as the genes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.speed_model import Floats

Integers = NDArray[np.int64]
PASSES = 2
"""Passes of each part of the padding: GPUs that are too few for one job go to later ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """The constraints of schedules of J jobs on `gpus` GPUs; jobs are in the order of the genes.

    `floors`, (kinds, gpus + 1): the largest size at most so large that a job of that kind takes, 0
    without one; `kind`, (J,): the row of each job. `least`, (J,): the least size, and `target` the
    largest that its limit allows. `keeps`, (J,): it must have exactly its target. `leaves`, (J,):
    a mutation may take it out.
    """

    gpus: int
    floors: Integers
    kind: Integers
    least: Integers
    target: Integers
    keeps: NDArray[np.bool_]
    leaves: NDArray[np.bool_]

    def floor(self, sizes: Integers) -> Integers:
        """Return the largest sizes that the jobs take, at most `sizes` and the target."""
        at_most = np.minimum(sizes, self.target)
        least: Integers = np.where(self.keeps, self.target, self.floors[self.kind, at_most])
        return least

    def refreshed(self, sizes: Integers, order: Integers) -> Integers:
        """Return valid schedules: cut to the limits; last in `order` leave where GPUs lack."""
        valid = self.floor(sizes)[:, order]
        valid[np.cumsum(valid, axis=1) > self.gpus] = 0
        result = np.empty_like(valid)
        result[:, order] = valid
        return result


@dataclass(frozen=True, slots=True)
class Operators:
    """The chance that a GPU swaps its job in a crossover, and that a job leaves in a mutation."""

    crossover: float
    mutation: float


@dataclass(frozen=True, slots=True)
class Generation:
    """The order in which jobs are served in this generation, and the score of schedules.

    `order`, (J,): indices, first served first. `score`: from sizes, (S, J), to (S,); less is
    better.
    """

    order: Integers
    score: Callable[[Integers], Floats]


def crossover(
    limits: Limits, parents: Integers, share: float, rng: np.random.Generator
) -> Integers:
    """Return two children of each pair of parents: every GPU swaps its job with chance `share`.

    A job that is left with a number of GPUs that it does not take keeps the next lower one.
    """
    pairs = rng.permutation(len(parents))[: len(parents) // 2 * 2]
    genes = _genes(parents[pairs], limits.gpus)
    first, second = genes[0::2], genes[1::2]
    swaps = rng.random(first.shape) < share
    children = np.concatenate((np.where(swaps, second, first), np.where(swaps, first, second)))
    return limits.floor(_sizes(children, parents.shape[1]))


def mutation(
    limits: Limits, parents: Integers, chance: float, rng: np.random.Generator
) -> Integers:
    """Return the parents, from which each job that may leave is taken out with that chance."""
    out = (rng.random(parents.shape) < chance) & limits.leaves
    return np.where(out, 0, parents)


def padded(limits: Limits, sizes: Integers, order: Integers) -> Integers:
    """Return schedules whose free GPUs have gone to waiting jobs, then to all up to their targets.

    `order` has the indices of the jobs, those to serve first at the front.
    """
    result = sizes
    for _ in range(PASSES):
        free = limits.gpus - result.sum(axis=1, keepdims=True)
        fits = limits.least <= np.minimum(free, limits.target)
        wanted = np.where((result == 0) & fits, limits.least, 0)
        result = _raised(result, wanted, free, order)
    for _ in range(PASSES):
        free = limits.gpus - result.sum(axis=1, keepdims=True)
        wanted = np.where(result > 0, limits.floor(result + free) - result, 0)
        result = _raised(result, wanted, free, order)
    return result


def evolved(
    limits: Limits,
    population: Integers,
    generations: Sequence[Generation],
    operators: Operators,
    rng: np.random.Generator,
) -> Integers:
    """Return the population after these generations, the best of the last one first.

    Parents, children and mutants compete; as many of them survive as there were parents at first,
    each schedule once.
    """
    most = len(population)
    for generation in generations:
        children = crossover(limits, population, operators.crossover, rng)
        mutants = mutation(limits, population, operators.mutation, rng)
        young = padded(limits, np.concatenate((children, mutants)), generation.order)
        every = _distinct(np.concatenate((population, young)))
        best = np.argsort(generation.score(every), kind="stable")
        population = every[best[:most]]
    return population


def _distinct(schedules: Integers) -> Integers:
    """Return each schedule once, in order."""
    places = {row.tobytes(): n for n, row in enumerate(schedules[::-1])}
    return schedules[sorted(len(schedules) - 1 - n for n in places.values())]


def _raised(sizes: Integers, wanted: Integers, free: Integers, order: Integers) -> Integers:
    """Add what is wanted for the jobs that are first in order while it fits."""
    if not wanted.any():
        return sizes
    added = wanted[:, order]
    added[np.cumsum(added, axis=1) > free] = 0
    result = sizes.copy()
    result[:, order] += added
    return result


def _genes(sizes: Integers, gpus: int) -> Integers:
    """Return the job of each GPU, by row; the number of jobs where it serves none."""
    rows, jobs = sizes.shape
    idle = gpus - sizes.sum(axis=1, keepdims=True)
    counts = np.concatenate((sizes, idle), axis=1)
    names = np.tile(np.arange(jobs + 1), rows)
    return np.repeat(names, counts.ravel()).reshape(rows, gpus)


def _sizes(genes: Integers, jobs: int) -> Integers:
    """Return the number of GPUs of each job, by row."""
    rows = len(genes)
    cells = genes + np.arange(rows)[:, None] * (jobs + 1)
    counts = np.bincount(cells.ravel(), minlength=rows * (jobs + 1))
    return counts.reshape(rows, jobs + 1)[:, :jobs].astype(np.int64)

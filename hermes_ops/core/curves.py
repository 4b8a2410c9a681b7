"""Learning curves as arrays, made once for each curve that a driver hands over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from math import inf
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.model import Point

Floats = NDArray[np.float64]
KEPT = 1 << 15
F = TypeVar("F")
T = TypeVar("T")
_KEPT: dict[int, tuple[tuple[Point, ...], Curve]] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """The columns of a curve, in order of steps.

    `best` is the lowest finite loss so far (inf before the first), `mean` the running average of
    the losses (inf from the first loss on that is not finite).
    """

    steps: Floats
    losses: Floats
    seconds: Floats
    best: Floats
    mean: Floats

    def index(self, step: float) -> int:
        """Return the number of points up to that step."""
        return int(self.steps.searchsorted(step, side="right"))


def columns(curve: tuple[Point, ...]) -> Curve:
    """Return the arrays of a curve; the same object for the same curve while it is in use.

    The cache key is the curve's identity, as a curve never changes: to hash its points would cost
    more than to convert them. The cache holds the curve too, so its identity is not reused.
    """
    cached = _KEPT.get(id(curve))
    if cached is not None and cached[0] is curve:
        return cached[1]
    while len(_KEPT) >= KEPT:
        _KEPT.pop(next(iter(_KEPT)), None)
    arrays = _columns(curve)
    _KEPT[id(curve)] = (curve, arrays)
    return arrays


class Memo(Generic[F, T]):
    """Caches what `make` computes of facts (curves, jobs) while the same facts are asked for.

    The cache key is the fact's identity, as facts never change. The cache holds the fact too, so
    its identity is not reused. Threads may share a cache.
    """

    def __init__(self, make: Callable[..., Iterable[T]], size: int = KEPT) -> None:
        self._make = make
        self._size = size
        self._cache: dict[tuple[int, tuple[object, ...]], tuple[F, T]] = {}

    def get(self, facts: Iterable[F], *about: object) -> list[T]:
        """Return `make(facts, *about)`, computed only for facts that are new with this `about`."""
        cache, requested = self._cache, [(fact, (id(fact), about)) for fact in facts]
        cached = {key: entry for _, key in requested if (entry := cache.get(key)) is not None}
        new = {key: fact for fact, key in requested if key not in cached}
        if new:
            computed = self._make(list(new.values()), *about)
            added = dict(zip(new, zip(new.values(), computed, strict=True), strict=True))
            cache.update(added)
            cached |= added
        results = [cached[key][1] for _, key in requested]
        for key in list(islice(cache, max(0, len(cache) - self._size))):
            cache.pop(key, None)
        return results


@dataclass(frozen=True, slots=True, eq=False)
class _Rows(Generic[F]):
    number: dict[int, int]  # of a fact's row, by the fact's identity
    facts: tuple[F, ...]
    table: Floats

    def rows(self, facts: Sequence[F]) -> NDArray[np.intp]:
        """Return the row of each fact, -1 where there is none."""
        numbers = map(self.number.get, map(id, facts), repeat(-1))
        return np.fromiter(numbers, np.intp, len(facts))

    def only(self, requested: Collection[int]) -> _Rows[F]:
        """Return the rows of these facts alone."""
        rows = [row for key, row in self.number.items() if key in requested]
        facts = tuple(self.facts[row] for row in rows)
        return _Rows({id(fact): row for row, fact in enumerate(facts)}, facts, self.table[rows])


class Table(Generic[F]):
    """A `Memo` of `width` numbers a fact: the numbers of many facts are the rows of one array.

    Its content is replaced, never changed, so threads may share it.
    """

    def __init__(self, make: Callable[[list[F]], Floats], width: int, size: int = KEPT) -> None:
        self._make = make
        self._size = size
        self._kept: _Rows[F] = _Rows({}, (), np.empty((0, width)))

    def get(self, facts: Sequence[F]) -> Floats:
        """Return `make(facts)`, computed only for facts that are new."""
        kept = self._kept
        if (rows := kept.rows(facts)).min(initial=0) < 0:
            self._kept = kept = self._more(kept, {id(fact): fact for fact in facts})
            rows = kept.rows(facts)
        return kept.table[rows]

    def _more(self, kept: _Rows[F], requested: dict[int, F]) -> _Rows[F]:
        new = {key: fact for key, fact in requested.items() if key not in kept.number}
        if len(kept.facts) + len(new) > self._size:
            kept = kept.only(requested)
        number = kept.number | {key: row for row, key in enumerate(new, len(kept.facts))}
        rows = self._make(list(new.values()))
        return _Rows(number, (*kept.facts, *new.values()), np.concatenate((kept.table, rows)))


def best_by(curve: tuple[Point, ...], step: float) -> float:
    """Return the lowest finite loss up to a step; inf when there is none."""
    arrays = columns(curve)
    points = arrays.index(step)
    return float(arrays.best[points - 1]) if points else inf


def mean_by(curve: tuple[Point, ...], step: float) -> float:
    """Return the mean loss up to a step; inf without losses, or if one is not finite."""
    arrays = columns(curve)
    points = arrays.index(step)
    return float(arrays.mean[points - 1]) if points else inf


def best(curve: Sequence[Point]) -> float:
    """Return the lowest finite loss of the whole curve; inf when there is none."""
    return float(columns(tuple(curve)).best[-1]) if curve else inf


def _columns(curve: tuple[Point, ...]) -> Curve:
    count = len(curve)
    steps = np.fromiter((p.step for p in curve), float, count)
    losses = np.fromiter((p.loss for p in curve), float, count)
    seconds = np.fromiter((p.seconds for p in curve), float, count)
    finite = np.isfinite(losses)
    best_so_far = np.minimum.accumulate(np.where(finite, losses, inf))
    number = np.arange(1, count + 1)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.cumsum(losses) / number
    mean[~np.isfinite(mean)] = inf
    mean = np.maximum(mean, best_so_far)  # of equal losses, rounding would put it below them
    return Curve(steps, losses, seconds, best_so_far, mean)

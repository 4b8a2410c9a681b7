"""Learning curves as arrays, made once for each curve that a driver hands over."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from math import inf
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.model import Point
from hermes_ops.core.packed_curves import LearningCurve
from hermes_ops.core.speed_model import Floats

CACHED = 1 << 15
"""The most curves, or other facts, whose arrays are cached at once."""
F = TypeVar("F")
T = TypeVar("T")
_CACHE: dict[int, tuple[Callable[[], object], Curve]] = {}


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


def columns(curve: Sequence[Point]) -> Curve:
    """Return the arrays of a curve; the same object for the same curve while it is in use.

    The cache key is the curve's identity, as a curve never changes: to hash its points would cost
    more than to convert them. The arrays go with the curve: the versions of one that grows to
    10,000 points would take gigabytes. Those of a tuple go when `CACHED` others have come.
    """
    key = id(curve)
    cached = _CACHE.get(key)
    if cached is not None and cached[0]() is curve:
        return cached[1]
    while len(_CACHE) >= CACHED:
        _CACHE.pop(next(iter(_CACHE)), None)
    arrays = _columns(curve)
    _CACHE[key] = (_handle(curve, lambda _: _CACHE.pop(key, None)), arrays)
    return arrays


def _handle(
    fact: F, forget: Callable[[weakref.ref[F]], object] | None = None
) -> Callable[[], F | None]:
    """Return a function that returns the fact while it is in use; `forget` is called at its end.

    A tuple has no end that can be observed: the function holds it, so its identity is not reused.
    """
    try:
        return weakref.ref(fact, forget)
    except TypeError:
        return lambda: fact


_Key = tuple[int, tuple[object, ...]]  # a fact's identity, and what else the result is about


class Memo(Generic[F, T]):
    """Caches what `make` computes of facts (curves, jobs) while the same facts are asked for.

    The cache key is the fact's identity, as facts never change. What was computed goes with the
    fact, or, of a tuple, when `size` others have come. Threads may share a cache.
    """

    def __init__(self, make: Callable[..., Iterable[T]], size: int = CACHED) -> None:
        self._make = make
        self._size = size
        self._cache: dict[_Key, tuple[Callable[[], F | None], T]] = {}

    def get(self, facts: Iterable[F], *about: object) -> list[T]:
        """Return `make(facts, *about)`, computed only for facts that are new with this `about`."""
        cache, requested = self._cache, [(fact, (id(fact), about)) for fact in facts]
        known = {key: entry[1] for _, key in requested if (entry := cache.get(key)) is not None}
        new = {key: fact for fact, key in requested if key not in known}
        for (key, fact), computed in zip(
            new.items(), self._make(list(new.values()), *about) if new else (), strict=True
        ):
            cache[key] = (_handle(fact, partial(self._forget, key)), computed)
            known[key] = computed
        results = [known[key] for _, key in requested]
        for key in list(islice(cache, max(0, len(cache) - self._size))):
            cache.pop(key, None)
        return results

    def _forget(self, key: _Key, _: object) -> None:
        self._cache.pop(key, None)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows(Generic[F]):
    number: dict[int, int]  # of a fact's row, by the fact's identity
    handles: tuple[Callable[[], F | None], ...]
    table: Floats

    def rows(self, facts: Sequence[F]) -> NDArray[np.intp]:
        """Return the row of each fact, -1 where there is none."""
        numbers, handles = map(self.number.get, map(id, facts), repeat(-1)), self.handles
        # Another fact may have the identity of one that is gone.
        rows = [
            n if n < 0 or handles[n]() is f else -1 for n, f in zip(numbers, facts, strict=True)
        ]
        return np.array(rows, np.intp)

    def only(self, requested: Collection[int]) -> _Rows[F]:
        """Return the rows of these facts alone."""
        kept = {key: row for key, row in self.number.items() if key in requested}
        handles = tuple(self.handles[row] for row in kept.values())
        number = {key: row for row, key in enumerate(kept)}
        return _Rows(number, handles, self.table[list(kept.values())])


class Table(Generic[F]):
    """A `Memo` of `width` numbers a fact: the numbers of many facts are the rows of one array.

    Its content is replaced, never changed, so threads may share it.
    """

    def __init__(self, make: Callable[[list[F]], Floats], width: int, size: int = CACHED) -> None:
        self._make = make
        self._size = size
        self._rows: _Rows[F] = _Rows({}, (), np.empty((0, width)))

    def get(self, facts: Sequence[F]) -> Floats:
        """Return `make(facts)`, computed only for facts that are new."""
        kept = self._rows
        if (rows := kept.rows(facts)).min(initial=0) < 0:
            self._rows = kept = self._with_new(kept, {id(fact): fact for fact in facts})
            rows = kept.rows(facts)
        return kept.table[rows]

    def _with_new(self, kept: _Rows[F], requested: dict[int, F]) -> _Rows[F]:
        rows = kept.rows(tuple(requested.values())).tolist()
        new = {key: requested[key] for key, row in zip(requested, rows, strict=True) if row < 0}
        if len(kept.handles) + len(new) > self._size:
            kept = kept.only(requested.keys() - new.keys())
        number = kept.number | {key: row for row, key in enumerate(new, len(kept.handles))}
        handles = (*kept.handles, *map(_handle, new.values()))
        computed = self._make(list(new.values()))
        return _Rows(number, handles, np.concatenate((kept.table, computed)))


def best_by(curve: Sequence[Point], step: float) -> float:
    """Return the lowest finite loss up to a step; inf when there is none."""
    arrays = columns(curve)
    points = arrays.index(step)
    return float(arrays.best[points - 1]) if points else inf


def mean_by(curve: Sequence[Point], step: float) -> float:
    """Return the mean loss up to a step; inf without losses, or if one is not finite."""
    arrays = columns(curve)
    points = arrays.index(step)
    return float(arrays.mean[points - 1]) if points else inf


def best(curve: Sequence[Point]) -> float:
    """Return the lowest finite loss of the whole curve; inf when there is none."""
    return float(columns(curve).best[-1]) if curve else inf


def _columns(curve: Sequence[Point]) -> Curve:
    count = len(curve)
    steps, losses, seconds = _arrays(curve)
    finite = np.isfinite(losses)
    best_so_far = np.minimum.accumulate(np.where(finite, losses, inf))
    number = np.arange(1, count + 1)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.cumsum(losses) / number
    mean[~np.isfinite(mean)] = inf
    mean = np.maximum(mean, best_so_far)  # of equal losses, rounding would put it below them
    return Curve(steps, losses, seconds, best_so_far, mean)


def _arrays(curve: Sequence[Point]) -> tuple[Floats, Floats, Floats]:
    if isinstance(curve, LearningCurve):
        steps, losses, seconds = curve.columns
        return steps.astype(float), losses, seconds
    count = len(curve)
    steps = np.fromiter((p.step for p in curve), float, count)
    losses = np.fromiter((p.loss for p in curve), float, count)
    seconds = np.fromiter((p.seconds for p in curve), float, count)
    return steps, losses, seconds

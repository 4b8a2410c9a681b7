"""Learning curves in arrays: 24 bytes a value, where tuples of Python's numbers take 150.

A curve never changes. One that has grown is a new object that shares the memory of the one before,
so a curve of 100,000 values costs each of its versions a few hundred bytes. What is computed of a
curve is made once for each that a driver hands over.
"""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from math import inf
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.model import Point
from hermes_ops.core.speed_model import Floats

Column = NDArray[Any]
R = TypeVar("R")
LEAST_ROWS, SPARE = 8, 4
"""A buffer that is full is replaced by one with a fourth more rows, at least this many."""


class _Buffer:
    """Columns with room at their end for rows that are still to come."""

    __slots__ = ("_filled", "_lock", "columns")

    def __init__(self, columns: Sequence[Column], rows: int) -> None:
        self.columns = tuple(columns)
        self._filled = rows
        self._lock = threading.Lock()

    def reserve(self, rows: int, more: int) -> bool:
        """Take the room for `more` rows after the first `rows`; False if it is not free."""
        with self._lock:
            free = self._filled == rows and rows + more <= len(self.columns[0])
            self._filled += more if free else 0
            return free


class PackedRows(Sequence[R], Generic[R]):
    """Rows of numbers as a sequence that keeps an array for each column.

    It equals a tuple with the same rows; NaN counts as equal to NaN.
    """

    __slots__ = ("__weakref__", "_buffer", "columns")
    dtypes: ClassVar[tuple[type[np.generic], ...]] = ()

    def __init__(self, columns: Sequence[Column], buffer: _Buffer | None = None) -> None:
        self.columns = tuple(columns)
        self._buffer = buffer
        for column in self.columns:
            column.flags.writeable = False

    @classmethod
    def from_rows(cls, rows: Iterable[R]) -> Self:
        """Return these rows in arrays; the same object if they are."""
        if type(rows) is cls:
            return rows
        return cls([np.empty(0, dtype) for dtype in cls.dtypes]).extended(rows)

    @classmethod
    @abstractmethod
    def _numbers(cls, row: R) -> tuple[float, ...]:
        """Return the numbers of a row."""

    @classmethod
    @abstractmethod
    def _rows(cls, *columns: Iterable[Any]) -> Iterator[R]:
        """Return the rows with these columns of Python's numbers."""

    def extended(self, rows: Iterable[R]) -> Self:
        """Return the rows with others behind them; the same object without others."""
        new = [self._numbers(row) for row in rows]
        if not new:
            return self
        begun, end = len(self), len(self) + len(new)
        buffer = self._buffer
        if buffer is None or not buffer.reserve(begun, len(new)):
            room = end + max(LEAST_ROWS, end // SPARE)
            buffer = _Buffer([np.empty(room, dtype) for dtype in self.dtypes], end)
            for column, old in zip(buffer.columns, self.columns, strict=True):
                column[:begun] = old
        for column, values in zip(buffer.columns, zip(*new, strict=True), strict=True):
            column[begun:end] = values
        return type(self)([column[:end] for column in buffer.columns], buffer)

    def __len__(self) -> int:
        return len(self.columns[0])

    def __iter__(self) -> Iterator[R]:
        return self._rows(*(column.tolist() for column in self.columns))

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> R | Self:
        if isinstance(index, slice):
            return type(self)([column[index] for column in self.columns])
        return next(self._rows(*((column[index].item(),) for column in self.columns)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedRows):
            pairs = zip(self.columns, other.columns, strict=True)
            return type(self) is type(other) and all(_equal(one, two) for one, two in pairs)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.columns,)


def _equal(one: Column, two: Column) -> bool:
    return np.array_equal(one, two, equal_nan=one.dtype.kind == "f")


class PackedPoints(PackedRows[tuple[int, float, int]]):
    """The points (step, value, Unix milliseconds) of a metric."""

    __slots__ = ()
    dtypes = (np.int64, np.float64, np.int64)

    @classmethod
    def _numbers(cls, row: tuple[int, float, int]) -> tuple[float, ...]:
        return row

    @classmethod
    def _rows(cls, *columns: Iterable[Any]) -> Iterator[tuple[int, float, int]]:
        return zip(*columns, strict=True)


class LearningCurve(PackedRows[Point]):
    """The points of a learning curve; it keeps the newest one, which policies ask for most."""

    __slots__ = ("_newest",)
    dtypes = (np.int64, np.float64, np.float64)

    def __init__(self, columns: Sequence[Column], buffer: _Buffer | None = None) -> None:
        super().__init__(columns, buffer)
        self._newest: Point | None = None

    @overload
    def __getitem__(self, index: int) -> Point: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Point | Self:
        if index != -1:
            return super().__getitem__(index)
        if self._newest is None:
            self._newest = super().__getitem__(-1)
        return self._newest

    @classmethod
    def _numbers(cls, row: Point) -> tuple[float, ...]:
        return row.step, row.loss, row.seconds

    @classmethod
    def _rows(cls, *columns: Iterable[Any]) -> Iterator[Point]:
        return map(Point, *columns)


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
        cached = {key: entry[1] for _, key in requested if (entry := cache.get(key)) is not None}
        new = {key: fact for fact, key in requested if key not in cached}
        for (key, fact), computed in zip(
            new.items(), self._make(list(new.values()), *about) if new else (), strict=True
        ):
            cache[key] = (_handle(fact, partial(self._forget, key)), computed)
            cached[key] = computed
        results = [cached[key] for _, key in requested]
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

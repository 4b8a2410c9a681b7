"""Learning curves in arrays: 24 bytes a value, where tuples of Python's numbers take 150.

A curve never changes. One that has grown is a new object that shares the memory of the one before,
so a curve of 100,000 values costs each of its versions a few hundred bytes.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.model import Point

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

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
        """The number of points up to that step."""
        return int(self.steps.searchsorted(step, side="right"))


def columns(curve: tuple[Point, ...]) -> Curve:
    """The arrays of a curve; the same object for the same curve, as long as it is in use.

    A curve is known by its identity, as it never changes: to hash its points would cost more than
    to convert them. Keeping the curve beside its arrays keeps its identity from being used again.
    """
    kept = _KEPT.get(id(curve))
    if kept is not None and kept[0] is curve:
        return kept[1]
    while len(_KEPT) >= KEPT:
        _KEPT.pop(next(iter(_KEPT)), None)
    made = _columns(curve)
    _KEPT[id(curve)] = (curve, made)
    return made


class Memo(Generic[F, T]):
    """What was made of facts (curves, jobs), kept as long as the same ones come again.

    It changes no result, only its price. A fact is known by its identity, as it never changes: it
    is kept beside what was made of it, so its identity is not used again. Threads may share it.
    """

    def __init__(self, make: Callable[..., Iterable[T]], size: int = KEPT) -> None:
        self._make = make
        self._size = size
        self._kept: dict[tuple[int, tuple[object, ...]], tuple[F, T]] = {}

    def of(self, facts: Iterable[F], *about: object) -> list[T]:
        """What `make(facts, *about)` gives, made only of facts that are new with this `about`."""
        kept, asked = self._kept, [(fact, (id(fact), about)) for fact in facts]
        known = {key: entry for _, key in asked if (entry := kept.get(key)) is not None}
        new = {key: fact for fact, key in asked if key not in known}
        if new:
            made = self._make(list(new.values()), *about)
            fresh = dict(zip(new, zip(new.values(), made, strict=True), strict=True))
            kept.update(fresh)
            known |= fresh
        found = [known[key][1] for _, key in asked]
        for key in list(islice(kept, max(0, len(kept) - self._size))):
            kept.pop(key, None)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Rows(Generic[F]):
    number: dict[int, int]  # of a fact's row, by the fact's identity
    facts: tuple[F, ...]
    table: Floats

    def rows(self, facts: Sequence[F]) -> NDArray[np.intp]:
        """The row of each fact, -1 where there is none."""
        numbers = map(self.number.get, map(id, facts), repeat(-1))
        return np.fromiter(numbers, np.intp, len(facts))

    def only(self, asked: Collection[int]) -> _Rows[F]:
        """The rows of these facts."""
        rows = [row for key, row in self.number.items() if key in asked]
        facts = tuple(self.facts[row] for row in rows)
        return _Rows({id(fact): row for row, fact in enumerate(facts)}, facts, self.table[rows])


class Table(Generic[F]):
    """A `Memo` for what is `width` numbers: those of many facts are the rows of one array.

    What it keeps is replaced, never changed, so threads may share it.
    """

    def __init__(self, make: Callable[[list[F]], Floats], width: int, size: int = KEPT) -> None:
        self._make = make
        self._size = size
        self._kept: _Rows[F] = _Rows({}, (), np.empty((0, width)))

    def of(self, facts: Sequence[F]) -> Floats:
        """What `make(facts)` gives, made only of facts that are new."""
        kept = self._kept
        if (rows := kept.rows(facts)).min(initial=0) < 0:
            self._kept = kept = self._more(kept, {id(fact): fact for fact in facts})
            rows = kept.rows(facts)
        return kept.table[rows]

    def _more(self, kept: _Rows[F], asked: dict[int, F]) -> _Rows[F]:
        new = {key: fact for key, fact in asked.items() if key not in kept.number}
        if len(kept.facts) + len(new) > self._size:
            kept = kept.only(asked)
        number = kept.number | {key: row for row, key in enumerate(new, len(kept.facts))}
        made = self._make(list(new.values()))
        return _Rows(number, (*kept.facts, *new.values()), np.concatenate((kept.table, made)))


def best_by(curve: tuple[Point, ...], step: float) -> float:
    """The lowest finite loss up to a step; inf when there is none."""
    found = columns(curve)
    points = found.index(step)
    return float(found.best[points - 1]) if points else inf


def mean_by(curve: tuple[Point, ...], step: float) -> float:
    """The average of the losses up to a step; inf when there is none, or one is not finite."""
    found = columns(curve)
    points = found.index(step)
    return float(found.mean[points - 1]) if points else inf


def best(curve: Sequence[Point]) -> float:
    """The lowest finite loss of the whole curve; inf when there is none."""
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

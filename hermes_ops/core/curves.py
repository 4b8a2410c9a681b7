"""Learning curves as arrays, made once for each curve that a driver hands over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.model import Point

Floats = NDArray[np.float64]


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
        return int(np.searchsorted(self.steps, step, side="right"))


def columns(curve: tuple[Point, ...]) -> Curve:
    """The arrays of a curve; the same object for the same curve, as long as it is in use."""
    return _columns(_Same(curve))


def best_by(curve: tuple[Point, ...], step: float) -> float:
    """The lowest finite loss up to a step; inf when there is none."""
    found = columns(curve)
    points = found.index(step)
    return float(found.best[points - 1]) if points else inf


def best(curve: Sequence[Point]) -> float:
    """The lowest finite loss of the whole curve; inf when there is none."""
    return float(columns(tuple(curve)).best[-1]) if curve else inf


class _Same:
    """A curve as a key by identity: hashing all of its points would cost more than it spares."""

    __slots__ = ("curve",)

    def __init__(self, curve: tuple[Point, ...]) -> None:
        self.curve = curve

    def __hash__(self) -> int:
        return id(self.curve)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.curve is self.curve


@lru_cache(maxsize=1 << 15)
def _columns(key: _Same) -> Curve:
    count = len(key.curve)
    steps = np.fromiter((p.step for p in key.curve), float, count)
    losses = np.fromiter((p.loss for p in key.curve), float, count)
    seconds = np.fromiter((p.seconds for p in key.curve), float, count)
    finite = np.isfinite(losses)
    best_so_far = np.minimum.accumulate(np.where(finite, losses, inf))
    number = np.arange(1, count + 1)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.cumsum(losses) / number
    mean[~np.isfinite(mean)] = inf
    return Curve(steps, losses, seconds, best_so_far, mean)

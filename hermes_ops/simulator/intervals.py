"""Means over seeds with their 95 % confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the ends of its confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of one value a seed, and its 95 % bootstrap interval (percentiles of resamples).

    It lies within the values; of one value, or of equal ones, it is the value. The resamples are
    seeded: the same values always give the same interval. ValueError when there is no value.
    """
    if not values:
        raise ValueError("there is no value to take the mean of")
    if min(values) == max(values):
        return Interval(values[0], values[0], values[0])
    found = np.asarray(values, dtype=np.float64)
    mean = float(found.mean())
    ends = ((1 - CONFIDENCE) / 2 * 100, (1 + CONFIDENCE) / 2 * 100)
    low, high = np.percentile(found[_resamples(len(found))].mean(axis=1), ends)
    return Interval(mean, min(mean, float(low)), max(mean, float(high)))


@lru_cache(maxsize=4)
def _resamples(size: int) -> NDArray[np.int64]:
    return np.random.default_rng(size).integers(size, size=(RESAMPLES, size))


def ratio_interval(values: Sequence[float], base: Sequence[float]) -> Interval | None:
    """The geometric mean of base / value over seeds, pair by pair: above 1 is sooner than `base`.

    The interval is that of the mean logarithm. None when a value or its partner is not above 0.
    """
    if not values or min(*values, *base) <= 0:
        return None
    found = mean_interval([log(b / v) for v, b in zip(values, base, strict=True)])
    return Interval(exp(found.mean), exp(found.low), exp(found.high))

"""Means over seeds with their 95 % confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the ends of its confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of one value a seed, and Student's t interval around it (95 %).

    One value, or none that differs, is its own interval. ValueError when there is no value.
    """
    if not values:
        raise ValueError("there is no value to take the mean of")
    mean = sum(values) / len(values)
    if min(values) == max(values):
        return Interval(values[0], values[0], values[0])
    from scipy.stats import t

    spread = sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    margin = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * spread / sqrt(len(values))
    return Interval(mean, mean - margin, mean + margin)


def ratio_interval(values: Sequence[float], base: Sequence[float]) -> Interval | None:
    """The geometric mean of base / value over seeds, pair by pair: above 1 is sooner than `base`.

    The interval is Student's t of the logarithms. None when a value or its partner is not above 0.
    """
    if not values or min(*values, *base) <= 0:
        return None
    found = mean_interval([log(b / v) for v, b in zip(values, base, strict=True)])
    return Interval(exp(found.mean), exp(found.low), exp(found.high))

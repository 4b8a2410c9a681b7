"""Metrics other than the objective: their values in a trial, and the bounds that it must keep.

Values are in the user's own direction; nothing is turned round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any


@dataclass(frozen=True, slots=True)
class SecondaryMetric:
    """A metric other than the objective.

    `direction` is minimize, maximize, or None: neither is better. The bounds count for the
    last value that a trial reports; None: no bound.
    """

    name: str
    direction: str | None = None
    at_most: float | None = None
    at_least: float | None = None

    @property
    def is_bounded(self) -> bool:
        """True when a trial can miss a bound of it."""
        return self.at_most is not None or self.at_least is not None

    @property
    def bound(self) -> str:
        """The bounds of the metric in words; empty without bounds."""
        words = (("at least", self.at_least), ("at most", self.at_most))
        return " and ".join(f"{word} {limit:g}" for word, limit in words if limit is not None)

    def violation(self, last: float | None) -> str:
        """Return how a trial with that last value misses the bounds; empty when it does not.

        A metric that was not reported, and NaN, keep no bound.
        """
        if not self.is_bounded:
            return ""
        if last is None:
            return f"{self.name} was not reported, {self.bound} is allowed"
        low = -float("inf") if self.at_least is None else self.at_least
        high = float("inf") if self.at_most is None else self.at_most
        if low <= last <= high:
            return ""
        return f"{self.name} is {last:g}, {self.bound} is allowed"

    def outcome(self, values: Iterable[float]) -> MetricOutcome:
        """Return the outcome of a trial that reported these values in order."""
        reported = tuple(values)
        finite = [value for value in reported if isfinite(value)]
        best = None
        if finite and self.direction is not None:
            best = max(finite) if self.direction == "maximize" else min(finite)
        return MetricOutcome(reported[-1] if reported else None, best)


@dataclass(frozen=True, slots=True)
class MetricOutcome:
    """A trial's last and best value of a metric; None where there is none."""

    last: float | None = None
    best: float | None = None


def violations(
    metrics: Iterable[SecondaryMetric], last: Mapping[str, float | None]
) -> tuple[str, ...]:
    """Return each missed bound in words, given the last value of each metric."""
    missed = (metric.violation(last.get(metric.name)) for metric in metrics)
    return tuple(words for words in missed if words)


def why_no_best(document: Mapping[str, Any], metric: str = "its objective") -> str:
    """Return why a sweep has no best trial: no value, or none that keeps every bound."""
    valued = [t for t in document["trials"] if t["best"] is not None and t["state"] != "failed"]
    missed = [(t["number"], t["violates"]) for t in valued if t.get("violates")]
    if not missed:
        return f"No trial that did not fail has reported {metric}."
    shown = "; ".join(f"trial {number}: {', '.join(words)}" for number, words in missed[:3])
    more = f"; and {len(missed) - 3} more" if len(missed) > 3 else ""
    return (
        f"No trial keeps every bound of the sweep's metrics, so none is the best ({shown}{more})."
    )

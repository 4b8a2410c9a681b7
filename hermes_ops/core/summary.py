"""A sweep's outcome as plain facts: shared by tracking, which reads it, and report, which shows it.

Losses here are in the user's own direction; nothing is turned round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from hermes_ops.core.secondary_metrics import MetricOutcome, SecondaryMetric

KEPT = "kept"
CurvePoints = tuple[tuple[int, float, int], ...]  # (step, value, Unix milliseconds)


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a trial's training. Unix seconds; `end_s` and `last_step` None while it runs.

    `startup_s` and `restore_s` are what its trial measured of its start, None where it did not.
    `batch` are the samples of a step over all its GPUs, None where they are not known.
    """

    trial: int
    epoch: int
    gpus: tuple[int, ...]
    start_s: float
    end_s: float | None = None
    first_step: int = 0
    last_step: int | None = None
    outcome: str = ""
    startup_s: float | None = None
    restore_s: float | None = None
    batch: int | None = None

    def to_json(self) -> list[Any]:
        """Return a short JSON value: the fields but the trial, in their order."""
        known = [] if self.batch is None else [self.batch]
        return [
            self.epoch,
            list(self.gpus),
            self.start_s,
            self.end_s,
            self.first_step,
            self.last_step,
            self.outcome,
            self.startup_s,
            self.restore_s,
            *known,
        ]

    @classmethod
    def from_json(cls, trial: int, value: list[Any]) -> Segment:
        """Undo `to_json`; the last fields may be missing."""
        epoch, gpus, *others = value
        return cls(trial, epoch, tuple(gpus), *others)


@dataclass(frozen=True, slots=True)
class TrialSummary:
    """One trial: `final` and `best` values of the objective, None when it reported none.

    `metrics`: of each other metric that the sweep names; `violates`: the bounds of
    these that the trial misses, in words. `sizes`: the number of GPUs of each segment; `batches`:
    the samples of a step in each, empty where none are known.
    """

    number: int
    state: str
    config: Mapping[str, Any] | None = None  # None: never opened, so it has none
    final: float | None = None
    best: float | None = None
    steps: int = 0
    segments: int = 0
    preemptions: int = 0
    gpu_seconds: float = 0.0
    sizes: tuple[int, ...] = ()
    batches: tuple[int | None, ...] = ()
    metrics: Mapping[str, MetricOutcome] = field(default_factory=dict)
    violates: tuple[str, ...] = ()
    reason: str = ""  # why it ended, where it did not finish

    @property
    def can_be_best(self) -> bool:
        """False for a trial that failed, which left no model to use, or that misses a bound."""
        return self.state != "failed" and not self.violates

    @property
    def bounds(self) -> str:
        """Return the bounds of the sweep that the trial violates; KEPT if there is none."""
        return "; ".join(self.violates) or KEPT

    @property
    def has_sizes(self) -> bool:
        """True for a trial that has had more than one GPU."""
        return any(size > 1 for size in self.sizes)

    def to_document(self) -> dict[str, Any]:
        """Return the trial's part of the JSON document; a value that is not finite is null.

        `metrics` and `violates` are there where the sweep names metrics, `reason` where there is
        one, `batches` where they are known.
        """
        return {
            "number": self.number,
            "state": self.state,
            "config": None if self.config is None else dict(self.config),
            "final": _finite(self.final),
            "best": _finite(self.best),
            "steps": self.steps,
            "segments": self.segments,
            "preemptions": self.preemptions,
            "gpu_seconds": round(self.gpu_seconds, 3),
            "sizes": list(self.sizes),
            **({"batches": list(self.batches)} if self.batches else {}),
            **({"reason": self.reason} if self.reason else {}),
            **(self._of_metrics() if self.metrics else {}),
        }

    def _of_metrics(self) -> dict[str, Any]:
        values = {
            name: {"last": _finite(seen.last), "best": _finite(seen.best)}
            for name, seen in self.metrics.items()
        }
        return {"metrics": values, "violates": list(self.violates)}


def course(numbers: Iterable[int | None]) -> str:
    """Return numbers in their order as text, one that does not change once: `1 → 2 → 1`."""
    changes = [str(number) for number, _ in groupby(numbers) if number is not None]
    return " → ".join(changes)


@dataclass(frozen=True, slots=True)
class Night:
    """An earlier sweep of the same schedule; `started_s` is Unix time."""

    sweep: str
    started_s: float
    state: str
    best: float | None
    config: Mapping[str, Any]
    gpu_seconds: float | None


@dataclass(frozen=True, slots=True)
class SweepSummary:
    """A sweep and its trials by number; `direction` is minimize or maximize.

    `metrics` are those that it names other than the objective.
    """

    sweep: str
    state: str
    trials: tuple[TrialSummary, ...]
    metric: str
    direction: str
    wall_seconds: float
    pool_slots: int | None = None
    max_slots_used: int | None = None
    metrics: tuple[SecondaryMetric, ...] = ()
    reason: str = ""  # why it ended before its last trial, or failed

    @property
    def best(self) -> TrialSummary | None:
        """The trial with the best value, of two the lower number; None when there is no value.

        A trial that failed or that misses a bound is never the best.
        """
        valued = [t for t in self.trials if t.can_be_best and _finite(t.best) is not None]
        sign = -1.0 if self.direction == "maximize" else 1.0
        return min(valued, key=lambda t: (sign * (t.best or 0.0), t.number), default=None)

    def to_document(self) -> dict[str, Any]:
        """Return the document that `--json` prints; `best` is null when no trial can be it."""
        best = self.best
        return {
            "sweep": self.sweep,
            "state": self.state,
            "trials": [t.to_document() for t in self.trials],
            "best": None if best is None else best.to_document(),
            "wall_seconds": round(self.wall_seconds, 3),
            "pool_slots": self.pool_slots,
            "max_slots_used": self.max_slots_used,
            **({"reason": self.reason} if self.reason else {}),
        }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

"""A sweep's outcome as plain facts: shared by tracking, which reads it, and report, which shows it.

Its trials, its state as all views say it, and which of its trials failed alike.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from hermes_ops.core.deadline import DeadlineResult
from hermes_ops.core.secondary_metrics import MetricOutcome, SecondaryMetric

KEPT = "kept"
CurvePoints = Sequence[tuple[int, float, int]]  # (step, value, Unix milliseconds)


FINISHED, FAILED, CANCELLED, SKIPPED = "finished", "failed", "cancelled", "skipped"
ENDED_STATES = (FINISHED, FAILED, CANCELLED, SKIPPED)
_OF_AIRFLOW = {"success": FINISHED, "failed": FAILED, "skipped": SKIPPED}


INCOMPLETE = 256
"""Stands for the exit code of a segment for which not all nodes of its trial were there; no process
ends with it."""


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

    @property
    def gpu_seconds(self) -> float:
        """The GPU-seconds of the segment; 0 while it runs."""
        return 0.0 if self.end_s is None else len(self.gpus) * (self.end_s - self.start_s)

    def to_json(self) -> list[Any]:
        """Return a short JSON value: the fields in their order, without the trial."""
        batch_fields = [] if self.batch is None else [self.batch]
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
            *batch_fields,
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
    """Return numbers in their order as text, without repetitions in a row: `1 → 2 → 1`."""
    changes = [str(number) for number, _ in groupby(numbers) if number is not None]
    return " → ".join(changes)


@dataclass(frozen=True, slots=True)
class Night:
    """An earlier sweep of the same schedule; `started_s` is Unix time.

    `objective` is as in SweepSummary, empty where it is not known.
    """

    sweep: str
    started_s: float
    state: str
    best: float | None
    config: Mapping[str, Any]
    gpu_seconds: float | None
    objective: str = ""


@dataclass(frozen=True, slots=True)
class SweepSummary:
    """A sweep and its trials by number; `direction` is minimize or maximize.

    `metrics` are those that it names besides the objective. `ended_seconds` is the part of
    `wall_seconds` between an end of the sweep and its continuation, `max_slots_used` the most GPUs
    that its segments held at once.
    """

    sweep: str
    state: str
    trials: tuple[TrialSummary, ...]
    metric: str
    direction: str
    wall_seconds: float
    pool_slots: int | None = None
    max_slots_used: int = 0
    metrics: tuple[SecondaryMetric, ...] = ()
    reason: str = ""  # why it ended before its last trial, or failed
    deadline: DeadlineResult | None = None
    ended_seconds: float = 0.0

    @property
    def objective(self) -> str:
        """The direction and the metric of the objective, as `minimize loss`."""
        return objective_text(self.direction, self.metric)

    @property
    def active_seconds(self) -> float:
        """The seconds for which the sweep has run: `wall_seconds` without `ended_seconds`."""
        return self.wall_seconds - self.ended_seconds

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
            **({"ended_seconds": round(self.ended_seconds, 3)} if self.ended_seconds else {}),
            "pool_slots": self.pool_slots,
            "max_slots_used": self.max_slots_used,
            **({"reason": self.reason} if self.reason else {}),
            **({} if self.deadline is None else {"deadline": self.deadline.to_document()}),
        }


def most_gpus(segments: Iterable[Segment]) -> int:
    """Return the most GPUs that these segments held at once; one without an end still holds them.

    A GPU counts once, also where the next segment on it begins before the last one's end is noted.
    """
    changes: list[tuple[float, int, int]] = []
    for segment in segments:
        for gpu in segment.gpus:
            changes.append((segment.start_s, 1, gpu))
            if segment.end_s is not None:
                changes.append((segment.end_s, -1, gpu))
    held: Counter[int] = Counter()
    most = 0
    for _, change, gpu in sorted(changes):  # at one instant those that leave come first
        held[gpu] += change
        most = max(most, sum(count > 0 for count in held.values()))
    return most


def objective_text(direction: str, metric: str) -> str:
    """Return an objective as `minimize loss`."""
    return f"{direction} {metric}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def final_state(*, closed: bool, failed: bool, has_best: bool) -> str:
    """Return the state of a sweep that has ended.

    `closed`: it was ended before its last trial, by a person or a budget. `failed`: because its
    first trials failed alike. `has_best`: a trial can be its best one.
    """
    if closed:
        return CANCELLED
    return FINISHED if has_best and not failed else FAILED


def sweep_state(airflow: str | None, recorded: str | None) -> str:
    """Return the state of a sweep from Airflow's state of its run and from MLflow's tag.

    Airflow knows whether it has ended, and MLflow as what: a sweep that was cancelled with a best
    trial is a success for Airflow, as the tasks behind it may run.
    """
    if airflow not in _OF_AIRFLOW:
        return airflow or "running"
    if airflow != "skipped" and recorded in ENDED_STATES:
        return recorded
    return _OF_AIRFLOW[airflow]


_CHANGING = re.compile(
    r"0x[0-9a-fA-F]+"  # addresses
    r"|\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b"  # ids
    r"|(?:(?<!\w)[-+])?\d+(?:[.,:]\d+)*(?:[eE][-+]?\d+)?"  # numbers, times
)
_MOST_NUMBERS = 12


@dataclass(frozen=True, slots=True)
class FailedAlike:
    """Trials that failed in the same way, by number, and the reason of the first of them."""

    numbers: tuple[int, ...]
    reason: str

    def words(self, *, all_of_them: bool) -> str:
        """Return it as a sentence; the numbers are left out where these are all failed trials."""
        if len(self.numbers) == 1:
            return f"Trial {self.numbers[0]} failed: {self.reason}"
        which = "" if all_of_them else f" ({_listed(self.numbers)})"
        return f"{len(self.numbers)} trials failed alike{which}: {self.reason}"


def normalised(reason: str) -> str:
    """Return the reason without numbers, ids and addresses, on one line."""
    return " ".join(_CHANGING.sub("#", reason).split())


def alike(failures: Iterable[tuple[int, str]]) -> tuple[FailedAlike, ...]:
    """Group failed trials (number, reason), the largest group first, then by number."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for number, reason in sorted(failures):
        groups.setdefault(normalised(reason), []).append((number, reason))
    same_reason = [
        FailedAlike(tuple(n for n, _ in group), group[0][1]) for group in groups.values()
    ]
    return tuple(sorted(same_reason, key=lambda g: (-len(g.numbers), g.numbers)))


def failure_lines(failures: Iterable[tuple[int, str]], most: int = 5) -> list[str]:
    """Return a line for each kind of failure, the most frequent first, at most `most` lines."""
    groups = alike(failures)
    lines = [g.words(all_of_them=len(groups) == 1) for g in groups[:most]]
    rest = sum(len(g.numbers) for g in groups[most:])
    if rest:
        lines.append(f"{rest} more {'trial' if rest == 1 else 'trials'} failed in other ways")
    return lines


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_NUMBERS]))
    return f"{shown}, …" if len(numbers) > _MOST_NUMBERS else shown

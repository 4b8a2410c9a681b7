"""A sweep's outcome, collected from MLflow alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hermes_ops.core.secondary import Secondary, Seen, violations
from hermes_ops.core.summary import CurvePoints, Segment, SweepSummary, TrialSummary
from hermes_ops.errors import Refused
from hermes_ops.tracking.curves import CurveReader, Curves
from hermes_ops.tracking.runs import RUN_STATUS, SweepRef, SweepRun, TrialRun
from hermes_ops.tracking.tracker import Tracker

WHY_TAGS = ("hermes.closed", "hermes.failed", "hermes.reached")
"""Tags of a sweep's run that say why it has ended as it has."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Everything that a report shows: the summary, the curves by trial, all segments.

    `run` is the sweep's own run, `trials` those of its opened trials by number.
    """

    summary: SweepSummary
    curves: Mapping[int, CurvePoints]
    segments: tuple[Segment, ...]
    run: SweepRun
    trials: tuple[TrialRun, ...]


def find(tracker: Tracker, sweep_id: str, experiment_name: str | None = None) -> SweepRef:
    """Return the sweep of that id; Refused when MLflow has none."""
    found = tracker.find_sweep(sweep_id, experiment_name)
    if found is None:
        raise Refused(
            f"MLflow at {tracker.uri} knows no sweep {sweep_id!r}. `hermes sweep list` shows them.",
            "RESOURCE_DOES_NOT_EXIST",
        )
    return found


def collect(
    tracker: Tracker,
    sweep: SweepRef,
    *,
    metric: str,
    direction: str,
    max_trials: int,
    others: Sequence[Secondary] = (),
    pool_slots: int | None = None,
    max_slots_used: int | None = None,
    clock: Callable[[], float] = time.time,
) -> Collected:
    """Read a sweep whole: its trials, curves and segments, and what they came to in `others`.

    Trials 0..max_trials-1 that were never opened count as pending while the sweep runs and as
    cancelled after its end. `pool_slots` and `max_slots_used` that are not given come from the
    parent's tags hermes.pool_slots and hermes.max_slots_used. Raises Unavailable.
    """
    run = tracker.sweep(sweep)
    read = CurveReader(tracker, metric, clock, beside=(m.name for m in others)).read(sweep)
    trials = tracker.trials(sweep)
    opened = {t.number: _trial(t, read, direction, others) for t in trials}
    none = {m.name: Seen() for m in others}
    unopened = "cancelled" if run.state in RUN_STATUS else "pending"
    numbers = sorted(set(range(max_trials)) | set(opened))
    summary = SweepSummary(
        sweep=sweep.sweep_id,
        state=run.state,
        trials=tuple(opened.get(n) or TrialSummary(n, unopened, metrics=none) for n in numbers),
        metric=metric,
        direction=direction,
        wall_seconds=_wall_s(run, clock()),
        pool_slots=_known(pool_slots, run.tags.get("hermes.pool_slots")),
        max_slots_used=_known(max_slots_used, run.tags.get("hermes.max_slots_used")),
        metrics=tuple(others),
        reason=next((run.tags[tag] for tag in WHY_TAGS if tag in run.tags), ""),
    )
    segments = tuple(segment for trial in trials for segment in trial.segments)
    return Collected(summary, read.points, segments, run, trials)


def _trial(
    run: TrialRun, read: Curves, direction: str, others: Sequence[Secondary]
) -> TrialSummary:
    points, segments = read.points.get(run.number, ()), run.segments
    beside = {m: read.beside[m.name].get(run.number, ()) for m in others}
    seen = {m.name: m.seen(value for _, value, _ in found) for m, found in beside.items()}
    gpu_s = sum(len(s.gpus) * (s.end_s - s.start_s) for s in segments if s.end_s is not None)
    preempted = sum(s.outcome == "preempted" for s in segments)
    return TrialSummary(
        number=run.number,
        state=run.state,
        config=run.config,
        final=points[-1][1] if points else _number(run.tags.get("hermes.final")),
        best=_best(points, direction),
        steps=points[-1][0] if points else int(_number(run.tags.get("hermes.steps")) or 0),
        segments=int(_number(run.tags.get("hermes.segments")) or len(segments)),
        preemptions=int(_number(run.tags.get("hermes.preemptions")) or preempted),
        gpu_seconds=_number(run.tags.get("hermes.gpu_seconds")) or gpu_s,
        metrics=seen,
        reason=run.tags.get("hermes.reason", ""),
        violates=violations(others, {name: one.last for name, one in seen.items()}),
    )


def _best(points: CurvePoints, direction: str) -> float | None:
    values = [value for _, value, _ in points if math.isfinite(value)]
    if not values:
        return None
    return max(values) if direction == "maximize" else min(values)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _known(given: int | None, tag: str | None) -> int | None:
    if given is not None:
        return given
    value = _number(tag)
    return None if value is None else int(value)


def _wall_s(run: SweepRun, now_s: float) -> float:
    end_s = now_s if run.ended_ms is None else run.ended_ms / 1_000
    return max(0.0, end_s - run.started_ms / 1_000)

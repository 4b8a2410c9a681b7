"""A sweep's outcome, collected from MLflow, and each trial's figures as metrics there.

MLflow's table of runs can show and sort the figures.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_ops.core.deadline import DeadlineResult
from hermes_ops.core.secondary_metrics import MetricOutcome, SecondaryMetric, violations
from hermes_ops.core.summary import CurvePoints, Segment, SweepSummary, TrialSummary, most_gpus
from hermes_ops.errors import Refused
from hermes_ops.tracking.curves import CurveReader, SweepCurves
from hermes_ops.tracking.rest import legal_name
from hermes_ops.tracking.runs import (
    RUN_STATUS,
    WHY_TAGS,
    SweepRef,
    SweepRun,
    TrialRun,
    ended_spans_of,
    number_in,
)
from hermes_ops.tracking.sender import read_lines
from hermes_ops.tracking.tracker import Tracker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CollectedSweep:
    """The data of a report: the summary, the curves by trial, all segments.

    `run` is the sweep's own run, `trials` those of its opened trials by number.
    """

    summary: SweepSummary
    curves: Mapping[int, CurvePoints]
    segments: tuple[Segment, ...]
    run: SweepRun
    trials: tuple[TrialRun, ...]


def collect(
    tracker: Tracker,
    sweep: SweepRef,
    *,
    metric: str,
    direction: str,
    max_trials: int,
    others: Sequence[SecondaryMetric] = (),
    clock: Callable[[], float] = time.time,
) -> CollectedSweep:
    """Fetch a whole sweep: its trials, curves and segments, and their values of `others`.

    Trials 0..max_trials-1 that were never opened count as pending while the sweep runs and as
    cancelled after its end. Raise Unavailable.
    """
    run = tracker.sweep(sweep)
    names = tuple(m.name for m in others)
    curves = CurveReader(tracker, metric, constraint_metrics=names).fetch(sweep)
    trials = tracker.trials(sweep)
    opened = {t.number: _trial(t, curves, direction, others) for t in trials}
    none = {m.name: MetricOutcome() for m in others}
    unopened = "cancelled" if run.state in RUN_STATUS else "pending"
    numbers = sorted(set(range(max_trials)) | set(opened))
    segments = tuple(segment for trial in trials for segment in trial.segments)
    summary = SweepSummary(
        sweep=sweep.sweep_id,
        state=run.state,
        trials=tuple(opened.get(n) or TrialSummary(n, unopened, metrics=none) for n in numbers),
        metric=metric,
        direction=direction,
        wall_seconds=_wall_s(run, clock()),
        pool_slots=_pool_slots(run),
        max_slots_used=most_gpus(segments),
        metrics=tuple(others),
        reason=_reason(run),
        deadline=deadline_result(run),
        ended_seconds=sum(until_s - ended_s for ended_s, until_s in ended_spans_of(run.tags)),
    )
    return CollectedSweep(summary, curves.points, segments, run, trials)


DEADLINE_TAG = "hermes.deadline"
"""Tag of a sweep's run: its deadline in Unix seconds."""


def deadline_result(run: SweepRun) -> DeadlineResult | None:
    """Return whether a sweep has kept its deadline, by its run's tags; None without one."""
    at_s = number_in(run.tags.get(DEADLINE_TAG))
    if at_s is None:
        return None
    has_ended = run.state in RUN_STATUS
    ended_s = None if run.ended_ms is None else run.ended_ms / 1_000
    return DeadlineResult.from_end(at_s, has_ended=has_ended, reason=_reason(run), ended_s=ended_s)


def _reason(run: SweepRun) -> str:
    """Return why the sweep has ended; empty where no tag holds it."""
    return next((run.tags[tag] for tag in WHY_TAGS if tag in run.tags), "")


def _trial(
    run: TrialRun, curves: SweepCurves, direction: str, others: Sequence[SecondaryMetric]
) -> TrialSummary:
    points, segments = curves.points.get(run.number, ()), run.segments
    constraints = {m: curves.constraint_metrics[m.name].get(run.number, ()) for m in others}
    seen = {m.name: m.outcome(value for _, value, _ in series) for m, series in constraints.items()}
    gpu_s = sum(segment.gpu_seconds for segment in segments)
    preempted = sum(s.outcome == "preempted" for s in segments)
    totals = {} if run.is_open else run.tags  # one that was continued has those of an earlier end
    return TrialSummary(
        number=run.number,
        state=run.state,
        config=run.config,
        final=points[-1][1] if points else number_in(run.tags.get("hermes.final")),
        best=_best((value for _, value, _ in points), direction),
        steps=points[-1][0] if points else int(number_in(run.tags.get("hermes.steps")) or 0),
        segments=int(number_in(totals.get("hermes.segments")) or len(segments)),
        preemptions=int(number_in(totals.get("hermes.preemptions")) or preempted),
        gpu_seconds=number_in(totals.get("hermes.gpu_seconds")) or gpu_s,
        sizes=tuple(len(segment.gpus) for segment in segments),
        batches=batches_of(segments),
        metrics=seen,
        reason=run.tags.get("hermes.reason", ""),
        violates=violations(others, {name: one.last for name, one in seen.items()}),
    )


def batches_of(segments: Sequence[Segment]) -> tuple[int | None, ...]:
    """Return the samples of a step in each segment; empty where none are known."""
    batches = tuple(segment.batch for segment in segments)
    return batches if any(batch is not None for batch in batches) else ()


def _best(values: Iterable[float], direction: str) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    return max(finite) if direction == "maximize" else min(finite)


def _pool_slots(run: SweepRun) -> int | None:
    value = number_in(run.tags.get("hermes.pool_slots"))
    return None if value is None else int(value)


def _wall_s(run: SweepRun, now_s: float) -> float:
    has_ended = run.state in RUN_STATUS and run.ended_ms is not None
    end_s = (run.ended_ms or 0) / 1_000 if has_ended else now_s  # MLflow keeps an earlier end
    return max(0.0, end_s - run.started_ms / 1_000)


COLUMNS = ("best", "final", "steps", "segments", "preemptions", "gpu_seconds")
BOUNDS_TAG = "hermes.bounds"
"""Tag of a trial's run where its sweep has bounds: `TrialSummary.bounds`."""
_MOST_BYTES = 16 << 20


def log_columns(tracker: Tracker, collected: CollectedSweep) -> None:
    """Log each opened trial's figures as metrics `hermes.best`, `hermes.final` and so on.

    A metric besides the objective gives `hermes.best.NAME` and `hermes.final.NAME`; where one has a
    bound, `hermes.bounds_kept` is 1 or 0 and the tag BOUNDS_TAG holds the reason. MLflow's table
    shows them next to the params and the tags `hermes.sweep`, `hermes.trial` and `hermes.state`:
    it sorts tags as text, and of a metric it shows the last value alone, not the best. Values that
    are not finite are skipped. Safe to repeat. Raise Unavailable.
    """
    summaries = {trial.number: trial for trial in collected.summary.trials}
    bounded = any(metric.is_bounded for metric in collected.summary.metrics)
    for run in collected.trials:
        at_ms = run.ended_ms or run.started_ms
        figures = _figures(summaries[run.number], bounded)
        try:
            tracker.log_metrics(run.run_id, [_entry(name, v, at_ms) for name, v in figures])
            if bounded:
                tracker.set_tags(run.run_id, {BOUNDS_TAG: summaries[run.number].bounds})
        except Refused as error:  # its run was deleted, for instance
            log.warning("MLflow refuses the figures of trial %s: %s", run.number, error)


def log_so_far(
    tracker: Tracker, run_id: str, figures: Mapping[str, float | None], at_ms: int
) -> None:
    """Log the figures of one trial at the end of a segment, by their COLUMNS.

    So the table has them while the sweep runs; `log_columns` overwrites them at its end. Raise
    Unavailable, Refused.
    """
    finite = {name: v for name, v in figures.items() if v is not None and math.isfinite(v)}
    tracker.log_metrics(run_id, [_entry(name, float(v), at_ms) for name, v in finite.items()])


def log_sizes(tracker: Tracker, run_id: str, segments: Sequence[Segment]) -> None:
    """Log a trial's GPUs and samples of a step over its steps: `hermes.workers`, `hermes.batch`.

    Each segment gives its first and its last step. Nothing is logged of a trial that has had one
    GPU only and no known batch. Safe to repeat. Raise Unavailable, Refused.
    """
    sized = any(len(segment.gpus) > 1 or segment.batch is not None for segment in segments)
    entries = [entry for s in segments for entry in _size_entries(s)] if sized else []
    if entries:
        tracker.log_metrics(run_id, entries)


def _size_entries(segment: Segment) -> Iterator[dict[str, Any]]:
    ends = [(segment.first_step, segment.start_s)]
    if segment.end_s is not None and segment.last_step is not None:
        ends.append((segment.last_step, segment.end_s))
    for name, value in (("workers", len(segment.gpus)), ("batch", segment.batch)):
        for step, at_s in ends if value is not None else ():
            entry = _entry(name, float(value or 0), round(at_s * 1_000))
            yield {**entry, "step": step}


def best_and_final(metrics_file: Path, metric: str, direction: str) -> dict[str, float | None]:
    """Return the best and the final value of a metric in a trial's file of metrics.

    Both are None where the file has no value, or is so long that reading it would delay the end of
    the trial's task.
    """
    best = final = None
    if metrics_file.exists() and metrics_file.stat().st_size <= _MOST_BYTES:
        lines = (line for line, _ in read_lines(metrics_file, 0) if line is not None)
        values = [line.value for line in lines if line.name == metric]
        final = values[-1] if values else None
        best = _best(values, direction)
    return {"best": best, "final": final}


def _entry(name: str, value: float, at_ms: int) -> dict[str, Any]:
    return {"key": legal_name(f"hermes.{name}"), "value": value, "timestamp": at_ms, "step": 0}


def _figures(trial: TrialSummary, bounded: bool) -> Iterator[tuple[str, float]]:
    """Yield the finite figures by their names without `hermes.`."""
    figures = {name: getattr(trial, name) for name in COLUMNS}
    for name, seen in trial.metrics.items():
        figures |= {f"best.{name}": seen.best, f"final.{name}": seen.last}
    if bounded:
        figures["bounds_kept"] = 0.0 if trial.violates else 1.0
    for name, value in figures.items():
        if value is not None and math.isfinite(value):
            yield name, float(value)

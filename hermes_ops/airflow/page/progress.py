"""The progress of a sweep: trials, learning curves and GPU timeline, while it runs and after.

Reading and drawing takes half a second of the processor, more for large sweeps. So one result
serves all readers for ten times as long, and only one is computed at a time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hermes_ops.airflow.control.sweep_state import SweepState
from hermes_ops.core.secondary_metrics import SecondaryMetric, violations
from hermes_ops.core.summary import KEPT, CurvePoints, Segment, SweepSummary, TrialSummary
from hermes_ops.report.background import Background
from hermes_ops.report.pictures import Picture, pictures
from hermes_ops.tracking import SweepRef, Tracker, TrialRun
from hermes_ops.tracking.overview import BEST, FINAL, MOST_CURVES
from hermes_ops.tracking.rest import legal_name
from hermes_ops.tracking.runs import RUN_STATUS
from hermes_ops.tracking.summary import BOUNDS_TAG

MOST_TRIALS = 2_000
"""Trials of a sweep that are read, the first that were opened."""
MOST_POINTS, LEAST_POINTS, ALL_POINTS = 120, 30, 3_000
"""Points requested of each curve, at most and at least, and the approximate sum of all curves."""
FRESH_S, FRESH_CPU, FRESH_WALL = 2.0, 10.0, 2.0
"""Seconds that a result is used, or multiples of the processor time and the time it took."""
ENDED_FRESH_S = 60.0
MOST_KEPT = 16


@dataclass(frozen=True, slots=True)
class LiveSweep:
    """A sweep in Airflow now: its state, the phases of its trials, the running segments.

    `bounded`: the metrics with bounds, which the best trial has to keep.
    """

    state: str
    at_s: float
    phases: Mapping[int, str] = field(default_factory=dict)
    segments: Sequence[Segment] = ()
    bounded: Sequence[SecondaryMetric] = ()

    @classmethod
    def from_state(cls, state: str, at_s: float, sweep_state: SweepState | None) -> LiveSweep:
        """Return it for a sweep that the controller serves, or no longer serves (None)."""
        if sweep_state is None:
            return cls(state, at_s)
        live = [
            t for t in sweep_state.trials if t.is_under_way and t.segment is not None and t.lease
        ]
        segments = [
            Segment(t.number, t.segment.epoch, t.lease.gpus, t.segment.started_s)
            for t in live
            if t.segment is not None and t.lease is not None
        ]
        phases = {t.number: t.phase.value for t in sweep_state.trials}
        bounded = [m for m in sweep_state.spec.config.secondary if m.is_bounded]
        return cls(state, at_s, phases, segments, bounded)


@dataclass(frozen=True, slots=True)
class SweepProgress:
    """A sweep at `read_s` (Unix seconds), and its pictures.

    `left_out`: trials whose curves are not in the picture, as there are too many.
    """

    summary: SweepSummary
    pictures: Sequence[Picture]
    left_out: int
    read_s: float


@dataclass(slots=True)
class ProgressCache:
    """Caches the progress of the sweeps that were read last."""

    clock: Callable[[], float] = time.monotonic
    _kept: dict[str, tuple[SweepProgress, float]] = field(
        default_factory=dict
    )  # with its last moment
    _busy: threading.Lock = field(default_factory=threading.Lock)

    def get(self, sweep: str, read: Callable[[], SweepProgress]) -> SweepProgress:
        """Return the progress of a sweep, by `read` unless a cached one is fresh enough."""
        kept = self._kept.get(sweep)
        if kept is not None and (self.clock() <= kept[1] or self._busy.locked()):
            return kept[0]
        with self._busy:
            kept = self._kept.get(sweep)
            if kept is not None and self.clock() <= kept[1]:
                return kept[0]  # somebody else has just read it
            began_s, cpu_s = time.monotonic(), time.thread_time()
            progress = read()
            cost_s = FRESH_CPU * (time.thread_time() - cpu_s)
            wait_s = FRESH_WALL * (time.monotonic() - began_s)
            least_s = ENDED_FRESH_S if progress.summary.state in RUN_STATUS else FRESH_S
            fresh_s = max(least_s, cost_s, wait_s)
            self._kept.pop(sweep, None)
            self._kept[sweep] = (progress, self.clock() + fresh_s)
            while len(self._kept) > MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            return progress


def read_progress(
    tracker: Tracker, sweep: SweepRef, objective: tuple[str, str], now: LiveSweep
) -> SweepProgress:
    """Read and draw a sweep by its metric and direction; Unavailable when MLflow is away."""
    metric, direction = objective
    runs = tracker.overview.trials(sweep, MOST_TRIALS)
    drawn = _drawn(runs, direction)
    points_each = min(MOST_POINTS, max(LEAST_POINTS, ALL_POINTS // max(1, len(drawn))))
    curves = tracker.overview.curves([r.run_id for r in drawn], metric, points_each)
    points = {run.number: curves[run.run_id] for run in drawn if run.run_id in curves}
    summary = SweepSummary(
        sweep=sweep.sweep_id,
        state=now.state,
        trials=tuple(_trial(run, points.get(run.number, ()), direction, now) for run in runs),
        metric=metric,
        direction=direction,
        wall_seconds=0.0,
    )
    segments = _segments(runs, now)
    shown = pictures(summary, points, segments, Background(), only=("curves", "gpus"))
    return SweepProgress(summary, shown, len(runs) - len(drawn), now.at_s)


def _drawn(runs: Sequence[TrialRun], direction: str) -> list[TrialRun]:
    """Choose the trials whose curves are drawn: of many the open ones, then the best."""
    sign = -1.0 if direction == "maximize" else 1.0

    def order(run: TrialRun) -> tuple[bool, float, int]:
        best = run.metrics.get(BEST)
        value = math.inf if best is None or math.isnan(best.value) else sign * best.value
        return (not run.is_open, value, run.number)

    return sorted(runs, key=order)[:MOST_CURVES]


def _trial(run: TrialRun, points: CurvePoints, direction: str, now: LiveSweep) -> TrialSummary:
    segments = run.segments
    gpu_s = sum(segment.gpu_seconds for segment in segments)
    logged = run.metrics.get("hermes.steps")
    best = _best([_value(run, BEST), *(value for _, value, _ in points)], direction)
    return TrialSummary(
        number=run.number,
        state=now.phases.get(run.number, run.state) if run.is_open else run.state,
        config=run.config,
        final=points[-1][1] if points else _value(run, FINAL),
        best=best,
        steps=points[-1][0] if points else int(logged.value) if logged else 0,
        segments=len(segments),
        preemptions=sum(s.outcome == "preempted" for s in segments),
        gpu_seconds=gpu_s,
        sizes=tuple(len(s.gpus) for s in (*segments, *_under_way(run, now))),
        violates=() if best is None else _violations(run, now.bounded),
        reason=run.tags.get("hermes.reason", ""),
    )


def _violations(run: TrialRun, bounded: Sequence[SecondaryMetric]) -> tuple[str, ...]:
    """Return the bounds that a trial violates: as recorded at its end, else by its last values."""
    at_end = run.tags.get(BOUNDS_TAG)
    if at_end is not None and not run.is_open:  # an open trial has it of an earlier end
        return () if at_end == KEPT else (at_end,)
    last = {metric.name: _value(run, legal_name(metric.name)) for metric in bounded}
    return violations(bounded, last)


def _under_way(run: TrialRun, now: LiveSweep) -> list[Segment]:
    stored = {segment.epoch for segment in run.segments}
    return [s for s in now.segments if s.trial == run.number and s.epoch not in stored]


def _best(values: Sequence[float | None], direction: str) -> float | None:
    finite = [v for v in values if v is not None and math.isfinite(v)]
    if not finite:
        return None
    return max(finite) if direction == "maximize" else min(finite)


def _value(run: TrialRun, metric: str) -> float | None:
    logged = run.metrics.get(metric)
    return None if logged is None else logged.value


def _segments(runs: Sequence[TrialRun], now: LiveSweep) -> list[Segment]:
    """Return all segments; those under way reach to the present."""
    segments = {(s.trial, s.epoch): s for run in runs for s in run.segments}
    for segment in now.segments:
        segments.setdefault((segment.trial, segment.epoch), segment)
    ended = (s if s.end_s is not None else replace(s, end_s=max(now.at_s, s.start_s))
             for s in segments.values())  # fmt: skip
    return sorted(ended, key=lambda s: (s.start_s, s.trial))

"""Columns for MLflow's own table of runs: each trial's figures, as numbers that it can sort by."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from hermes_ops.core.summary import TrialSummary
from hermes_ops.errors import Refused
from hermes_ops.tracking.names import legal_name
from hermes_ops.tracking.spool import Line, read_lines
from hermes_ops.tracking.summary import Collected
from hermes_ops.tracking.tracker import Tracker

log = logging.getLogger(__name__)

COLUMNS = ("best", "final", "steps", "segments", "preemptions", "gpu_seconds")
BOUNDS_TAG = "hermes.bounds"
"""Tag of a trial's run where its sweep has bounds: `TrialSummary.bounds`."""
_MOST_BYTES = 16 << 20


def log_columns(tracker: Tracker, found: Collected) -> None:
    """Log each opened trial's figures as metrics `hermes.best`, `hermes.final` and so on.

    Of a metric beside the objective these are `hermes.best.NAME` and `hermes.final.NAME`; where
    one has a bound, `hermes.bounds_kept` is 1 or 0 and the tag BOUNDS_TAG says why.
    The table has them beside the params, and the tags `hermes.sweep`, `hermes.trial` and
    `hermes.state`. MLflow sorts tags as text and shows of a metric its last value alone, so the
    best value is in neither. What is not finite is left out; repeating it changes nothing. Raises
    Unavailable.
    """
    summaries = {trial.number: trial for trial in found.summary.trials}
    bounded = any(metric.is_bounded for metric in found.summary.metrics)
    for run in found.trials:
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
    """Log the figures of one trial as they are when a segment has ended, by their COLUMNS.

    The table has them while the sweep runs; `log_columns` has the last word. Raises Unavailable,
    Refused.
    """
    known = {name: v for name, v in figures.items() if v is not None and math.isfinite(v)}
    tracker.log_metrics(run_id, [_entry(name, float(v), at_ms) for name, v in known.items()])


def reported(metrics_file: Path, metric: str, direction: str) -> dict[str, float | None]:
    """Return the best and the final value of a metric in a trial's file of metrics.

    Both are None where the file has no value, or is so long that reading it would keep the trial's
    task from leaving.
    """
    best = final = None
    if metrics_file.exists() and metrics_file.stat().st_size <= _MOST_BYTES:
        sign = -1.0 if direction == "maximize" else 1.0
        values = [line.value for line, _ in read_lines(metrics_file, 0) if _is(line, metric)]
        final = values[-1] if values else None
        best = min((v for v in values if math.isfinite(v)), key=lambda v: sign * v, default=None)
    return {"best": best, "final": final}


def _is(line: Line | None, metric: str) -> TypeGuard[Line]:
    return line is not None and line.name == metric


def _entry(name: str, value: float, at_ms: int) -> dict[str, Any]:
    return {"key": legal_name(f"hermes.{name}"), "value": value, "timestamp": at_ms, "step": 0}


def _figures(trial: TrialSummary, bounded: bool) -> Iterator[tuple[str, float]]:
    """The finite figures, by what follows `hermes.` in their names."""
    found = {name: getattr(trial, name) for name in COLUMNS}
    for name, seen in trial.metrics.items():
        found |= {f"best.{name}": seen.best, f"final.{name}": seen.last}
    if bounded:
        found["bounds_kept"] = 0.0 if trial.violates else 1.0
    for name, value in found.items():
        if value is not None and math.isfinite(value):
            yield name, float(value)

"""Columns for MLflow's own table of runs: each trial's figures, as numbers that it can sort by."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

from hermes_ops.core.summary import TrialSummary
from hermes_ops.errors import Refused
from hermes_ops.tracking.summary import Collected
from hermes_ops.tracking.tracker import Tracker

log = logging.getLogger(__name__)

COLUMNS = ("best", "final", "steps", "segments", "preemptions", "gpu_seconds")


def log_columns(tracker: Tracker, found: Collected) -> None:
    """Log each opened trial's figures as metrics `hermes.best`, `hermes.final` and so on.

    The table has them beside the params, and the tags `hermes.sweep`, `hermes.trial` and
    `hermes.state`. MLflow sorts tags as text and shows of a metric its last value alone, so the
    best value is in neither. What is not finite is left out; repeating it changes nothing. Raises
    Unavailable.
    """
    summaries = {trial.number: trial for trial in found.summary.trials}
    for run in found.trials:
        at_ms = run.ended_ms or run.started_ms
        metrics = [
            {"key": f"hermes.{name}", "value": value, "timestamp": at_ms, "step": 0}
            for name, value in _figures(summaries[run.number])
        ]
        try:
            tracker.log_metrics(run.run_id, metrics)
        except Refused as error:  # its run was deleted, for instance
            log.warning("MLflow refuses the figures of trial %s: %s", run.number, error)


def _figures(trial: TrialSummary) -> Iterator[tuple[str, float]]:
    for name in COLUMNS:
        value = getattr(trial, name)
        if value is not None and math.isfinite(value):
            yield name, float(value)

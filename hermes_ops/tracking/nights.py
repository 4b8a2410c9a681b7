"""Sweeps that a schedule repeats: what each of them came to, kept as tags of its run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from hermes_ops.core.summary import Night
from hermes_ops.tracking.names import chunked_tag, joined_json
from hermes_ops.tracking.runs import RUN_STATUS, SweepRun
from hermes_ops.tracking.summary import Collected
from hermes_ops.tracking.tracker import Tracker

NIGHTLY = "hermes.nightly"
"""Tag of a sweep's run: the schedule that it belongs to."""
BEST, BEST_CONFIG, GPU_SECONDS = "hermes.best", "hermes.best_config", "hermes.gpu_seconds"


def log_outcome(tracker: Tracker, found: Collected) -> None:
    """Tag the sweep's run with its best value and configuration and the GPU time of its trials."""
    gpu_s = sum(t.gpu_seconds for t in found.summary.trials)
    tags = {GPU_SECONDS: f"{gpu_s:.3f}"}
    best = found.summary.best
    if best is not None:
        tags[BEST] = repr(best.best)
        tags |= chunked_tag(BEST_CONFIG, json.dumps(dict(best.config or {})))
    tracker.set_tags(found.run.ref.parent_run_id, tags)


def last_night(tracker: Tracker, experiment: str, schedule: str) -> Mapping[str, Any] | None:
    """The best configuration of the newest ended sweep of a schedule that has one."""
    runs = _ended(tracker, experiment, schedule)
    return next((n.config for n in map(_night, runs) if n.config), None)


def earlier_nights(tracker: Tracker, sweep: SweepRun, count: int) -> tuple[Night, ...]:
    """The `count` sweeps of the same schedule before this one, newest first; none without one."""
    schedule = sweep.tags.get(NIGHTLY)
    if schedule is None or count == 0:
        return ()
    runs = _ended(tracker, sweep.tags.get("hermes.name", sweep.name), schedule)
    earlier = (r for r in runs if r.started_ms < sweep.started_ms)
    return tuple(map(_night, earlier))[:count]


def _ended(tracker: Tracker, experiment: str, schedule: str) -> Iterator[SweepRun]:
    for run in tracker.sweeps(experiment):
        if run.tags.get(NIGHTLY) == schedule and run.state in RUN_STATUS:
            yield run


def _night(run: SweepRun) -> Night:
    best = _number(run.tags.get(BEST))
    return Night(
        sweep=run.ref.sweep_id,
        started_s=run.started_ms / 1_000,
        state=run.state,
        best=best,
        config=joined_json(BEST_CONFIG, run.tags) or {},
        gpu_seconds=_number(run.tags.get(GPU_SECONDS)),
    )


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None

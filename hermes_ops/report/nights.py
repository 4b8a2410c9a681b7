"""The table of nights: a sweep that a schedule repeats, beside the nights before it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hermes_ops.core.amounts import duration
from hermes_ops.core.summary import Night, SweepSummary
from hermes_ops.report.background import Background
from hermes_ops.report.table import shown


def nights(summary: SweepSummary, background: Background) -> list[dict[str, Any]]:
    """This sweep and the nights before it, newest first; empty where there is none before it.

    The best of all is marked; of two equal ones the earlier.
    """
    if not background.nights:
        return []
    every = [_tonight(summary, background), *background.nights]
    sign = -1.0 if summary.direction == "maximize" else 1.0
    able = [(sign * n.best, -place) for place, n in enumerate(every) if n.best is not None]
    best = -min(able)[1] if able else None
    return [{**_row(night), "is_best": place == best} for place, night in enumerate(every)]


def _tonight(summary: SweepSummary, background: Background) -> Night:
    best = summary.best
    return Night(
        sweep=summary.sweep,
        started_s=background.started_s or 0.0,
        state=summary.state,
        best=None if best is None else best.best,
        config={} if best is None else best.config or {},
        gpu_seconds=sum(t.gpu_seconds for t in summary.trials),
    )


def _row(night: Night) -> dict[str, Any]:
    return {
        "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime(night.started_s)),
        "best": "–" if night.best is None else shown(night.best),
        "gpu_time": "–" if night.gpu_seconds is None else duration(night.gpu_seconds),
        "state": night.state.replace("_", " "),
        "config": _words(night.config),
    }


def _words(config: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {shown(value)}" for name, value in config.items())

"""The report as one HTML page: nothing from the network, everything from users escaped."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

from hermes_ops.core.amounts import duration
from hermes_ops.core.secondary import why_no_best
from hermes_ops.core.summary import CurvePoints, Segment, SweepSummary
from hermes_ops.report.background import Background, Range
from hermes_ops.report.nights import nights
from hermes_ops.report.pictures import pictures
from hermes_ops.report.switching import switching_gpu_s
from hermes_ops.report.table import FACTS, beside, parameters, rows, shown
from hermes_ops.report.words import number_range, story

log = logging.getLogger(__name__)

_ASSETS = Path(__file__).parent / "assets"
_HEADINGS = {"number": "trial", "preemptions": "preempted", "gpu_seconds": "GPU-seconds"}
_COMPARED = ("time to best, s", "GPU-seconds", "preemptions", "end of the last trial, s")
_UNREADABLE = "The sweep's story could not be told"


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the table of trials: its text, what it is sorted by, and of a state its name."""

    text: str
    key: str
    state: str = ""


def page(
    summary: SweepSummary,
    curves: Mapping[int, CurvePoints],
    segments: Sequence[Segment],
    background: Background,
) -> str:
    """Return the page. Its one script sorts the table of trials; the page's policy allows no other.

    Pictures are SVG by matplotlib, which is here for PNG anyway: some 20 to 500 kB each. Plotly
    would make them interactive, by 4 MB of script in each report and a dependency more.
    """
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, loader=FileSystemLoader(_ASSETS), trim_blocks=True, lstrip_blocks=True
    )
    script = (_ASSETS / "sort.js").read_text("utf-8")
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return environment.get_template("report.html.j2").render(
        title=summary.sweep,
        style=Markup((_ASSETS / "report.css").read_text("utf-8")),  # noqa: S704  # our own files
        script=Markup(script),  # noqa: S704
        script_hash=Markup(f"sha256-{digest}"),  # noqa: S704
        metric=summary.metric,
        objective=_objective(summary, background),
        facts=_facts(summary, background),
        best=_best(summary),
        no_best=why_no_best(summary.to_document(), summary.metric),
        **_story(summary, curves, segments, background),
        compared=_compared(summary, background),
        nights=nights(summary, background),
        pictures=pictures(summary, curves, segments, background),
        header=[
            *(_HEADINGS.get(f, f) for f in FACTS),
            *(c.heading for c in beside(summary)),
            *parameters(summary),
        ],
        trials=_trials(summary),
        endings=_endings(summary, background),
    )


def _objective(summary: SweepSummary, background: Background) -> str:
    text = f"Objective: {summary.direction} {summary.metric}."
    bounds = [f"{m.name} {m.bound}" for m in summary.metrics if m.is_bounded]
    if bounds:
        text += f" The best trial keeps: {', '.join(bounds)}."
    if background.config is not None:
        text += f" Search: {background.config.search.algorithm.value}."
        if (stop := background.config.early_stop.value) != "none":
            text += f" Early stopping: {stop}."
    return f"{text} Ended because: {background.closed}" if background.closed else text


def _facts(summary: SweepSummary, background: Background) -> list[tuple[str, str]]:
    states = Counter(t.state for t in summary.trials)
    ends = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in states.most_common())
    used = "–" if summary.max_slots_used is None else str(summary.max_slots_used)
    slots = "–" if summary.pool_slots is None else str(summary.pool_slots)
    budget = None if background.config is None else background.config.budget
    gpu_s = duration(sum(t.gpu_seconds for t in summary.trials))
    wall_s = duration(summary.wall_seconds)
    facts = [
        (summary.state, "state"),
        (background.policy or "unknown", "policy"),
        (str(len(summary.trials)), f"trials: {ends}" if ends else "trials"),
        (_of(wall_s, None if budget is None else budget.wall_clock_seconds), "wall time"),
        (_of(gpu_s, None if budget is None else budget.gpu_seconds), "GPU time"),
        (str(sum(t.preemptions for t in summary.trials)), "preemptions"),
        (f"{used} of {slots}", "slots used at most"),
    ]
    if budget is not None:
        planned = budget.max_epochs * len(summary.trials)
        facts.append((f"{sum(t.steps for t in summary.trials)} of {planned}", "steps trained"))
        if budget.failed_trials is not None:
            facts.append(
                (
                    f"{states['failed']} of {budget.failed_trials}",
                    "failed trials of those that end the sweep",
                )
            )
    return facts


def _of(spent: str, limit_s: float | None) -> str:
    return spent if limit_s is None else f"{spent} of {duration(limit_s)}"


def _best(summary: SweepSummary) -> dict[str, Any] | None:
    best = summary.best
    if best is None:
        return None
    config = ", ".join(f"{name} = {shown(value)}" for name, value in (best.config or {}).items())
    value = shown(best.best)
    return {"number": best.number, "metric": summary.metric, "value": value, "config": config}


def _story(
    summary: SweepSummary,
    curves: Mapping[int, CurvePoints],
    segments: Sequence[Segment],
    background: Background,
) -> dict[str, Any]:
    try:
        switching = switching_gpu_s(curves, segments, background)
        return {"story": story(summary, background, switching), "no_story": ""}
    except Exception as error:  # a page without it is better than none
        log.warning("%s.", _UNREADABLE, exc_info=True)
        return {"story": (), "no_story": f"{_UNREADABLE} ({type(error).__name__}: {error})."}


def _compared(summary: SweepSummary, background: Background) -> dict[str, Any] | None:
    """The table of the sweep beside its replays; None without any."""
    if not background.alternatives:
        return None
    best_s = background.time_to_best_s
    measured: tuple[Range | None, ...] = (
        None if best_s is None else (best_s, best_s),
        _point(sum(t.gpu_seconds for t in summary.trials)),
        _point(float(sum(t.preemptions for t in summary.trials))),
        _point(summary.wall_seconds),
    )
    found = [(f"{background.policy or 'this sweep'}, as it ran", *map(number_range, measured))]
    for a in background.alternatives:
        figures = (a.time_to_best_s, a.gpu_s, a.preemptions, a.makespan_s)
        found.append((f"{a.policy}, replayed", *map(number_range, figures)))
    return {"header": _COMPARED, "rows": found}


def _point(value: float) -> Range:
    return value, value


def _trials(summary: SweepSummary) -> list[dict[str, Any]]:
    best = summary.best
    names = [*FACTS, *(c.name for c in beside(summary)), *parameters(summary)]
    return [
        {
            "number": trial.number,
            "is_best": trial is best,
            "cells": [
                _cell(name if place < len(FACTS) else "", value)
                for place, (name, value) in enumerate(zip(names, cells, strict=True))
            ],
        }
        for trial, cells in rows(summary)
    ]


def _cell(fact: str, value: object) -> Cell:
    if fact == "state":
        return Cell(str(value).replace("_", " "), str(value), str(value))
    text = f"{value:,.1f}" if fact == "gpu_seconds" else shown(value)
    if isinstance(value, float):
        return Cell(text, repr(value) if isfinite(value) else "")
    return Cell(text, "" if value is None else text)


def _endings(summary: SweepSummary, background: Background) -> list[dict[str, Any]]:
    """What is known of the trials that did not finish."""
    found = background.endings
    return [
        {
            "number": trial.number,
            "state": trial.state.replace("_", " "),
            "reason": found[trial.number].reason,
            "tail": found[trial.number].tail,
        }
        for trial in summary.trials
        if trial.state != "finished" and trial.number in found
    ]

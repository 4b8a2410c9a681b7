"""The report of a sweep: an HTML page in which users' texts are escaped, and its parts as files."""

from __future__ import annotations

import json
import logging
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

from hermes_ops.core.amounts import duration
from hermes_ops.core.secondary_metrics import why_no_best
from hermes_ops.core.summary import CurvePoints, Segment, SweepSummary
from hermes_ops.report.background import Background
from hermes_ops.report.canvas import png
from hermes_ops.report.figures import gpu_timeline, learning_curves
from hermes_ops.report.pictures import pictures
from hermes_ops.report.story import number_range, story, switching_gpu_s
from hermes_ops.report.table import (
    FACTS,
    added_columns,
    config_text,
    csv_text,
    format_cell,
    nights,
    parameters,
    rows,
)

log = logging.getLogger(__name__)

PAGE = "report.html"
_ASSETS = Path(__file__).parent / "assets"
_HEADINGS = {"number": "trial", "preemptions": "preempted", "gpu_seconds": "GPU-seconds"}
_COMPARED = ("time to best, s", "GPU-seconds", "preemptions", "end of the last trial, s")
_UNREADABLE = "The sweep's story could not be told"


@dataclass(frozen=True, slots=True)
class TableCell:
    """A cell of the table of trials: its text, its sort key, and the name of a state."""

    text: str
    key: str
    state: str = ""


def page(
    summary: SweepSummary,
    curves: Mapping[int, CurvePoints],
    segments: Sequence[Segment],
    background: Background,
) -> str:
    """Return the page. Its content security policy allows one script, which sorts the trials.

    Pictures are SVG by matplotlib, which is needed for PNG anyway: some 20 to 500 kB each. Plotly
    would make them interactive, for 4 MB of script in each report and another dependency.
    """
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        autoescape=True, loader=FileSystemLoader(_ASSETS), trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2").render(
        title=summary.sweep,
        **_assets(),
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
            *(c.heading for c in added_columns(summary)),
            *parameters(summary),
        ],
        trials=_trials(summary),
        endings=_endings(summary, background),
    )


def _assets() -> dict[str, Any]:
    """Return the page's style, its script, and the script's hash for the security policy."""
    from markupsafe import Markup

    script = (_ASSETS / "sort.js").read_text("utf-8")
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return {
        "style": Markup((_ASSETS / "report.css").read_text("utf-8")),  # noqa: S704  # our own files
        "script": Markup(script),  # noqa: S704
        "script_hash": Markup(f"sha256-{digest}"),  # noqa: S704
    }


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
    slots = "–" if summary.pool_slots is None else str(summary.pool_slots)
    budget = None if background.config is None else background.config.budget
    gpu_s = duration(sum(t.gpu_seconds for t in summary.trials))
    facts = [
        (summary.state, "state"),
        (background.policy or "unknown", "policy"),
        (str(len(summary.trials)), f"trials: {ends}" if ends else "trials"),
        _wall_time(summary, None if budget is None else budget.wall_clock_seconds),
        (_of(gpu_s, None if budget is None else budget.gpu_seconds), "GPU time"),
        (str(sum(t.preemptions for t in summary.trials)), "preemptions"),
        (f"{summary.max_slots_used} of {slots}", "slots used at most"),
    ]
    if summary.deadline is not None:
        facts.append((summary.deadline.words, "deadline"))
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


def _wall_time(summary: SweepSummary, limit_s: float | None) -> tuple[str, str]:
    """Return the wall time, with its budget unless a continuation has restarted that."""
    if not summary.ended_seconds:
        return _of(duration(summary.wall_seconds), limit_s), "wall time"
    gap = duration(summary.ended_seconds)
    return duration(summary.active_seconds), f"wall time, without {gap} after an end"


def _of(spent: str, limit_s: float | None) -> str:
    return spent if limit_s is None else f"{spent} of {duration(limit_s)}"


def _best(summary: SweepSummary) -> dict[str, Any] | None:
    best = summary.best
    if best is None:
        return None
    config = config_text(best.config or {})
    value = format_cell(best.best)
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
    except Exception as error:  # a page without the paragraph is better than none
        log.warning("%s.", _UNREADABLE, exc_info=True)
        return {"story": (), "no_story": f"{_UNREADABLE} ({type(error).__name__}: {error})."}


def _compared(summary: SweepSummary, background: Background) -> dict[str, Any] | None:
    """Return the table that compares the sweep with its replays; None without any."""
    if not background.alternatives:
        return None
    measured = (
        background.time_to_best_s,
        sum(t.gpu_seconds for t in summary.trials),
        float(sum(t.preemptions for t in summary.trials)),
        summary.active_seconds,
    )
    ranges = (None if value is None else (value, value) for value in measured)
    table_rows = [(f"{background.policy or 'this sweep'}, as it ran", *map(number_range, ranges))]
    for a in background.alternatives:
        figures = (a.time_to_best_s, a.gpu_s, a.preemptions, a.makespan_s)
        table_rows.append((f"{a.policy}, replayed", *map(number_range, figures)))
    return {"header": _COMPARED, "rows": table_rows}


def _trials(summary: SweepSummary) -> list[dict[str, Any]]:
    best = summary.best
    names = [*FACTS, *(c.name for c in added_columns(summary)), *parameters(summary)]
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


def _cell(fact: str, value: object) -> TableCell:
    if fact == "state":
        return TableCell(str(value).replace("_", " "), str(value), str(value))
    text = f"{value:,.1f}" if fact == "gpu_seconds" else format_cell(value)
    if isinstance(value, float):
        return TableCell(text, repr(value) if isfinite(value) else "")
    return TableCell(text, "" if value is None else text)


def _endings(summary: SweepSummary, background: Background) -> list[dict[str, Any]]:
    """Return the reasons and last lines of the trials that did not finish."""
    endings = background.endings
    return [
        {
            "number": trial.number,
            "state": trial.state.replace("_", " "),
            "reason": endings[trial.number].reason,
            "tail": endings[trial.number].tail,
        }
        for trial in summary.trials
        if trial.state != "finished" and trial.number in endings
    ]


def write(
    folder: Path,
    summary: SweepSummary,
    curves: Mapping[int, CurvePoints],
    segments: Sequence[Segment],
    background: Background | None = None,
) -> tuple[Path, ...]:
    """Write the report into `folder`, creating it if missing; return the files.

    report.html (self-contained), curves.png, gpus.png, trials.csv, best.json (null when no trial
    has a value) and summary.json (the document that `hermes sweep run --json` prints). A file that
    cannot be written is logged and skipped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = summary.to_document()
    facts = background or Background()
    makers: dict[str, Callable[[], bytes]] = {
        "best.json": lambda: _json(document["best"]),
        "summary.json": lambda: _json(document),
        "trials.csv": lambda: csv_text(summary).encode(errors="replace"),
        "curves.png": lambda: png(learning_curves(summary, curves, segments)),
        "gpus.png": lambda: png(gpu_timeline(summary, segments)),
        PAGE: lambda: page(summary, curves, segments, facts).encode(errors="replace"),
    }
    written = []
    for name, make in makers.items():
        try:
            data = make()
        except Exception:  # one part that fails must not prevent the others
            log.warning("The report's %s could not be made.", name, exc_info=True)
            continue
        (folder / name).write_bytes(data)
        written.append(folder / name)
    return tuple(written)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="replace")

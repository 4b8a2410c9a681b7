"""The report's tables, as text and as CSV: the trials, and the nights of a schedule."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hermes_ops.core.amounts import duration, first_lines, shortened
from hermes_ops.core.summary import Night, SweepSummary, TrialSummary, course
from hermes_ops.core.usage import spreadsheet_text
from hermes_ops.report.background import Background

FACTS = ("number", "state", "best", "final", "steps", "segments", "preemptions", "gpu_seconds")
BOUNDS = "bounds"


def parameters(summary: SweepSummary) -> tuple[str, ...]:
    """Return the names of all parameters, in the order in which the configurations have them."""
    return tuple(dict.fromkeys(name for t in summary.trials for name in t.config or ()))


@dataclass(frozen=True, slots=True)
class AddedColumn:
    """A column of some sweeps only: its name in the CSV and its heading on the page.

    `value_of` returns a trial's value, None where there is none.
    """

    name: str
    heading: str
    value_of: Callable[[TrialSummary], object]


def _value(metric: str, which: str) -> Callable[[TrialSummary], object]:
    """Return a function for the `which` field of a metric's `MetricOutcome`."""
    return lambda trial: getattr(trial.metrics.get(metric), which, None)


def _bounds(trial: TrialSummary) -> str | None:
    return trial.bounds if trial.violates or trial.segments else None


def _size_columns(summary: SweepSummary) -> list[AddedColumn]:
    columns = []
    if any(trial.has_sizes for trial in summary.trials):
        columns.append(AddedColumn("gpus", "GPUs", lambda trial: course(trial.sizes) or None))
    if any(trial.batches for trial in summary.trials):
        columns.append(AddedColumn("batch", "batch", lambda trial: course(trial.batches) or None))
    return columns


def added_columns(summary: SweepSummary) -> tuple[AddedColumn, ...]:
    """Return the columns of the metrics besides the objective, none without them.

    Before them are the GPUs and batches of the trials' segments, where a trial has had several
    GPUs or a known batch.
    """
    columns = _size_columns(summary)
    for metric in summary.metrics:
        name = metric.name
        columns.append(AddedColumn(f"metric.{name}.last", name, _value(name, "last")))
        if metric.direction is not None:
            columns.append(AddedColumn(f"metric.{name}.best", f"best {name}", _value(name, "best")))
    if any(metric.is_bounded for metric in summary.metrics):
        columns.append(AddedColumn(BOUNDS, BOUNDS, _bounds))
    return tuple(columns)


def rows(summary: SweepSummary) -> Iterator[tuple[TrialSummary, list[object]]]:
    """Yield each trial with its cells: the facts, the columns of this sweep, the parameters.

    None stands where there is none.
    """
    names, columns = parameters(summary), added_columns(summary)
    for trial in summary.trials:
        config = trial.config or {}
        facts = [getattr(trial, fact) for fact in FACTS]
        yield (
            trial,
            [*facts, *(c.value_of(trial) for c in columns), *(config.get(n) for n in names)],
        )


def format_cell(value: object) -> str:
    """Format a value for people: four significant digits, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def settings_line(config: Mapping[str, Any], most: int = 20, longest: int = 80) -> str:
    """Return a configuration in one line: the first of many parameters, the start of long texts."""
    pairs = [f"{name}={shortened(format_cell(value), longest)}" for name, value in config.items()]
    return ", ".join(first_lines(pairs, most, "and {} more"))


def csv_text(summary: SweepSummary) -> str:
    """Return the table as CSV, numbers in full, a header line first.

    Text that a spreadsheet would read as a formula gets an apostrophe in front.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = (column.name for column in added_columns(summary))
    header = [*FACTS, *columns, *(f"config.{name}" for name in parameters(summary))]
    writer.writerow([_cell(h) for h in header])
    writer.writerows([_cell(c) for c in cells] for _, cells in rows(summary))
    return out.getvalue()


def _cell(value: object) -> object:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "" if value is None else "NaN"
    if isinstance(value, str):
        return spreadsheet_text(value)
    return value if isinstance(value, int | float) else json.dumps(value, default=str)


def nights(summary: SweepSummary, background: Background) -> list[dict[str, Any]]:
    """Return rows for this sweep and the nights before it, newest first; empty without those.

    The best of all is marked; of two equal ones the earlier. A night with another objective is not
    compared: its value has that objective's name.
    """
    if not background.nights:
        return []
    every = [_tonight(summary, background), *background.nights]
    sign = -1.0 if summary.direction == "maximize" else 1.0
    alike = [n.objective in ("", summary.objective) for n in every]
    valued = [(n.best, place) for place, n in enumerate(every) if alike[place]]
    able = [(sign * value, -place) for value, place in valued if value is not None]
    best = -min(able)[1] if able else None
    return [_row(n, alike[place]) | {"is_best": place == best} for place, n in enumerate(every)]


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


def _row(night: Night, is_alike: bool) -> dict[str, Any]:
    best = "–" if night.best is None else format_cell(night.best)
    return {
        "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime(night.started_s)),
        "best": best if is_alike or night.best is None else f"{best} ({night.objective})",
        "gpu_time": "–" if night.gpu_seconds is None else duration(night.gpu_seconds),
        "state": night.state.replace("_", " "),
        "config": config_text(night.config),
    }


def config_text(config: Mapping[str, Any]) -> str:
    """Return a configuration for people: `rate = 0.1, units = 32`."""
    return ", ".join(f"{name} = {format_cell(value)}" for name, value in config.items())

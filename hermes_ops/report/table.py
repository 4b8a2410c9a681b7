"""The table of trials: its columns and cells, as text and as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hermes_ops.core.summary import SweepSummary, TrialSummary

FACTS = (
    "number",
    "state",
    "best",
    "final",
    "steps",
    "segments",
    "preemptions",
    "gpu_seconds",
)
BOUNDS = "bounds"
_FORMULA_BEGINS = ("=", "+", "-", "@", "\t", "\r")


def parameters(summary: SweepSummary) -> tuple[str, ...]:
    """Return the names of all parameters, in the order in which the configurations have them."""
    return tuple(dict.fromkeys(name for t in summary.trials for name in t.config or ()))


@dataclass(frozen=True, slots=True)
class Column:
    """A column of metrics beside the objective: its name in the CSV and its heading on the page.

    `of` is a trial's cell, None where there is none.
    """

    name: str
    heading: str
    of: Callable[[TrialSummary], object]


def _value(metric: str, which: str) -> Callable[[TrialSummary], object]:
    """The cell of a metric: `which` field of `Seen`."""
    return lambda trial: getattr(trial.metrics.get(metric), which, None)


def _bounds(trial: TrialSummary) -> str | None:
    return trial.bounds if trial.violates or trial.segments else None


def beside(summary: SweepSummary) -> tuple[Column, ...]:
    """Return the columns of the metrics beside the objective, none without them."""
    found = []
    for metric in summary.metrics:
        name = metric.name
        found.append(Column(f"metric.{name}.last", name, _value(name, "last")))
        if metric.direction is not None:
            found.append(Column(f"metric.{name}.best", f"best {name}", _value(name, "best")))
    if any(metric.is_bounded for metric in summary.metrics):
        found.append(Column(BOUNDS, BOUNDS, _bounds))
    return tuple(found)


def rows(summary: SweepSummary) -> Iterator[tuple[TrialSummary, list[object]]]:
    """Yield each trial with its cells: the facts, the metrics beside the objective, the parameters.

    None stands where there is none.
    """
    names, columns = parameters(summary), beside(summary)
    for trial in summary.trials:
        config = trial.config or {}
        facts = [getattr(trial, fact) for fact in FACTS]
        yield trial, [*facts, *(c.of(trial) for c in columns), *(config.get(n) for n in names)]


def shown(value: object) -> str:
    """Return a cell for people: four significant digits, a dash for nothing."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def csv_text(summary: SweepSummary) -> str:
    """Return the table as CSV, numbers in full, a header line first.

    Text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = (column.name for column in beside(summary))
    header = [*FACTS, *columns, *(f"config.{name}" for name in parameters(summary))]
    writer.writerow([_cell(h) for h in header])
    writer.writerows([_cell(c) for c in cells] for _, cells in rows(summary))
    return out.getvalue()


def _cell(value: object) -> object:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "" if value is None else "NaN"
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA_BEGINS) else value
    return value if isinstance(value, int | float) else json.dumps(value, default=str)

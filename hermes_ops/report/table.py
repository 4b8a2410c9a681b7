"""The table of trials: its columns and cells, as text and as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator

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
_FORMULA_BEGINS = ("=", "+", "-", "@", "\t", "\r")


def parameters(summary: SweepSummary) -> tuple[str, ...]:
    """Return the names of all parameters, in the order in which the configurations have them."""
    return tuple(dict.fromkeys(name for t in summary.trials for name in t.config or ()))


def rows(summary: SweepSummary) -> Iterator[tuple[TrialSummary, list[object]]]:
    """Yield each trial with its cells: the facts, then the parameters; None where there is none."""
    names = parameters(summary)
    for trial in summary.trials:
        config = trial.config or {}
        yield trial, [getattr(trial, f) for f in FACTS] + [config.get(n) for n in names]


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
    header = [*FACTS, *(f"config.{name}" for name in parameters(summary))]
    writer.writerow([_cell(h) for h in header])
    writer.writerows([_cell(c) for c in cells] for _, cells in rows(summary))
    return out.getvalue()


def _cell(value: object) -> object:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "" if value is None else "NaN"
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA_BEGINS) else value
    return value if isinstance(value, int | float) else json.dumps(value, default=str)

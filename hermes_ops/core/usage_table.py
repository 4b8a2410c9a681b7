"""The figures of `hermes usage` as columns: the same for a terminal, a page and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hermes_ops.core.usage import Figures

COLUMNS = {
    "trials": "trials", "gpu_seconds": "GPU-s", "trained_gpu_seconds": "trained",
    "lost_gpu_seconds": "lost", "borrowed_gpu_seconds": "borrowed", "lent_gpu_seconds": "lent",
    "waiting_seconds": "waiting, s", "preemptions": "preempted", "preemptions_caused": "caused",
}  # fmt: skip
"""The figures of a row, and their heads in the table."""
WHOLE_POOL_COLUMNS = ("borrowed_gpu_seconds", "lent_gpu_seconds", "preemptions_caused")
"""The figures that follow from the sweeps of all users together."""
PRICE = {"price": "price"}
UNKNOWN = {"user": "unknown", "team": "none"}


_FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r")


def spreadsheet_text(text: str) -> str:
    """Return a text for a CSV cell; an apostrophe keeps spreadsheets from reading a formula."""
    return f"'{text}" if text.startswith(_FORMULA_PREFIXES) else text


def csv_text(by: str, rows: Sequence[Figures], columns: Mapping[str, str]) -> str:
    """Return the rows as CSV, with a header line.

    A key that a spreadsheet would read as a formula gets an apostrophe in front.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((by, *columns))
    for row in rows:
        writer.writerow((spreadsheet_text(str(row["key"])), *(row[name] for name in columns)))
    return out.getvalue()


def key_text(by: str, row: Figures) -> str:
    """Return the key of a row for people: a word where the user or the team is not known."""
    return str(row["key"]) or UNKNOWN.get(by, "")


def number_text(name: str, value: str | float | None) -> str:
    """Return a figure as text: prices with cents, an empty text for None."""
    if value is None or isinstance(value, str):
        return ""
    return f"{value:,.2f}" if name in PRICE else f"{value:,.0f}"

"""The report's folder: a page that needs nothing else, and its parts as files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hermes_ops.core.summary import CurvePoints, Segment, SweepSummary
from hermes_ops.report.background import Background
from hermes_ops.report.canvas import png
from hermes_ops.report.figures import gpu_timeline, learning_curves
from hermes_ops.report.page import page
from hermes_ops.report.table import csv_text

log = logging.getLogger(__name__)

PAGE = "report.html"


def write(
    folder: Path,
    summary: SweepSummary,
    curves: Mapping[int, CurvePoints],
    segments: Sequence[Segment],
    background: Background | None = None,
) -> tuple[Path, ...]:
    """Write the report into `folder`, made if missing; return the files.

    report.html (self-contained), curves.png, gpus.png, trials.csv, best.json (null when no trial
    has a value) and summary.json (the document that `hermes sweep run --json` prints). A file that
    cannot be made is left out, with a line in the log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = summary.to_document()
    told = background or Background()
    makers: dict[str, Callable[[], bytes]] = {
        "best.json": lambda: _json(document["best"]),
        "summary.json": lambda: _json(document),
        "trials.csv": lambda: csv_text(summary).encode(errors="replace"),
        "curves.png": lambda: png(learning_curves(summary, curves, segments)),
        "gpus.png": lambda: png(gpu_timeline(summary, segments)),
        PAGE: lambda: page(summary, curves, segments, told).encode(errors="replace"),
    }
    written = []
    for name, make in makers.items():
        try:
            data = make()
        except Exception:  # one part that fails must not take the others along
            log.warning("The report's %s could not be made.", name, exc_info=True)
            continue
        (folder / name).write_bytes(data)
        written.append(folder / name)
    return tuple(written)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="replace")

"""The report's folder: a page that needs nothing else, and its parts as files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from hermes_ops.core.summary import CurvePoints, Segment, SweepSummary
from hermes_ops.report.figures import gpu_timeline, learning_curves
from hermes_ops.report.page import page
from hermes_ops.report.table import csv_text


def write(
    folder: Path,
    summary: SweepSummary,
    curves: Mapping[int, CurvePoints],
    segments: Sequence[Segment],
) -> tuple[Path, ...]:
    """Write the report into `folder`, made if missing; return the files.

    index.html (self-contained), curves.png, gpus.png, trials.csv, best.json (null when no trial
    has a value) and summary.json (the document that `hermes sweep run --json` prints).
    """
    folder.mkdir(parents=True, exist_ok=True)
    curves_png = learning_curves(summary, curves, segments)
    gpus_png = gpu_timeline(summary, segments)
    document = summary.to_document()
    files = {
        "curves.png": curves_png,
        "gpus.png": gpus_png,
        "trials.csv": csv_text(summary).encode(errors="replace"),
        "best.json": _json(document["best"]),
        "summary.json": _json(document),
        "index.html": page(summary, curves_png, gpus_png).encode(errors="replace"),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return tuple(folder / name for name in files)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="replace")

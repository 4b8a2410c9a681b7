"""What a sweep's own page reads: its run in MLflow, its progress, its decisions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hermes_ops.airflow.control.decisions import read_before
from hermes_ops.airflow.metadata import PastRun
from hermes_ops.airflow.page.history import SweepRow, sweep_row
from hermes_ops.airflow.page.progress import Now, Progress, read_progress
from hermes_ops.airflow.page.sight import DEFAULT_POOL, Look, Sight
from hermes_ops.airflow.records import FAILURES_TAG, SweepRecord, decode
from hermes_ops.tracking import SweepRef, SweepRun, Tracker
from hermes_ops.tracking.runs import SWEEP
from hermes_ops.tracking.summary import WHY_TAGS

MOST_CHUNKS = 5
"""Artifacts with decisions that are read, the newest, where this machine has no file of them."""

Decisions = tuple[list[dict[str, Any]], int]


@dataclass(frozen=True, slots=True)
class SweepLook:
    """A sweep now; `progress` is None before it is planned and where MLflow does not answer.

    `ended_because` says why it ended before its last trial, `failures` why trials failed.
    """

    row: SweepRow
    progress: Progress | None
    ended_because: str = ""
    failures: tuple[str, ...] = ()


def look_at_sweep(sight: Sight, past: PastRun) -> SweepLook:
    """Read the sweep, from what was read a moment ago as far as possible."""
    record = decode(SweepRecord, past.run.sweep)
    if record is None:
        return SweepLook(sweep_row(sight, past, None), None)
    ref = SweepRef(past.run.sweep_id, record.experiment_id, record.parent_run_id)
    run = sight.from_mlflow(lambda tracker: _run(tracker, ref))
    row = sweep_row(sight, past, run)
    objective = record.config.get("objective", {})
    asked = (str(objective.get("metric", "")), str(objective.get("direction", "")))
    pool = str(record.config.get("pool", DEFAULT_POOL))
    look = sight.look(pool) if row.runs else None
    now = Now.from_book(row.state, sight.clock(), look.books.get(row.sweep) if look else None)
    progress = sight.from_mlflow(
        lambda tracker: sight.progress.get(
            row.sweep, lambda: read_progress(tracker, ref, asked, now)
        )
    )
    tags = run.tags if run is not None else {}
    because = next((tags[tag] for tag in WHY_TAGS if tags.get(tag)), "")
    return SweepLook(row, progress, because, _failures(tags, look))


def decisions_of(sight: Sight, past: PastRun, before: int | None) -> Decisions:
    """The newest decisions of a sweep before that byte of its file, and where those begin.

    Of a sweep whose file another machine has, the newest are MLflow's.
    """
    found = read_before(past.run.sweep_id, before)
    record = decode(SweepRecord, past.run.sweep)
    if found[0] or before is not None or record is None:
        return found
    parent = record.parent_run_id
    return sight.from_mlflow(lambda tracker: _uploaded(tracker, parent)) or ([], 0)


def _run(tracker: Tracker, ref: SweepRef) -> SweepRun | None:
    return tracker.overview.sweeps([ref.experiment_id], [ref.parent_run_id]).get(ref.parent_run_id)


def _uploaded(tracker: Tracker, parent_run_id: str) -> Decisions:
    found = []
    for path in tracker.artifacts.files(parent_run_id, "decisions")[-MOST_CHUNKS:]:
        for line in tracker.artifacts.read(parent_run_id, path).splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found, 0


def _failures(tags: Mapping[str, str], look: Look | None) -> tuple[str, ...]:
    """Why trials failed: of a sweep that runs the controller knows it, of others MLflow."""
    live = look.view.get("sweeps", {}).get(tags.get(SWEEP, ""), {}) if look is not None else {}
    return tuple(live.get("failures") or tags.get(FAILURES_TAG, "").splitlines())

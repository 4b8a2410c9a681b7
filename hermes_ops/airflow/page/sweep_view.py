"""One sweep's page: its run in MLflow, its progress, its decisions, as plain rows for a reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_ops.airflow.control.decisions import read_before
from hermes_ops.airflow.metadata_rows import PastRun
from hermes_ops.airflow.page.access import Reader
from hermes_ops.airflow.page.history import SweepRow, sweep_row
from hermes_ops.airflow.page.pool_view import PageSources, PoolView, decision_row
from hermes_ops.airflow.page.progress import LiveSweep, SweepProgress, read_progress
from hermes_ops.airflow.records import FAILURES_TAG, SweepRecord, decode
from hermes_ops.airflow.sweep.source import DEFAULT_POOL
from hermes_ops.core.amounts import duration, figure
from hermes_ops.core.summary import TrialSummary, course
from hermes_ops.report.table import settings_line
from hermes_ops.tracking import SweepRef, SweepRun, Tracker
from hermes_ops.tracking.artifacts import json_objects
from hermes_ops.tracking.runs import SWEEP, WHY_TAGS
from hermes_ops.tracking.summary import deadline_result

MOST_CHUNKS = 5
"""The newest artifacts with decisions that are read where this machine has no log of them."""

Decisions = tuple[list[dict[str, Any]], int]


@dataclass(frozen=True, slots=True)
class SweepView:
    """A sweep now; `progress` is None before it is planned and where MLflow does not answer.

    `ended_because` says why it ended before its last trial, `failures` why trials failed.
    `deadline` is the time of it, and after the end whether it was kept; empty without one.
    """

    row: SweepRow
    progress: SweepProgress | None
    ended_because: str = ""
    failures: tuple[str, ...] = ()
    deadline: str = ""


def read_sweep_view(sources: PageSources, past: PastRun) -> SweepView:
    """Read the sweep, from caches as far as possible."""
    record = decode(SweepRecord, past.run.sweep)
    if record is None:
        return SweepView(sweep_row(sources, past, None), None)
    ref = SweepRef(past.run.sweep_id, record.experiment_id, record.parent_run_id)
    run = sources.from_mlflow(lambda tracker: _run(tracker, ref))
    row = sweep_row(sources, past, run)
    objective = record.config.get("objective", {})
    asked = (str(objective.get("metric", "")), str(objective.get("direction", "")))
    pool = str(record.config.get("pool", DEFAULT_POOL))
    pool_view = sources.pool_view(pool) if row.is_running else None
    now = LiveSweep.from_state(
        row.state, sources.clock(), pool_view.sweep_states.get(row.sweep) if pool_view else None
    )
    progress = sources.from_mlflow(
        lambda tracker: sources.progress.get(
            row.sweep, lambda: read_progress(tracker, ref, asked, now)
        )
    )
    tags = run.tags if run is not None else {}
    because = next((tags[tag] for tag in WHY_TAGS if tags.get(tag)), "")
    deadline = deadline_result(run) if run is not None else None
    return SweepView(
        row,
        progress,
        because,
        _failures(tags, pool_view),
        "" if deadline is None else deadline.words,
    )


def pool_of(past: PastRun | None) -> str:
    """Return the pool of a sweep; empty before it is planned."""
    record = None if past is None else decode(SweepRecord, past.run.sweep)
    return "" if record is None else str(record.config.get("pool", DEFAULT_POOL))


def decisions_of(sources: PageSources, past: PastRun, before: int | None) -> Decisions:
    """Return the newest decisions of a sweep before that byte of its log, and where they begin.

    If another machine has the log, they are the newest in MLflow.
    """
    logged = read_before(past.run.sweep_id, before)
    record = decode(SweepRecord, past.run.sweep)
    if logged[0] or before is not None or record is None:
        return logged
    parent = record.parent_run_id
    return sources.from_mlflow(lambda tracker: _uploaded(tracker, parent)) or ([], 0)


def _run(tracker: Tracker, ref: SweepRef) -> SweepRun | None:
    return tracker.overview.sweeps([ref.experiment_id], [ref.parent_run_id]).get(ref.parent_run_id)


def _uploaded(tracker: Tracker, parent_run_id: str) -> Decisions:
    decisions: list[dict[str, Any]] = []
    for path in tracker.artifacts.files(parent_run_id, "decisions")[-MOST_CHUNKS:]:
        decisions += json_objects(tracker.artifacts.fetch(parent_run_id, path))
    return decisions, 0


def _failures(tags: Mapping[str, str], pool_view: PoolView | None) -> tuple[str, ...]:
    """Return why trials failed: of a running sweep from the controller's view, else MLflow."""
    live = (
        pool_view.view.get("sweeps", {}).get(tags.get(SWEEP, ""), {})
        if pool_view is not None
        else {}
    )
    return tuple(live.get("failures") or tags.get(FAILURES_TAG, "").splitlines())


TRIAL_ROWS = 100
PARAMETERS = 12
REASON_CHARACTERS = 300
VALUE_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class TrialLine:
    """One trial in the table of a sweep, as text."""

    trial: str
    number: int
    state: str
    is_best: bool
    best: str
    final: str
    step: int
    preemptions: int
    gpu_time: str
    sizes: str  # its GPUs in the order of its segments; empty for a trial of one
    parameters: str
    reason: str


@dataclass(frozen=True, slots=True)
class SweepContents:
    """Everything that a sweep's page shows; `progress` is None where MLflow did not answer."""

    row: SweepRow
    ended_because: str
    deadline: str
    failures: Sequence[str]
    best: str
    states: str
    gpu_time: str
    progress: SweepProgress | None
    trials: Sequence[TrialLine]
    page: int
    has_more: bool
    decisions: Sequence[Mapping[str, Any]]
    older: int  # the place in the file at which the decisions before these end; 0 without any


def sweep_contents(
    sweep_view: SweepView,
    *,
    page: int,
    decisions: tuple[Sequence[Mapping[str, Any]], int],
    reader: Reader,
) -> SweepContents:
    """Return the page of a sweep for a reader, with that page of its trials, counted from 1."""
    row, progress, (entries, older) = sweep_view.row, sweep_view.progress, decisions
    trials = _best_first(progress) if progress is not None else []
    begin = (page - 1) * TRIAL_ROWS
    best = progress.summary.best if progress is not None else None
    return SweepContents(
        row=row,
        ended_because=reader.redacted(sweep_view.ended_because),
        deadline=sweep_view.deadline,
        failures=[reader.redacted(line) for line in sweep_view.failures],
        best=_best(best),
        states=_states(trials, row.trials - len(trials)),
        gpu_time=duration(sum(t.gpu_seconds for t in trials)),
        progress=progress,
        trials=[_line(row.sweep, t, best) for t in trials[begin : begin + TRIAL_ROWS]],
        page=page,
        has_more=len(trials) > begin + TRIAL_ROWS,
        decisions=[decision_row(d, reader) for d in reversed(entries)],
        older=older,
    )


def _best_first(progress: SweepProgress) -> list[TrialSummary]:
    summary = progress.summary
    sign = -1.0 if summary.direction == "maximize" else 1.0

    def order(trial: TrialSummary) -> tuple[bool, float, int]:
        value = trial.best if trial.can_be_best else None
        return (value is None, sign * (value or 0.0), trial.number)

    return sorted(summary.trials, key=order)


def _line(sweep: str, trial: TrialSummary, best: TrialSummary | None) -> TrialLine:
    return TrialLine(
        trial=f"{sweep}/{trial.number}",
        number=trial.number,
        state=trial.state,
        is_best=best is not None and trial.number == best.number,
        best=_value(trial.best),
        final=_value(trial.final),
        step=trial.steps,
        preemptions=trial.preemptions,
        gpu_time=duration(trial.gpu_seconds),
        sizes=course(trial.sizes) if trial.has_sizes else "",
        parameters=_parameters(trial.config or {}),
        reason=trial.reason[:REASON_CHARACTERS],
    )


def _value(value: float | None) -> str:
    return "" if value is None else figure(value, 4)


def _parameters(config: Mapping[str, Any]) -> str:
    return settings_line(config, PARAMETERS, VALUE_CHARACTERS)


def _best(best: TrialSummary | None) -> str:
    if best is None:
        return ""
    return f"trial {best.number}: {_value(best.best)} with {_parameters(best.config or {})}"


def _states(trials: Sequence[TrialSummary], unopened: int) -> str:
    counts = Counter(t.state.replace("_", " ") for t in trials)
    if trials and unopened > 0:
        counts["never begun"] += unopened
    return ", ".join(f"{count} {state}" for state, count in counts.most_common())

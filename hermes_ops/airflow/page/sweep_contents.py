"""What a sweep's own page shows: pure, given its row, its progress and its decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_ops.airflow.page.access import Reader
from hermes_ops.airflow.page.contents import decision_row
from hermes_ops.airflow.page.history import SweepRow
from hermes_ops.airflow.page.progress import Progress
from hermes_ops.airflow.page.sweep_sight import SweepLook
from hermes_ops.core.amounts import duration, figure
from hermes_ops.core.summary import TrialSummary
from hermes_ops.report.table import shown

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
    parameters: str
    reason: str


@dataclass(frozen=True, slots=True)
class SweepContents:
    """Everything that a sweep's page shows; `progress` is None where MLflow did not answer."""

    row: SweepRow
    ended_because: str
    failures: Sequence[str]
    best: str
    states: str
    gpu_time: str
    progress: Progress | None
    trials: Sequence[TrialLine]
    page: int
    has_more: bool
    decisions: Sequence[Mapping[str, Any]]
    older: int  # the place in the file at which the decisions before these end; 0 without any


def sweep_contents(
    look: SweepLook,
    *,
    page: int,
    decisions: tuple[Sequence[Mapping[str, Any]], int],
    reader: Reader,
) -> SweepContents:
    """The page of a sweep for one reader, with that page of its trials, counted from 1."""
    row, progress, (entries, older) = look.row, look.progress, decisions
    trials = _best_first(progress) if progress is not None else []
    begin = (page - 1) * TRIAL_ROWS
    best = progress.summary.best if progress is not None else None
    return SweepContents(
        row=row,
        ended_because=reader.veiled(look.ended_because),
        failures=[reader.veiled(line) for line in look.failures],
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


def _best_first(progress: Progress) -> list[TrialSummary]:
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
        parameters=_parameters(trial.config or {}),
        reason=trial.reason[:REASON_CHARACTERS],
    )


def _value(value: float | None) -> str:
    return "" if value is None else figure(value, 4)


def _parameters(config: Mapping[str, Any]) -> str:
    """The first parameters in one line, long values cut."""
    pairs = [f"{name}={_cut(shown(value))}" for name, value in list(config.items())[:PARAMETERS]]
    rest = len(config) - PARAMETERS
    return ", ".join([*pairs, *([f"and {rest} more"] if rest > 0 else [])])


def _cut(text: str) -> str:
    return text if len(text) <= VALUE_CHARACTERS else f"{text[: VALUE_CHARACTERS - 1]}…"


def _best(best: TrialSummary | None) -> str:
    if best is None:
        return ""
    return f"trial {best.number}: {_value(best.best)} with {_parameters(best.config or {})}"


def _states(trials: Sequence[TrialSummary], unopened: int) -> str:
    counts = Counter(t.state.replace("_", " ") for t in trials)
    if trials and unopened > 0:
        counts["never begun"] += unopened
    return ", ".join(f"{count} {state}" for state, count in counts.most_common())

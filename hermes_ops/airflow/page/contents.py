"""What the page shows of a pool, as plain rows: pure, given a look and who reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hermes_ops.airflow.control.books import Book
from hermes_ops.airflow.control.pool import Trial, job_id
from hermes_ops.airflow.explaining import UNDECIDED, short
from hermes_ops.airflow.page.access import UNSEEN, Reader
from hermes_ops.airflow.page.sight import Look
from hermes_ops.airflow.problems import problem_lines, trouble_line
from hermes_ops.core.model import QUEUED_PHASES

QUEUE_ROWS = 100
DECISION_ROWS = 30
OLD_VIEW_S = 10.0
"""A controller that lives writes its view about each second."""


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One trial in a table; `trial` is "" for one that the reader may not see.

    `gpu` is None for a trial that waits; `since_s`: of its segment, its grant or its waiting.
    """

    trial: str
    name: str
    sweep: str
    state: str
    gpu: int | None = None
    since_s: float = 0.0
    rank: int | None = None
    step: str = ""
    value: str = ""
    preemptions: int = 0
    score: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PoolContents:
    """Everything that the pool's page shows."""

    slots: int | None
    foreign: int
    policy: str
    age_s: float | None  # of the controller's view; None without one
    holders: Sequence[TrialRow]
    free: Sequence[int]
    queue: Sequence[TrialRow]
    queued: int
    sweeps: Sequence[tuple[str, Mapping[str, Any]]]
    closing: Mapping[str, str]  # why sweeps end that are about to
    unseen_sweeps: int
    decisions: Sequence[Mapping[str, Any]]
    problems: Sequence[str] = ()  # rounds that fail, and what fails of sweeps that are seen

    @property
    def stale(self) -> bool:
        """True when no controller seems to be at work."""
        return self.age_s is None or self.age_s > OLD_VIEW_S


def contents(look: Look, reader: Reader, decisions: Iterable[Mapping[str, Any]]) -> PoolContents:
    """The page of a pool for one reader; of sweeps that they may not see only that they are."""
    held = sorted(_holders(look, reader), key=lambda r: (r.gpu or 0, r.state != "stopping"))
    slots = look.row.slots if look.row else None
    taken = {row.gpu for row in held}
    queue = sorted(_queue(look, reader), key=lambda r: (r.rank is None, r.rank or 0))
    seen = [(s, b) for s, b in look.books.items() if reader.reads_dag(b.plan.run.dag_id)]
    age_s = max(0.0, look.time_s - look.view["time_s"]) if look.view else None
    return PoolContents(
        slots=slots,
        foreign=look.row.foreign_slots if look.row else 0,
        policy=str(look.view.get("policy", "")),
        age_s=age_s,
        holders=held,
        free=[gpu for gpu in range(slots or 0) if gpu not in taken],
        queue=queue[:QUEUE_ROWS],
        queued=len(queue),
        sweeps=[(s, _sweep(b)) for s, b in seen],
        closing={s: b.close.reason for s, b in seen if b.close},
        unseen_sweeps=len(look.books) - len(seen),
        decisions=last_decisions(decisions, reader),
        problems=_problems(look.view, [sweep for sweep, _ in seen]),
    )


def _problems(view: Mapping[str, Any], sweeps: Iterable[str]) -> list[str]:
    """Rounds that fail, and the steps that fail of these sweeps, each once."""
    lines = (line for sweep in sweeps for line in problem_lines(view, sweep))
    return [line for line in dict.fromkeys([trouble_line(view), *lines]) if line]


def last_decisions(decisions: Iterable[Mapping[str, Any]], reader: Reader) -> list[dict[str, Any]]:
    """The newest decisions first, their reasons without the names of what may not be seen."""
    newest = sorted(decisions, key=lambda d: float(d["time_s"]), reverse=True)
    return [decision_row(d, reader) for d in newest[:DECISION_ROWS]]


def decision_row(decision: Mapping[str, Any], reader: Reader) -> dict[str, Any]:
    """One decision of a log, as it is shown."""
    return {
        "time_s": float(decision["time_s"]),
        "trial": f"{decision['sweep']}/{decision['trial']}",
        "action": decision["action"],
        "gpus": ", ".join(map(str, decision["gpus"])),
        "policy": decision.get("policy", ""),
        "reason": reader.veiled(decision["reason"]),
        "score": score(decision["terms"]),
        "would_change": reader.veiled(decision.get("would_change") or ""),
    }


def score(terms: Mapping[str, Any]) -> str:
    """The terms of a score in one line."""
    return ", ".join(f"{name} {short(value)}" for name, value in terms.items())


def _holders(look: Look, reader: Reader) -> Iterator[TrialRow]:
    for book, trial in _trials(look):
        if trial.lease is not None and (trial.active or trial.under_way):
            state = "stopping" if trial.told or trial.lease.revoked else trial.phase.value
            since_s = trial.lease.granted_s
            if trial.under_way and trial.segment is not None:
                since_s = trial.segment.started_s
            row = _row(look, reader, book, trial)
            for gpu in trial.lease.gpus:
                yield replace(row, state=state, gpu=gpu, since_s=since_s)


def _queue(look: Look, reader: Reader) -> Iterator[TrialRow]:
    for book, trial in _trials(look):
        if trial.phase in QUEUED_PHASES:
            ended_s = trial.segment.ended_s if trial.segment is not None else None
            since_s = ended_s or book.plan.facts.submitted_s
            yield replace(_row(look, reader, book, trial), since_s=since_s)


def _trials(look: Look) -> Iterator[tuple[Book, Trial]]:
    return ((book, trial) for book in look.books.values() for trial in book.trials)


def _row(look: Look, reader: Reader, book: Book, trial: Trial) -> TrialRow:
    """What the reader may know of the trial, but for its place in the table."""
    name = job_id(book.plan.facts.sweep, trial.number)
    state, total = trial.phase.value, book.plan.facts.total_steps
    job = look.jobs.get(name, {})
    if not reader.reads_dag(book.plan.run.dag_id):
        return TrialRow("", UNSEEN, "", state, rank=job.get("rank"))
    step = job.get("step", 0)
    return TrialRow(
        trial=name,
        name=f"trial {trial.number}",
        sweep=book.plan.facts.sweep,
        state=state,
        rank=job.get("rank"),
        step=f"{step} of {total}" if total else str(step),
        value="" if job.get("value") is None else short(job["value"]),
        preemptions=trial.segment.preemptions if trial.segment is not None else 0,
        score=score(job.get("terms", {})),
        reason=reader.veiled(job.get("reason") or UNDECIDED),
    )


def _sweep(book: Book) -> dict[str, Any]:
    return {
        "ended": sum(t.ended for t in book.trials),
        "open": book.open_trials,
        "trials": len(book.trials),
        "closing": book.close.reason if book.close else "",
    }

"""The pool as it stands now, for people: `HERMES_HOME/pool-<name>.json`, replaced atomically.

Nobody decides on it: it is a view for `hermes sweep watch` and `hermes explain`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from hermes_ops.airflow.control.books import Book
from hermes_ops.airflow.control.faults import Fault
from hermes_ops.airflow.control.pool import Trial, job_id
from hermes_ops.airflow.folders import home
from hermes_ops.airflow.records import OUTCOMES
from hermes_ops.core.failures import failure_lines
from hermes_ops.core.model import Job, JobId, Plan, Reason, Snapshot

MOST_TRIED_AGAIN = 3
"""Trials that failed and are tried again, of which the view says why."""


def view_path(pool: str, folder: Path | None = None) -> Path:
    """Where the view of a pool lies, in that state folder or in this process's own."""
    return (folder or home()) / f"pool-{pool}.json"


def publish(
    pool: str,
    snapshot: Snapshot,
    plan: Plan,
    books: Mapping[str, Book],
    policy: str,
    *,
    faults: Sequence[Fault] = (),
) -> None:
    """Write the view of this round."""
    order = {job: i + 1 for i, job in enumerate(plan.ranking)}
    ended = {job_id(s, t.number): _end_of(t) for s, b in books.items() for t in b.trials if t.ended}
    document = {
        "time_s": snapshot.time_s,
        "pid": os.getpid(),
        "policy": policy,
        "gpus": [g.index for g in snapshot.gpus],
        "sweeps": {s: _sweep(b) for s, b in books.items()},
        "jobs": [
            _job(j, _sign(books, j), plan.reasons.get(j.id), order.get(j.id)) | _final(j, ended)
            for j in snapshot.jobs
        ],
        "problems": [_problem(f) for f in faults],
    }
    _write(pool, document)


def publish_trouble(pool: str, trouble: Mapping[str, Any] | None) -> None:
    """Write into the view that rounds fail (`since_s`, `rounds`, `reason`), or that none does."""
    document = read_view(pool)
    if document is None:
        document = {"time_s": 0.0, "policy": "?", "gpus": [], "sweeps": {}, "jobs": []}
    if document.get("trouble") != trouble:
        _write(pool, {**document, "pid": os.getpid(), "trouble": trouble})


def _write(pool: str, document: Mapping[str, Any]) -> None:
    path = view_path(pool)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(document, separators=(",", ":")))
    os.replace(fresh, path)


def _problem(fault: Fault) -> dict[str, Any]:
    return {
        "sweep": fault.subject.sweep,
        "trial": fault.subject.trial,
        "step": fault.step,
        "reason": fault.reason,
        "since_s": fault.since_s,
        "tries": fault.tries,
    }


def read_view(pool: str, folder: Path | None = None) -> dict[str, Any] | None:
    """The newest view of a pool; None when no controller has written one."""
    try:
        value = json.loads(view_path(pool, folder).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


def _sweep(book: Book) -> dict[str, Any]:
    return {
        "trials": len(book.trials),
        "ended": sum(t.ended for t in book.trials),
        "open": book.open_trials,
        "closing": book.close.reason if book.close else None,
        "not_preemptible": dict(_not_preemptible(book)),
        "advice": {
            str(t.number): t.segment.advice
            for t in book.trials
            if t.segment is not None and t.segment.advice and not t.ended
        },
        **({"failures": lines} if (lines := failures(book)) else {}),
    }


def failures(book: Book) -> list[str]:
    """Return why trials have failed, a line for each way, also those that are tried again."""
    begun = [(t, t.segment) for t in book.trials if t.segment is not None]
    lines = failure_lines((t.number, segment.reason) for t, segment in begun if t.failed)
    again = [(t, segment) for t, segment in begun if segment.failures and not t.ended]
    for trial, segment in again[:MOST_TRIED_AGAIN]:
        reason = segment.reason or "".join(segment.first_failure[:1])
        counted = f"failure {segment.failures}, {book.plan.config.trial.max_failures} are allowed"
        lines.append(f"Trial {trial.number} is tried again ({counted}): {reason}")
    return lines


def _not_preemptible(book: Book) -> Iterator[tuple[str, str]]:
    """Yield the trials that train and cannot be stopped, with the reason, once it is known.

    Before its first value a trial that writes checkpoints has none either.
    """
    last_step = book.plan.facts.total_steps or inf  # then it is about to end by itself
    for trial in book.trials:
        segment = trial.segment
        if trial.ended or segment is None or not segment.running:
            continue
        if not book.plan.facts.preemptible:
            yield str(trial.number), "trial.preemptible is false in the sweep file"
        elif not segment.preemptible and segment.steps_at_start < segment.step < last_step:
            yield str(trial.number), segment.preemptible_reason


def _end_of(trial: Trial) -> str:
    final = trial.segment.final if trial.segment is not None else None
    return final or OUTCOMES.get(trial.row.state or "", "failed")


def _final(job: Job, ended: Mapping[JobId, str]) -> dict[str, str]:
    """Return the final state of a job that has ended; nothing of any other."""
    return {"final": ended[job.id]} if job.id in ended else {}


def _sign(books: Mapping[str, Book], job: Job) -> float:
    book = books.get(job.sweep)
    return book.plan.facts.sign if book is not None else 1.0


def _job(job: Job, sign: float, reason: Reason | None, rank: int | None) -> dict[str, Any]:
    terms = {t.name: _number(t.value) for t in reason.terms} if reason else {}
    return {
        "id": job.id,
        "phase": job.phase.value,
        "gpus": list(job.gpus_held),
        "nodes": list(job.nodes),
        "step": job.last_step,
        "total_steps": job.total_steps,
        "value": _number(sign * job.curve[-1].loss) if job.curve else None,
        "preemptions": job.preemptions,
        "service_gpu_s": job.service_gpu_s,
        "rank": rank,
        "reason": reason.text if reason else "",
        "terms": terms,
        "runner_up": reason.runner_up if reason else None,
        "would_change": reason.would_change if reason else "",
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)

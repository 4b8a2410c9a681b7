"""When a sweep ends before its last trial: its target is reached, or its budget is spent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hermes_ops.airflow.control.books import FAILED, Book
from hermes_ops.airflow.records import REACHED_TAG, CloseRecord
from hermes_ops.core.secondary import Secondary


def due_end(book: Book, now_s: float) -> CloseRecord | None:
    """Why the sweep ends now, its target before its budget; None while it goes on, and after."""
    if book.trials and all(t.ended for t in book.trials):
        return None
    return reached_target(book, now_s) or spent_budget(book, now_s)


def reached_target(book: Book, now_s: float) -> CloseRecord | None:
    """Which trial has a value as good as the target and keeps every bound: the lowest number.

    A trial that failed has none: it leaves no model. The bounds are looked at in each round, so it
    does not matter which of a step's metrics is reported first.
    """
    config = book.plan.config
    objective = config.objective
    if objective.target is None:
        return None
    for number in sorted(t.number for t in book.trials if t.row.state != FAILED):
        last = book.last_beside(number)
        value = config.reached((v for _, v, _ in book.curves.get(number, ())), last)
        if value is not None:
            reason = (
                f"trial {number} reached objective.target {objective.target:g}: "
                f"{objective.metric} {value:g}{_kept(config.secondary, last)}"
            )
            return CloseRecord(reason, "stopped_early", now_s, REACHED_TAG)
    return None


def _kept(metrics: Iterable[Secondary], last: Mapping[str, float]) -> str:
    """The bounds that were kept with the target, in words; empty without any."""
    words = (f"{m.name} {last[m.name]:g} ({m.bound})" for m in metrics if m.is_bounded)
    return "".join(f", {word}" for word in words)


def spent_budget(book: Book, now_s: float) -> CloseRecord | None:
    """Why the sweep's budget ends it now; None while there is some left."""
    budget = book.plan.config.budget
    if budget.failed_trials is not None and book.failed_trials >= budget.failed_trials:
        return _spent(f"{book.failed_trials} trials failed, as many as budget.failed_trials", now_s)
    age_s = now_s - book.plan.facts.submitted_s
    if budget.wall_clock_seconds is not None and age_s >= budget.wall_clock_seconds:
        return _spent(f"budget.wall_clock_seconds ({budget.wall_clock_seconds:g}) is spent", now_s)
    if budget.gpu_seconds is not None and service_gpu_s(book, now_s) >= budget.gpu_seconds:
        return _spent(f"budget.gpu_seconds ({budget.gpu_seconds:g}) is spent", now_s)
    return None


def service_gpu_s(book: Book, now_s: float) -> float:
    """GPU-seconds of the sweep up to now, the segments under way included."""
    return sum(j.service_gpu_s for j in book.jobs(now_s))


def _spent(reason: str, now_s: float) -> CloseRecord:
    return CloseRecord(reason=reason, state="cancelled", at_s=now_s)

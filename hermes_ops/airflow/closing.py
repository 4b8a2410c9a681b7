"""When a sweep ends before its last trial: its budget is spent."""

from __future__ import annotations

from hermes_ops.airflow.books import Book
from hermes_ops.airflow.records import CloseRecord


def spent_budget(book: Book, now_s: float) -> CloseRecord | None:
    """Why the sweep's budget ends it now; None while there is some left, and after its end."""
    if book.trials and all(t.ended for t in book.trials):
        return None
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

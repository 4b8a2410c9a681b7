"""When a sweep ends before its last trial: its target is reached, its budget is spent, or its
first trials fail in the same way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite

from hermes_ops.airflow.control.books import Book
from hermes_ops.airflow.records import FAILED_TAG, REACHED_TAG, CloseRecord
from hermes_ops.core.failures import alike
from hermes_ops.core.secondary import Secondary

FIRST_FAILURES = 3
"""A sweep none of whose trials has begun ends when so many cannot be started."""


def due_end(book: Book, now_s: float) -> CloseRecord | None:
    """Why the sweep ends now, its target before its budget; None while it goes on, and after."""
    if (unstartable := cannot_start(book, now_s)) is not None:
        return unstartable
    if book.trials and all(t.ended for t in book.trials):
        return None
    return reached_target(book, now_s) or failed_alike(book, now_s) or spent_budget(book, now_s)


def cannot_start(book: Book, now_s: float) -> CloseRecord | None:
    """Why no trial of the sweep can be started; None while that is not so."""
    reasons = [t.segment.reason for t in book.trials if t.segment and t.was_given_up]
    if book.has_begun or not reasons or len(reasons) < min(FIRST_FAILURES, len(book.trials)):
        return None
    return CloseRecord(f"no trial could be started: {reasons[-1]}", "cancelled", now_s, FAILED_TAG)


def reached_target(book: Book, now_s: float) -> CloseRecord | None:
    """Which trial has a value as good as the target and keeps every bound: the lowest number.

    A trial that failed has none: it leaves no model. The bounds are looked at in each round, so it
    does not matter which of a step's metrics is reported first.
    """
    config = book.plan.config
    objective = config.objective
    if objective.target is None:
        return None
    for number in sorted(t.number for t in book.trials if not t.failed):
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


def failed_alike(book: Book, now_s: float) -> CloseRecord | None:
    """Why the sweep ends since its first trials failed in the same way; None while it goes on.

    All that have ended since it began, or was resumed, failed alike, and none has reported a value.
    A trial that has trained for longer than they did is waited for: it may go better.
    Trials that diverged show something else of the script, unless the sweep counts them as failed.
    """
    budget, began_s = book.plan.config.budget, book.plan.facts.submitted_s
    if budget.same_failures is None or not book.told or _has_values(book):
        return None
    ended = [(t, t.segment) for t in book.trials if t.segment is not None and t.ended]
    reasons = {
        t.number: segment.reason
        for t, segment in ended
        if segment.failures
        and (segment.ended_s or now_s) >= began_s
        and (budget.count_diverged or not t.diverged)
    }
    failed = [t for t, _ in ended if t.failed and t.number in reasons]
    if len(failed) < budget.same_failures or not all(t.failed for t, _ in ended):
        return None
    groups = alike((t.number, reasons[t.number]) for t in failed)
    longest_gpu_s = max(t.service_gpu_s(now_s) for t in failed)
    ahead = any(not t.ended and t.service_gpu_s(now_s) > longest_gpu_s for t in book.trials)
    if len(groups) != 1 or ahead:
        return None
    reason = f"the first {len(failed)} trials failed alike: {groups[0].reason}"
    return CloseRecord(reason, "cancelled", now_s, FAILED_TAG)


def _has_values(book: Book) -> bool:
    """Return whether a trial has reported its objective; its record may know it before MLflow."""
    if any(t.segment.step > 0 and not t.diverged for t in book.trials if t.segment is not None):
        return True
    return any(isfinite(v) for points in book.curves.values() for _, v, _ in points)


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

"""Why a sweep ends before its last trial, and the end of sweeps that no trial's task will end.

A sweep ends as its target is reached, its budget is spent, its deadline has passed, or its first
trials fail in the same way; where its nightly rule is `replace`, as a newer night's sweep begins.
The controller itself ends what is left of a sweep whose DAG run was deleted, or whose record is
unreadable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from math import isfinite
from typing import TYPE_CHECKING

from hermes_ops.airflow.client import ENDED_RUN, MOST_MARKED, TaskKey
from hermes_ops.airflow.control.trial_state import is_idle
from hermes_ops.airflow.records import (
    CLOSE_KEY,
    CLOSED_TAG,
    CONTINUED_TAG,
    FAILED_TAG,
    REACHED_TAG,
    REPLACED,
    CloseRecord,
    SweepRecord,
    decode,
    encode,
)
from hermes_ops.config.sections import Overlap
from hermes_ops.core.deadline import missed
from hermes_ops.core.secondary_metrics import SecondaryMetric
from hermes_ops.core.summary import alike
from hermes_ops.errors import HermesError
from hermes_ops.tracking.runs import RUN_STATUS

if TYPE_CHECKING:
    from hermes_ops.airflow.client import AirflowClient
    from hermes_ops.airflow.control.sweep_state import SweepSpec, SweepState
    from hermes_ops.airflow.metadata_rows import RunRow, TaskInstanceRow
    from hermes_ops.tracking import Tracker

log = logging.getLogger(__name__)

FIRST_FAILURES = 3
"""A sweep none of whose trials has begun ends when so many cannot be started."""


def due_end(sweep: SweepState, now_s: float) -> CloseRecord | None:
    """Return why the sweep ends now; None while it continues, and after.

    Its target is asked for before its budget.
    """
    if (unstartable := cannot_start(sweep, now_s)) is not None:
        return unstartable
    if sweep.trials and all(t.has_ended for t in sweep.trials):
        return None
    return (
        reached_target(sweep, now_s)
        or failed_alike(sweep, now_s)
        or passed_deadline(sweep, now_s)
        or spent_budget(sweep, now_s)
    )


def ends_by(sweep: SweepState, close: CloseRecord) -> bool:
    """Return whether the sweep ends by this record; its trials may all have ended before that."""
    if close.tag != CLOSED_TAG or not sweep.trials or not sweep.is_complete:
        return True
    return any(not t.has_ended or t.end_state == close.state for t in sweep.trials)


def cannot_start(sweep: SweepState, now_s: float) -> CloseRecord | None:
    """Return why no trial of the sweep can be started; None while that is not so.

    Those that were given up before the sweep was resumed or extended say nothing of it now.
    """
    began_s = sweep.spec.facts.submitted_s
    given_up = (t.segment for t in sweep.trials if t.segment and t.was_given_up)
    reasons = [s.reason for s in given_up if (s.ended_s or now_s) >= began_s]
    if sweep.has_begun or not reasons or len(reasons) < min(FIRST_FAILURES, len(sweep.trials)):
        return None
    return CloseRecord(f"no trial could be started: {reasons[-1]}", "cancelled", now_s, FAILED_TAG)


def reached_target(sweep: SweepState, now_s: float) -> CloseRecord | None:
    """Return that a trial has reached the target and keeps every bound; None while none has.

    Of several it names the one with the lowest number. A trial that failed has reached none, as it
    leaves no model. The bounds are looked at in each round, so it does not matter which of a step's
    metrics is reported first.
    """
    config = sweep.spec.config
    objective = config.objective
    if objective.target is None:
        return None
    for number in sorted(t.number for t in sweep.trials if not t.has_failed):
        last = sweep.last_constraint_values(number)
        value = config.reached((v for _, v, _ in sweep.curves.get(number, ())), last)
        if value is not None:
            reason = (
                f"trial {number} reached objective.target {objective.target:g}: "
                f"{objective.metric} {value:g}{_kept(config.secondary, last)}"
            )
            return CloseRecord(reason, "stopped_early", now_s, REACHED_TAG)
    return None


def _kept(metrics: Iterable[SecondaryMetric], last: Mapping[str, float]) -> str:
    """Return the bounds that were kept with the target, in words; empty without any."""
    words = (f"{m.name} {last[m.name]:g} ({m.bound})" for m in metrics if m.is_bounded)
    return "".join(f", {word}" for word in words)


def failed_alike(sweep: SweepState, now_s: float) -> CloseRecord | None:
    """Return why the sweep ends as its first trials failed in the same way; None if it continues.

    All that have ended since it began, or was resumed, failed alike, and none has reported a value.
    A trial that has trained for longer than they did is waited for: it may go better.
    Trials that diverged show something else of the script, unless the sweep counts them as failed.
    """
    budget, began_s = sweep.spec.config.budget, sweep.spec.facts.submitted_s
    if budget.same_failures is None or not sweep.curves_read or _has_values(sweep):
        return None
    ended = [(t, t.segment) for t in sweep.trials if t.segment is not None and t.has_ended]
    reasons = {
        t.number: segment.reason
        for t, segment in ended
        if segment.failures
        and (segment.ended_s or now_s) >= began_s
        and (budget.count_diverged or not t.has_diverged)
    }
    failed = [t for t, _ in ended if t.has_failed and t.number in reasons]
    if len(failed) < budget.same_failures or not all(t.has_failed for t, _ in ended):
        return None
    groups = alike((t.number, reasons[t.number]) for t in failed)
    longest_gpu_s = max(t.service_gpu_s(now_s) for t in failed)
    ahead = any(not t.has_ended and t.service_gpu_s(now_s) > longest_gpu_s for t in sweep.trials)
    if len(groups) != 1 or ahead:
        return None
    reason = f"the first {len(failed)} trials failed alike: {groups[0].reason}"
    return CloseRecord(reason, "cancelled", now_s, FAILED_TAG)


def _has_values(sweep: SweepState) -> bool:
    """Return whether a trial has reported its objective; its record may know it before MLflow."""
    if any(
        t.segment.step > 0 and not t.has_diverged for t in sweep.trials if t.segment is not None
    ):
        return True
    return any(isfinite(v) for points in sweep.curves.values() for _, v, _ in points)


def spent_budget(sweep: SweepState, now_s: float) -> CloseRecord | None:
    """Return why the sweep's budget ends it now; None while there is some left."""
    budget = sweep.spec.config.budget
    if budget.failed_trials is not None and sweep.failed_trials >= budget.failed_trials:
        return _spent(
            f"{sweep.failed_trials} trials failed, as many as budget.failed_trials", now_s
        )
    age_s = now_s - sweep.spec.facts.submitted_s
    if budget.wall_clock_seconds is not None and age_s >= budget.wall_clock_seconds:
        return _spent(f"budget.wall_clock_seconds ({budget.wall_clock_seconds:g}) is spent", now_s)
    if budget.gpu_seconds is not None and service_gpu_s(sweep, now_s) >= budget.gpu_seconds:
        return _spent(f"budget.gpu_seconds ({budget.gpu_seconds:g}) is spent", now_s)
    return None


def passed_deadline(sweep: SweepState, now_s: float) -> CloseRecord | None:
    """Return that the sweep ends at its deadline, and what is left undone; None before it."""
    at_s = sweep.spec.config.deadline_at_s(sweep.spec.facts.submitted_s)
    if at_s is None or now_s < at_s:
        return None
    begun = ((t.segment is not None and t.segment.segments > 0, t) for t in sweep.trials)
    return _spent(missed(at_s, ((has_begun, t.has_ended) for has_begun, t in begun)), now_s)


def service_gpu_s(sweep: SweepState, now_s: float) -> float:
    """Return the GPU-seconds of the sweep up to now, with those of running segments.

    Those of trials that no policy is offered count too, such as all that wait while the DAG is
    paused, and those before a trial began from scratch.
    """
    earlier_gpu_s = sum(t.segment.earlier_gpu_s for t in sweep.trials if t.segment is not None)
    return earlier_gpu_s + sum(trial.service_gpu_s(now_s) for trial in sweep.trials)


def _spent(reason: str, now_s: float) -> CloseRecord:
    return CloseRecord(reason=reason, state="cancelled", at_s=now_s)


def overlapped_sweeps(sweeps: Collection[SweepState]) -> tuple[SweepState, ...]:
    """Return the open nightly sweeps that a newer run of their schedule replaces.

    The run that was due last is the newest, in whatever order they were planned. An older one that
    a person has resumed since the newest one was planned is left to run beside it.
    """
    newest: dict[str, SweepSpec] = {}
    for sweep in sweeps:
        if sweep.spec.record.nightly:
            dag = sweep.spec.run.dag_id
            newest[dag] = max(sweep.spec, newest.get(dag, sweep.spec), key=_due_and_planned_s)
    return tuple(
        sweep
        for sweep in sweeps
        if sweep.spec.record.nightly
        and sweep.close is None
        and sweep.spec.config.nightly.overlap is Overlap.REPLACE
        and _is_replaced(sweep.spec, newest[sweep.spec.run.dag_id])
    )


def _due_and_planned_s(sweep: SweepSpec) -> tuple[float, float]:
    """Return when the run of a nightly sweep was due, and when it was planned."""
    return sweep.record.due_s or sweep.record.planned_s, sweep.record.planned_s


def _is_replaced(sweep: SweepSpec, newest: SweepSpec) -> bool:
    """Return whether a nightly sweep is older than that one, and not resumed since."""
    planned_s, started_s = sweep.record.planned_s, sweep.run.started_s
    is_resumed = started_s > planned_s and started_s >= newest.record.planned_s
    return _due_and_planned_s(sweep) < _due_and_planned_s(newest) and not is_resumed


def replaced_by_newer(now_s: float) -> CloseRecord:
    """Return the close record of a sweep that a newer night replaces."""
    return CloseRecord(REPLACED, "cancelled", now_s)


def end_deleted(plan: SweepSpec, client: AirflowClient, tracker: Tracker) -> None:
    """End in MLflow, as cancelled, what a DAG run that runs no more has left open.

    Nothing is open where its report was written. A service that is away leaves it as it is.
    """
    run, ref = plan.run, plan.ref
    try:
        parent = tracker.sweep(ref)
        if parent.state in RUN_STATUS:
            return
        dag_run = client.dag_run(run.dag_id, run.run_id)
        if dag_run is not None and dag_run["state"] not in ENDED_RUN:
            return  # it was cleared, and begins again
        if dag_run is not None and parent.tags.get(CONTINUED_TAG, "") == dag_run["end_date"]:
            return  # whoever resumes it is about to clear its tasks
        what = "deleted" if dag_run is None else f"ended as {dag_run['state']}"
        reason = f"its DAG run was {what} in Airflow before its report was written"
        for trial in tracker.trials(ref):
            if trial.is_open:
                tracker.finish(trial.run_id, "cancelled", {"hermes.reason": reason})
        tracker.finish(ref.parent_run_id, "cancelled", {CLOSED_TAG: reason})
    except HermesError as error:
        log.warning("What is open of the sweep %s stays so in MLflow: %s", run.sweep_id, error)


def end_unreadable(
    run: RunRow,
    close: CloseRecord,
    trials: Callable[[str], Iterable[TaskInstanceRow]],
    client: AirflowClient,
    tracker: Tracker,
) -> None:
    """End a sweep whose configuration this controller cannot read; may be repeated.

    `trials` returns the trials that a task of that id is.
    Trials that train go on to their end; the tasks of all others are skipped.
    """
    record = decode(SweepRecord, run.sweep)
    if record is None:
        return
    waiting = [
        TaskKey(run.dag_id, run.run_id, record.trial_task, row.number)
        for row in trials(record.trial_task)
        if is_idle(row)
    ]
    if not waiting:
        return
    log.error("The sweep %s ends: %s", run.sweep_id, close.reason)
    plan = TaskKey(run.dag_id, run.run_id, run.plan_task)
    client.put_state(plan, CLOSE_KEY, encode(close))
    try:
        tracker.finish(record.parent_run_id, "failed", {CLOSED_TAG: close.reason})
    except HermesError as error:
        log.warning("MLflow has no word of the end of %s: %s", run.sweep_id, error)
    client.skip(waiting[:MOST_MARKED])  # the others in the next rounds

"""The pool as it stands now, for people: `HERMES_HOME/pool-<name>.json`, replaced atomically.

Nobody decides on it: it is a view for `hermes sweep watch` and `hermes explain`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hermes_ops.airflow.folders import home
from hermes_ops.core.amounts import counted
from hermes_ops.trial.files import replace_file

if TYPE_CHECKING:  # a command that reads the view needs nothing of what the controller imports
    from hermes_ops.airflow.control.faults import Fault
    from hermes_ops.airflow.control.quota_settings import QuotaInForce
    from hermes_ops.airflow.control.sweep_state import SweepState
    from hermes_ops.core.model import Job, JobId, Plan, Reason, Snapshot
    from hermes_ops.core.quota import Quota

MOST_TRIED_AGAIN = 3
"""Trials that failed and are tried again, of which the view says why."""


def view_path(pool: str, folder: Path | None = None) -> Path:
    """Return where the view of a pool lies, in that state folder or in this process's own."""
    return (folder or home()) / f"pool-{pool}.json"


def publish(
    pool: str,
    snapshot: Snapshot,
    plan: Plan,
    sweeps: Mapping[str, SweepState],
    policy: str,
    *,
    faults: Sequence[Fault] = (),
    process_refusal: str = "",
    quota: QuotaInForce | None = None,
    machines: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the view of this round."""
    from hermes_ops.airflow.control.jobs import job_id
    from hermes_ops.core.quota import borrowing_jobs

    core = None if quota is None else quota.quota
    borrowing = frozenset() if core is None else borrowing_jobs(snapshot, plan, core)
    order = {job: i + 1 for i, job in enumerate(plan.ranking)}
    notices = dict(plan.notices)
    ended = {
        job_id(s, t.number): t.end_state for s, b in sweeps.items() for t in b.trials if t.has_ended
    }
    document = {
        "time_s": snapshot.time_s,
        "pid": os.getpid(),
        "policy": policy,
        "gpus": [g.index for g in snapshot.gpus],
        "sweeps": {s: _sweep(b) for s, b in sweeps.items()},
        "jobs": [
            _job(j, _sign(sweeps, j), plan.reasons.get(j.id), order.get(j.id))
            | ({"borrows": True} if j.id in borrowing else {})
            | ({"notice_s": notices[j.id]} if j.id in notices else {})
            | _final(j, ended)
            for j in snapshot.jobs
        ],
        "problems": [_problem(f) for f in faults],
        **({"process_refusal": process_refusal} if process_refusal else {}),
        **({"machines": machines} if machines else {}),
        **({} if core is None or quota is None else {"quota": _quota(snapshot, core, quota)}),
    }
    _write(pool, document)


def _quota(snapshot: Snapshot, core: Quota, quota: QuotaInForce) -> dict[str, Any]:
    from hermes_ops.core.quota import team_holdings
    from hermes_ops.core.user_limits import gpu_time_limits

    teams = [asdict(holding) for holding in team_holdings(snapshot, core)]
    users = [
        {
            "user": budget.user,
            "period": limit.period,
            "gpu_hours": limit.used_gpu_s / 3_600.0,
            "limit_gpu_hours": limit.limit_gpu_s / 3_600.0,
        }
        for budget in core.user_budgets
        for limit in gpu_time_limits(budget, quota.time, snapshot.time_s)
    ]
    document = {"teams": teams, "scaling": quota.scaling(len(snapshot.gpus))}
    return document | ({"users": users} if users else {})


def publish_trouble(pool: str, trouble: Mapping[str, Any] | None) -> None:
    """Write into the view that rounds fail (`since_s`, `rounds`, `reason`), or that none does."""
    document = read_view(pool)
    if document is None:
        document = {"time_s": 0.0, "policy": "?", "gpus": [], "sweeps": {}, "jobs": []}
    if document.get("trouble") != trouble:
        _write(pool, {**document, "pid": os.getpid(), "trouble": trouble})


def _write(pool: str, document: Mapping[str, Any]) -> None:
    replace_file(view_path(pool), json.dumps(document, separators=(",", ":")).encode())


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
    """Return the newest view of a pool; None when no controller has written one."""
    try:
        value = json.loads(view_path(pool, folder).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


def _sweep(sweep: SweepState) -> dict[str, Any]:
    return {
        "trials": len(sweep.trials),
        "ended": sum(t.has_ended for t in sweep.trials),
        "open": sweep.open_trials,
        "closing": sweep.close.reason if sweep.close else None,
        "not_preemptible": dict(_not_preemptible(sweep)),
        "advice": {
            str(t.number): t.segment.advice
            for t in sweep.trials
            if t.segment is not None and t.segment.advice and not t.has_ended
        },
        **({} if (at_s := deadline_s(sweep)) is None else {"deadline_s": at_s}),
        **({"failures": lines} if (lines := failures(sweep)) else {}),
        **({"interrupted": texts} if (texts := dict(_interrupted(sweep))) else {}),
        **({"stuck": stuck} if (stuck := _stuck(sweep)) else {}),
        **({"limited": limited} if (limited := dict(_limited(sweep))) else {}),
    }


def deadline_s(sweep: SweepState) -> float | None:
    """Return the sweep's deadline in Unix seconds; None without one."""
    return sweep.spec.config.deadline_at_s(sweep.spec.facts.submitted_s)


def failures(sweep: SweepState) -> list[str]:
    """Return why trials have failed, a line for each way, also those that are tried again."""
    from hermes_ops.core.summary import failure_lines

    segments = [(t, t.segment) for t in sweep.trials if t.segment is not None]
    lines = failure_lines((t.number, segment.reason) for t, segment in segments if t.has_failed)
    again = [(t, segment) for t, segment in segments if segment.failures and not t.has_ended]
    for trial, segment in again[:MOST_TRIED_AGAIN]:
        latest = segment.reason if segment.outcome == "failed" else ""
        reason = latest or "".join(segment.first_failure[:1])
        counted = f"failure {segment.failures}, {sweep.spec.config.trial.max_failures} are allowed"
        lines.append(f"Trial {trial.number} is tried again ({counted}): {reason}")
    interrupted = islice(_interrupted(sweep), MOST_TRIED_AGAIN)
    return [*lines, *(f"Trial {number} {text}" for number, text in interrupted)]


def _interrupted(sweep: SweepState) -> Iterator[tuple[str, str]]:
    """Yield the numbers of the trials that wait after interruptions, each with its reason.

    Those that were interrupted most often in a row come first.
    """
    from hermes_ops.airflow.control.interruptions import interruption_text

    segments = [(t.number, t.segment) for t in sweep.trials if t.segment and not t.has_ended]
    for number, segment in sorted(segments, key=lambda pair: -pair[1].interruptions):
        if text := interruption_text(segment):
            yield str(number), text


def _stuck(sweep: SweepState) -> list[str]:
    """Return the numbers of the trials with so many interruptions that a person must look."""
    from hermes_ops.airflow.control.interruptions import is_stuck

    segments = ((t.number, t.segment) for t in sweep.trials if not t.has_ended)
    return [str(number) for number, segment in segments if segment and is_stuck(segment)]


def _limited(sweep: SweepState) -> Iterator[tuple[str, str]]:
    """Yield the trials that get fewer GPUs than their range allows, each with the reason."""
    from hermes_ops.airflow.control.jobs import sizes_below

    facts = sweep.spec.facts
    for trial in sweep.trials:
        failed_size = (
            None if trial.segment is None or trial.has_ended else trial.segment.failed_size
        )
        most, _ = sizes_below(facts, failed_size)
        if most < (facts.most_gpus or facts.gpus):
            why = f"on {failed_size} it has failed, or could not be started"
            yield str(trial.number), f"{counted(most, 'GPU')}, as {why}"


def _not_preemptible(sweep: SweepState) -> Iterator[tuple[str, str]]:
    """Yield the trials that train and cannot be stopped, with the reason, once it is known.

    Before its first value a trial that writes checkpoints has none either.
    """
    last_step = sweep.spec.facts.total_steps or inf  # then it is about to end by itself
    for trial in sweep.trials:
        segment = trial.segment
        if trial.has_ended or segment is None or not segment.running:
            continue
        if not sweep.spec.facts.preemptible:
            yield str(trial.number), "trial.preemptible is false in the sweep file"
        elif not segment.preemptible and segment.steps_at_start < segment.step < last_step:
            yield str(trial.number), segment.preemptible_reason


def _final(job: Job, ended: Mapping[JobId, str]) -> dict[str, str]:
    """Return the final state of a job that has ended; nothing of any other."""
    return {"final": ended[job.id]} if job.id in ended else {}


def _sign(sweeps: Mapping[str, SweepState], job: Job) -> float:
    sweep = sweeps.get(job.sweep)
    return sweep.spec.facts.sign if sweep is not None else 1.0


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
        "user": job.user,
        "team": job.virtual_cluster,
        "class": job.priority_class,
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

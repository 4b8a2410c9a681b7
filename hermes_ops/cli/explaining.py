"""`hermes explain`: why a trial runs or waits, in words."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hermes_ops.errors import HermesError, Refused, Unavailable

if TYPE_CHECKING:
    from hermes_ops.cli.connection import Connection


def explanation(connection: Connection, trial: str, last: int) -> str:
    """The trial's standing now, then its last decisions, newest first."""
    from hermes_ops.airflow.publish import read_view

    view = read_view(connection.pool) or {"jobs": [], "time_s": 0.0, "policy": "?"}
    job = next((j for j in view["jobs"] if j["id"] == trial), None)
    decisions = _decisions(connection, trial, needed=job is None)
    if job is None and not decisions:
        raise HermesError(
            f"nothing is known of trial {trial!r}: `hermes sweep list` shows the sweeps."
        )
    lines = _now(job, view) if job is not None else [f"{trial} is not in the pool now."]
    lines += ["", f"Last decisions (of {len(decisions)}):"]
    lines += [_line(d) for d in reversed(decisions[-last:])] or ["  none yet"]
    return "\n".join(lines)


def _now(job: Mapping[str, Any], view: Mapping[str, Any]) -> list[str]:
    gpus = f" on GPU {', '.join(map(str, job['gpus']))}" if job["gpus"] else ""
    lines = [
        f"{job['id']} is {job['phase']}{gpus}, at step {job['step']}, value {job['value']}, "
        f"{job['preemptions']} preemptions (policy {view['policy']}, "
        f"{max(0.0, time.time() - view['time_s']):.1f} s ago)",
        f"  because: {job['reason'] or 'nothing was decided about it yet'}",
    ]
    lines += [f"    {name} = {value}" for name, value in job["terms"].items()]
    if job["runner_up"]:
        lines.append(f"  runner-up: {job['runner_up']}")
    if job["would_change"]:
        lines.append(f"  it would change with: {job['would_change']}")
    return lines


def _decisions(connection: Connection, trial: str, *, needed: bool) -> Sequence[Mapping[str, Any]]:
    """From this machine's log, or where there is none from MLflow's (Unavailable if `needed`)."""
    from hermes_ops.airflow.decisions import read_local
    from hermes_ops.tracking.summary import find

    sweep, _, number = trial.rpartition("/")
    found: Sequence[Mapping[str, Any]] = read_local(sweep)
    if not found:
        try:
            found = connection.tracker.read_decisions(find(connection.tracker, sweep).parent_run_id)
        except Refused:
            return ()
        except Unavailable:
            if needed:
                raise
            return ()
    return [d for d in found if d.get("trial") == int(number)]


def _line(decision: Mapping[str, Any]) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(float(decision["time_s"])))
    gpus = f" GPU {', '.join(map(str, decision['gpus']))}" if decision["gpus"] else ""
    terms = ", ".join(f"{k}={_short(v)}" for k, v in decision["terms"].items())
    return f"  {when} {decision['action']}{gpus}: {decision['reason']}" + (
        f" [{terms}]" if terms else ""
    )


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

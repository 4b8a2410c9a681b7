"""`hermes explain`: why a trial runs or waits, in words."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hermes_ops.airflow.explaining import Explanation
    from hermes_ops.cli.connection import Connection


def explanation(connection: Connection, trial: str, last: int) -> str:
    """The trial's standing now, then its last decisions, newest first."""
    from hermes_ops.airflow.explaining import explain

    found = explain(connection.pool, connection.tracker, trial)
    lines = [
        found.now,
        *_why(found),
        *(f"  {line}" for line in found.problems),
        "",
        f"Last decisions (of {len(found.decisions)}):",
    ]
    lines += [_line(d) for d in found.decisions[: max(0, last)]] or ["  none yet"]
    return "\n".join(lines)


def _why(found: Explanation) -> list[str]:
    from hermes_ops.airflow.explaining import UNDECIDED, short

    job = found.standing
    if job is None or found.ended is not None:
        return []
    lines = [f"  because: {job['reason'] or UNDECIDED}"]
    lines += [f"    {name} = {short(value)}" for name, value in job["terms"].items()]
    if job["runner_up"]:
        lines.append(f"  runner-up: {job['runner_up']}")
    if job["would_change"]:
        lines.append(f"  it would change with: {job['would_change']}")
    return lines


def _line(decision: Mapping[str, Any]) -> str:
    from hermes_ops.airflow.explaining import on_gpus, short

    when = time.strftime("%H:%M:%S", time.localtime(float(decision["time_s"])))
    terms = ", ".join(f"{k}={short(v)}" for k, v in decision["terms"].items())
    return f"  {when} {decision['action']}{on_gpus(decision['gpus'])}: {decision['reason']}" + (
        f" [{terms}]" if terms else ""
    )

"""Has a component of Airflow a heartbeat? `python -m hermes_ops.airflow.heartbeat triggerer`.

For probes: it needs the standard library only and ends within a second. It asks the API server at
HERMES_AIRFLOW_URL; while that is away nothing is known against the component, which is enough to
let it live, and with `--strict` not enough to call it ready.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 5.0
COMPONENTS = ("scheduler", "dag_processor", "triggerer")


def problem(
    component: str, health: Callable[[], dict[str, Any]], *, strict: bool = False
) -> str | None:
    """Return what is wrong with a component; None if it is healthy or unknown."""
    try:
        document = health()
    except (OSError, ValueError):  # not the component's fault
        return f"{component}: the API server does not answer" if strict else None
    row = document.get(component) or {}
    return None if row.get("status") == "healthy" else f"{component}: {row.get('status')}"


def _health() -> dict[str, Any]:
    url = f"{os.environ['HERMES_AIRFLOW_URL']}/api/v2/monitor/health"
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - our own setting
        return dict(json.load(answer))


def main(arguments: list[str]) -> int:
    """Return 0 if it is healthy or, unless strict, unknown; print a line and return 1 if not."""
    strict = "--strict" in arguments
    names = [a for a in arguments if a != "--strict"]
    if len(names) != 1 or names[0] not in COMPONENTS:
        print(f"name one of {', '.join(COMPONENTS)}", file=sys.stderr)  # noqa: T201
        return 2
    fault = problem(names[0], _health, strict=strict)
    if fault is not None:
        print(fault, file=sys.stderr)  # noqa: T201
    return 0 if fault is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

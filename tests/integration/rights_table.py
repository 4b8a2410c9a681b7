"""The tables of docs/rights.md, and the request that each of their actions makes.

The requests name runs, pools and variables that are not there: Airflow checks the permission first,
so whoever has it is answered with something else than 403, and nothing is changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

DOCUMENT = Path(__file__).parents[2] / "docs/rights.md"
NO_RUN = "/api/v2/dags/{dag}/dagRuns/no-such-run"
PAGE = "read the page *Hermes*"

REQUESTS: dict[str, tuple[str, str, Any]] = {
    "read a sweep: Airflow's pages, `sweep list`, `watch`, `logs`": ("GET", NO_RUN, None),
    "start a sweep": ("POST", "/api/v2/dags/{dag}/dagRuns", {"conf": 1}),
    "stop a sweep": (
        "PUT",
        f"{NO_RUN}/taskInstances/plan/state-store/hermes_close",
        {"value": {}, "expires_at": None},
    ),
    "clear a trial, extend or resume a sweep": (
        "POST",
        "/api/v2/dags/{dag}/clearTaskInstances",
        {"dag_run_id": "no-such-run", "task_ids": ["plan"], "dry_run": True},
    ),
    "mark a trial as success or failed": (
        "PATCH",
        f"{NO_RUN}/taskInstances/trial/0",
        {"new_state": "failed"},
    ),
    "mark a DAG run as success or failed": ("PATCH", NO_RUN, {"state": "failed"}),
    "pause a DAG": ("PATCH", "/api/v2/dags/{dag}", {"is_paused": "neither"}),
    "remove a sweep: `hermes prune`, delete its DAG run": ("DELETE", NO_RUN, None),
    "change the policy, the quota or the size of a pool": (
        "PATCH",
        "/api/v2/pools/no-such-pool",
        {"pool": "no-such-pool", "slots": 1},
    ),
    "change a Variable, such as `hermes_prune_older_than`": (
        "PATCH",
        "/api/v2/variables/no-such-variable",
        {"key": "no-such-variable", "value": "1"},
    ),
}

UNKNOWN_TO_IT = (400, 404, 409, 422)
"""How Airflow answers who has the permission: there is no such thing, or it is malformed."""


def table(heading: str) -> dict[str, dict[str, bool]]:
    """Return the table below a heading: by action, then by column, whether it is permitted."""
    text = DOCUMENT.read_text()
    _, _, part = text.partition(f"\n## {heading}\n")
    lines = part.partition("\n## ")[0].splitlines()
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    return {
        action: {
            column: {"yes": True, "no": False}[cell]
            for column, cell in zip(head[1:], cells, strict=True)
        }
        for action, *cells in rows
    }


def send(client: httpx.Client, action: str, dag: str) -> httpx.Response:
    """Send the request of an action."""
    if action == PAGE:
        return client.get("/hermes/sweeps")
    method, path, body = REQUESTS[action]
    return client.request(method, path.format(dag=dag), json=body)


def is_permitted(client: httpx.Client, action: str, dag: str) -> bool:
    """Return whether Airflow permits an action; AssertionError if its answer does not tell."""
    answer = send(client, action, dag)
    if answer.status_code == httpx.codes.FORBIDDEN:
        assert "token" not in answer.text, answer.text
        return False
    allowed = (200,) if answer.request.method == "GET" else ()
    assert answer.status_code in (*UNKNOWN_TO_IT, *allowed), (action, dag, answer.text)
    return True

"""The time until a team trains on its guaranteed GPUs, which another has borrowed."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx

from bench import stack
from bench.measure import QUICK, Figures, NotMeasuredError, await_, figures, read_lines
from hermes_ops.stack.airflow_service import log_in

SLOTS = 4
RECLAIMS = 3 if QUICK else 10
WAIT_S = 120.0
BORROWER, OWNER = "hermes-controller", "admin"
"""The two users of `hermes up`; the command line logs in as the first."""
TEAMS = {
    "teams": [
        {"name": "vision", "guaranteed": 2, "users": [BORROWER]},
        {"name": "speech", "guaranteed": 2, "users": [OWNER]},
    ]
}
DAG_RUNS = "/api/v2/dags/hermes_sweep/dagRuns"


def run() -> Figures:
    """Let a team's sweeps of two trials come, one after another, while another holds the pool."""
    decided, triggered = list[float](), list[float]()
    with stack.running(SLOTS, "--policy", "fifo", "--policy-option", "guard_k=0") as own:
        file = own.home / "teams.json"
        file.write_text(json.dumps(TEAMS))
        own.hermes("pool", "quota", file)
        endless = stack.stub_sweep("borrower", SLOTS, "--epochs", 1_000_000, pause_s=0.5)
        borrower = own.start(endless)
        with contextlib.closing(_as_owner(own)) as client:
            for number in range(RECLAIMS):
                await_(lambda: _training(borrower) == SLOTS, WAIT_S, "the borrower's trials", 0.2)
                time.sleep(3.0)  # what the last change has left behind is over
                since_s, owner = time.time(), _triggered(own, client, f"owner-{number}")
                await_(partial(_has_begun, owner), WAIT_S, f"the trials of {owner.id}", 0.2)
                stops = [d["time_s"] for d in borrower.decisions() if d["action"] == "stop"]
                stopped_s = min(time_s for time_s in stops if time_s > since_s)
                lines_s = _first_lines(owner)
                decided += [line_s - stopped_s for line_s in lines_s]
                triggered += [line_s - since_s for line_s in lines_s]
        own.hermes("sweep", "stop", borrower.id)
    return {
        "decision_to_first_line_s": figures(decided),
        "trigger_to_first_line_s": figures(triggered),
        "reclaims": RECLAIMS,
        "slots": SLOTS,
        "target_max_s": 3.0,
    }


def _as_owner(own: stack.Stack) -> httpx.Client:
    """Return a client of Airflow that is logged in as the owner."""
    airflow_url = json.loads(own.hermes("status", "--json"))["stack"]["airflow_url"]
    password = (own.home / "secrets" / f"{OWNER}.password").read_text().strip()
    return log_in(airflow_url, OWNER, password, "start Hermes again")


def _triggered(own: stack.Stack, client: httpx.Client, name: str) -> stack.Sweep:
    """Start a sweep of two trials that end soon."""
    config = stack.stub_sweep(name, 2, "--epochs", 4, pause_s=0.5)
    body = {"dag_run_id": name, "conf": config, "logical_date": None}
    answer = client.post(DAG_RUNS, json=body)
    if answer.status_code != httpx.codes.OK:
        raise NotMeasuredError(f"Airflow refused the sweep {name}: {answer.text}")
    return stack.Sweep(own.home, name)


def _training(sweep: stack.Sweep) -> int:
    """Return how many trials hold GPUs, by the decisions about them."""
    holds: dict[int, bool] = {}
    for decision in sweep.decisions():
        holds[decision["trial"]] = decision["action"] == "start"
    return sum(holds.values())


def _has_begun(sweep: stack.Sweep) -> bool:
    return len(_first_lines(sweep)) == 2


def _first_lines(sweep: stack.Sweep) -> list[float]:
    """Return when each trial's script has begun, of those that have."""
    stamps: Iterator[list[dict[str, Any]]] = (
        read_lines(sweep.trial(number) / "stamps.jsonl") for number in range(2)
    )
    return [lines[0]["line_s"] for lines in stamps if lines]

"""Sweeps that are started at the same time, where Airflow's writers meet (SQLite)."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.airflow.client import AirflowClient, Credentials

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

AT_ONCE = 10


def test_sweeps_that_are_started_at_once_all_start(lab: Any, harness: Any) -> None:
    content = harness.config("crowd", {"n": [1]}, "stub.py", trial={"directory": "relative"})
    found = lab.stack.environment
    credentials = Credentials(
        found["HERMES_AIRFLOW_URL"],
        found["HERMES_AIRFLOW_USER"],
        Path(found["HERMES_AIRFLOW_PASSWORD_FILE"]),
    )

    def start(number: int) -> str:
        with contextlib.closing(AirflowClient(credentials)) as client:
            run = client.trigger("hermes_sweep", f"crowd-{number}-{os.getpid()}", content)
        return str(run["dag_run_id"])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        started = list(pool.map(start, range(AT_ONCE)))
    assert started == [f"crowd-{number}-{os.getpid()}" for number in range(AT_ONCE)]
    for run in started:  # their plans refuse the folder: nothing of them trains
        assert harness.Sweep(lab, run).await_end() == "failed"

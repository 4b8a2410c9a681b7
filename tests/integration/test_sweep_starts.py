"""Sweeps that are started at the same time, where Airflow's writers meet (SQLite)."""

from __future__ import annotations

import contextlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.airflow.client import AirflowClient, TaskKey
from hermes_ops.airflow.credentials import AirflowCredentials
from hermes_ops.retry import START_PAUSES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

AT_ONCE = 10


def test_sweeps_that_are_started_at_once_all_start(lab: Any, harness: Any) -> None:
    content = harness.config("crowd", {"n": [1]}, "stub.py", trial={"directory": "relative"})
    found = lab.stack.environment
    credentials = AirflowCredentials(
        found["HERMES_AIRFLOW_URL"],
        found["HERMES_AIRFLOW_USER"],
        Path(found["HERMES_AIRFLOW_PASSWORD_FILE"]),
    )

    def start(number: int) -> str:
        with contextlib.closing(AirflowClient(credentials, pauses=START_PAUSES)) as client:
            run = client.trigger("hermes_sweep", f"crowd-{number}-{os.getpid()}", content)
            plan = TaskKey("hermes_sweep", run["dag_run_id"], "plan")
            for turn in range(5):  # of a person's commands, beside what Airflow itself writes
                client.put_state(plan, "crowd", {"turn": turn})
                client.note(plan, f"turn {turn}")
            assert client.get_state(plan, "crowd") == {"turn": 4}
        return str(run["dag_run_id"])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        started = list(pool.map(start, range(AT_ONCE)))
    assert started == [f"crowd-{number}-{os.getpid()}" for number in range(AT_ONCE)]
    for run in started:  # their plans refuse the folder: nothing of them trains
        assert harness.Sweep(lab, run).await_end() == "failed"


def test_a_run_with_a_secret_or_without_a_sweep_is_refused_and_a_reference_is_what_others_see(
    lab: Any, harness: Any, tmp_path: Path
) -> None:
    own = {
        "OPEN": "said-openly",
        "HF_TOKEN": "sw0rdfish-9f2c",
        "PROBE_FILE": str(tmp_path / "probe"),
    }
    content = harness.config("secretive", {"n": [1]}, "probe.py", trial={"environment": own})
    url = "/api/v2/dags/hermes_sweep/dagRuns"

    def post(run: str, conf: Any) -> Any:
        return lab.airflow.post(url, json={"dag_run_id": run, "conf": conf, "logical_date": None})

    refused = post("with-a-secret", content)
    assert refused.status_code == 400
    assert "trial.environment.HF_TOKEN" in refused.json()["detail"]
    assert lab.airflow.get(f"{url}/with-a-secret").status_code == 404
    assert own["HF_TOKEN"] not in lab.airflow.get("/api/v2/eventLogs").text + refused.text
    assert post("empty", {}).status_code == 200
    assert harness.Sweep(lab, "empty").await_end() == "failed"
    assert "hermes sweep run FILE" in harness.Sweep(lab, "empty").log("plan")
    own["HF_TOKEN"] = "{env:HOME}//secret"
    sweep = lab.run(content)
    assert sweep.await_end() == "success"
    found = json.loads((tmp_path / "probe").read_text())["environment"]
    assert found["HF_TOKEN"] == f"{found['HOME']}//secret"
    assert (found["OPEN"], found.get("AWS_SECRET_ACCESS_KEY")) == ("said-openly", None)
    shown = lab.airflow.get(f"{url}/{sweep.id}").json()["conf"]["trial"]["environment"]
    assert shown["HF_TOKEN"] == "{env:HOME}//secret"

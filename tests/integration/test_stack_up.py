"""`hermes up` as its users see it, on the shared stack: addresses, refusals, secrets, rights."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from hermes_ops.stack import processes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

PROGRAMS = {
    *("api-server", "scheduler", "dag-processor", "triggerer"),
    *("mlflow", "controller", "liveness"),
}


def _login(stack: Any, user: str, password_file: Path) -> httpx.Client:
    client = httpx.Client(base_url=stack.airflow_url, timeout=30, trust_env=False)
    body = {"username": user, "password": password_file.read_text().strip()}
    answer = client.post("/auth/token", json=body)
    assert answer.status_code in {200, 201}, answer.text
    client.headers["Authorization"] = f"Bearer {answer.json()['access_token']}"
    return client


def _controller_client(stack: Any) -> httpx.Client:
    environment = stack.environment
    return _login(
        stack,
        environment["HERMES_AIRFLOW_USER"],
        Path(environment["HERMES_AIRFLOW_PASSWORD_FILE"]),
    )


def test_status_reports_every_program_as_running(stack: Any) -> None:
    seen = stack.hermes("status", "--json")
    document = json.loads(seen.stdout)
    assert seen.returncode == 0
    assert {p["name"] for p in document["programs"] if p["state"] == "RUNNING"} >= PROGRAMS
    assert document["stack"]["slots"] == 2


def test_a_second_up_is_refused_and_says_where_the_first_one_is(stack: Any) -> None:
    refused = stack.up()
    assert refused.returncode == 1
    assert "already running" in refused.stderr
    assert stack.airflow_url in refused.stderr
    assert "hermes down" in refused.stderr


def test_the_pool_has_the_slots_that_were_asked_for(stack: Any) -> None:
    with contextlib.closing(_controller_client(stack)) as client:
        assert client.get("/api/v2/pools/gpus").json()["slots"] == 2


def test_airflow_answers_nothing_without_a_log_in(stack: Any) -> None:
    answer = httpx.get(f"{stack.airflow_url}/api/v2/dags", trust_env=False)
    assert answer.status_code == 401


def test_the_controllers_user_may_not_change_pools(stack: Any) -> None:
    with contextlib.closing(_controller_client(stack)) as client:
        answer = client.patch("/api/v2/pools/gpus", json={"pool": "gpus", "slots": 99})
    assert answer.status_code == 403


def test_the_sweep_dag_is_there_without_import_errors(stack: Any) -> None:
    with contextlib.closing(_controller_client(stack)) as client:
        assert client.get("/api/v2/dags/hermes_sweep").status_code == 200
        assert client.get("/api/v2/importErrors").json()["total_entries"] == 0


def test_every_listening_socket_is_on_loopback(stack: Any) -> None:
    listening = [
        connection.laddr.ip
        for member in processes.members(stack.home)
        for connection in member.process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {"127.0.0.1"}


def test_no_secret_is_readable_by_others_nor_on_a_command_line_nor_in_a_log(stack: Any) -> None:
    secrets = [file for file in (stack.home / "secrets").iterdir() if file.is_file()]
    values = [f.read_text().strip() for f in secrets if f.suffix in {".password", ".key"}]
    commands = " ".join(" ".join(m.process.cmdline()) for m in processes.members(stack.home))
    logs = "".join(f.read_text(errors="replace") for f in (stack.home / "logs").iterdir())
    assert len(values) >= 6
    assert stack.home.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in secrets)
    assert (stack.home / "airflow" / "airflow.cfg").stat().st_mode & 0o777 == 0o600
    assert not [value for value in values if value in commands or value in logs]


def test_a_port_that_is_taken_is_said_in_one_line_and_leaves_nothing(
    tmp_path: Path, stack: Any
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        options = ("--slots", "1", "--airflow-port", port, "--mlflow-port", "0")
        refused = stack.hermes("up", "--home", str(tmp_path), *options)
    assert refused.returncode == 1
    assert len(refused.stderr.strip().splitlines()) == 1
    assert port in refused.stderr
    assert "--airflow-port" in refused.stderr
    assert processes.members(tmp_path) == []


def test_down_where_nothing_runs_says_so_and_succeeds(tmp_path: Path, stack: Any) -> None:
    stopped = stack.hermes("down", "--home", str(tmp_path))
    assert stopped.returncode == 0
    assert "not running" in stopped.stdout
    assert stack.hermes("status", "--home", str(tmp_path)).returncode == 3

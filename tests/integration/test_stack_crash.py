"""Stacks that are killed, cut off or configured otherwise; each test starts its own."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from hermes_ops.stack import processes
from hermes_ops.stack.preflight import free_port

pytestmark = [pytest.mark.integration, pytest.mark.heavy, pytest.mark.timeout(900)]

HERMES = Path(sys.executable).parent / "hermes"


def _programs(stack: Any) -> dict[str, int]:
    document = json.loads(stack.hermes("status", "--json").stdout)
    return {p["name"]: p["pid"] for p in document["programs"]}


def _await(condition: Any, timeout_s: float = 240.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _kill_everything(home: Path) -> None:
    killed = [member.process for member in processes.members(home)]
    for process in killed:
        process.kill()
    psutil.wait_procs(killed, timeout=10)


def test_after_a_sigkill_of_everything_up_needs_no_cleaning(own_stack: Any) -> None:
    assert own_stack.up().returncode == 0
    _kill_everything(own_stack.home)
    (own_stack.home / "drain").touch()
    again = own_stack.up()
    assert again.returncode == 0, again.stderr
    assert not (own_stack.home / "drain").exists()
    assert own_stack.hermes("status").returncode == 0
    assert own_stack.down().returncode == 0
    assert processes.members(own_stack.home) == []


def test_when_only_the_supervisor_was_killed_up_starts_again_on_the_same_ports(
    own_stack: Any,
) -> None:
    airflow, mlflow = free_port(), free_port()
    fixed = ("--airflow-port", str(airflow), "--mlflow-port", str(mlflow))
    assert own_stack.up(*fixed).returncode == 0
    before = {member.pid for member in processes.members(own_stack.home)}
    os.kill(int((own_stack.home / "run" / "supervisord.pid").read_text()), signal.SIGKILL)
    shown = own_stack.hermes("status", "--json")
    orphans = {p["name"] for p in json.loads(shown.stdout)["orphans"]}
    assert (shown.returncode, "api-server" in orphans) == (4, True)
    again = own_stack.up(*fixed)
    after = {member.pid for member in processes.members(own_stack.home)}
    assert again.returncode == 0, again.stderr
    assert own_stack.airflow_url == f"http://127.0.0.1:{airflow}"
    assert not before & after


def test_a_killed_component_comes_back_and_its_orphans_end_and_so_does_one_that_hangs(
    own_stack: Any,
) -> None:
    own_stack.home.joinpath("hermes.toml").write_text("hang_timeout_s = 90\n")
    assert own_stack.up().returncode == 0
    before = _programs(own_stack)
    workers = [w for w in psutil.Process(before["scheduler"]).children() if w.is_running()]
    assert workers
    for name in ("scheduler", "mlflow"):
        os.kill(before[name], signal.SIGKILL)
    psutil.wait_procs(workers, timeout=60)
    assert not [worker for worker in workers if worker.is_running()]
    _await(functools.partial(_answers, f"{own_stack.mlflow_url}/health"))
    _await(lambda: own_stack.hermes("status").returncode == 0)
    again = _programs(own_stack)
    assert again["scheduler"] != before["scheduler"]
    os.kill(again["scheduler"], signal.SIGSTOP)
    _await(lambda: _programs(own_stack)["scheduler"] not in (0, again["scheduler"]), 600)
    _await(lambda: own_stack.hermes("status").returncode == 0)
    assert {n for n, pid in _programs(own_stack).items() if pid != again[n]} == {"scheduler"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_that_is_interrupted_leaves_no_process(
    own_stack: Any, number: signal.Signals
) -> None:
    command = [str(HERMES), "up", "--home", str(own_stack.home), "--slots", "1"]
    command += ["--airflow-port", "0", "--mlflow-port", "0"]
    starting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _await((own_stack.home / "run" / "supervisord.pid").exists)
    starting.send_signal(number)
    starting.communicate(timeout=100)
    assert starting.returncode == 130
    assert processes.members(own_stack.home) == []


def test_foreground_stops_everything_on_sigint(own_stack: Any) -> None:
    command = [str(HERMES), "up", "--foreground", "--home", str(own_stack.home), "--slots", "1"]
    command += ["--airflow-port", "0", "--mlflow-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as staying:
        assert staying.stdout is not None
        assert any("Ctrl-C" in line for line in staying.stdout)
        staying.send_signal(signal.SIGINT)
        rest = staying.stdout.read()
    assert staying.returncode == 0
    assert "no process is left" in rest
    assert processes.members(own_stack.home) == []


def test_a_component_that_cannot_start_is_named_with_its_log_and_all_is_stopped(
    own_stack: Any,
) -> None:
    own_stack.home.joinpath("hermes.toml").write_text(
        '[airflow.core]\nauth_manager = "no.such.Manager"\n'
    )
    failed = own_stack.up()
    assert failed.returncode == 1
    assert "api-server did not become healthy" in failed.stderr
    assert "api-server.log" in failed.stderr
    assert processes.members(own_stack.home) == []


def test_both_services_run_on_postgresql(own_stack: Any, postgres: Any) -> None:
    airflow, mlflow = postgres.url("both_airflow"), postgres.url("both_mlflow")
    started = own_stack.up("--airflow-db", airflow, "--mlflow-db", mlflow)
    assert started.returncode == 0, started.stderr
    assert not (own_stack.home / "airflow" / "airflow.db").exists()
    assert not (own_stack.home / "mlflow" / "mlflow.db").exists()
    commands = [" ".join(m.process.cmdline()) for m in processes.members(own_stack.home)]
    assert not [command for command in commands if "pass%25word" in command]
    assert own_stack.down().returncode == 0


def test_mlflow_asks_to_log_in_when_it_is_told_to(own_stack: Any) -> None:
    assert own_stack.up("--mlflow-auth").returncode == 0
    url = f"{own_stack.mlflow_url}/api/2.0/mlflow/experiments/search"
    environment = own_stack.environment
    login = (environment["MLFLOW_TRACKING_USERNAME"], environment["MLFLOW_TRACKING_PASSWORD"])
    body = {"max_results": 1}
    assert httpx.post(url, json=body, trust_env=False).status_code == 401
    assert httpx.post(url, json=body, auth=login, trust_env=False).status_code == 200

"""Stacks that are killed, cut off or configured otherwise."""

from __future__ import annotations

import contextlib
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
from tests.integration.conftest import CrashedStack

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


def test_both_services_run_on_postgresql(killed: CrashedStack) -> None:
    home = killed.stack.home
    assert not (home / "airflow" / "airflow.db").exists()
    assert not (home / "mlflow" / "mlflow.db").exists()
    commands = [" ".join(m.process.cmdline()) for m in processes.members(home)]
    assert commands
    assert not [command for command in commands if "pass%25word" in command]


def test_mlflow_asks_to_log_in_when_it_is_told_to(killed: CrashedStack) -> None:
    url = f"{killed.stack.mlflow_url}/api/2.0/mlflow/experiments/search"
    environment = killed.stack.environment
    login = (environment["MLFLOW_TRACKING_USERNAME"], environment["MLFLOW_TRACKING_PASSWORD"])
    body = {"max_results": 1}
    assert httpx.post(url, json=body, trust_env=False).status_code == 401
    assert httpx.post(url, json=body, auth=login, trust_env=False).status_code == 200


def test_a_trial_is_resized_in_its_task_on_postgresql(
    killed: CrashedStack, harness: Any, tmp_path: Path
) -> None:
    with contextlib.closing(harness.Lab(killed.stack, tmp_path)) as lab:
        first, second, sampler = harness.resized_by_another(lab, tmp_path)
        assert (first.sizes(), second.sizes()) == ([2, 1, 2], [1])
        assert first.states() == second.states() == {0: "finished"}
        log = first.log("trial", 0)
    assert (log.count("Trial 0 keeps its slots"), log.count("Trial 0 waits")) == (2, 0)
    assert (sampler.most, sampler.doubly_held) == (2, [])


def test_a_killed_component_comes_back_and_its_orphans_end_and_so_does_one_that_hangs(
    killed: CrashedStack,
) -> None:
    stack = killed.stack
    before = _programs(stack)
    workers = [w for w in psutil.Process(before["scheduler"]).children() if w.is_running()]
    assert workers
    for name in ("scheduler", "mlflow"):
        os.kill(before[name], signal.SIGKILL)
    psutil.wait_procs(workers, timeout=60)
    assert not [worker for worker in workers if worker.is_running()]
    _await(functools.partial(_answers, f"{stack.mlflow_url}/health"))
    _await(lambda: stack.hermes("status").returncode == 0)
    again = _programs(stack)
    assert again["scheduler"] != before["scheduler"]
    os.kill(again["scheduler"], signal.SIGSTOP)
    _await(lambda: _programs(stack)["scheduler"] not in (0, again["scheduler"]), 600)
    _await(lambda: stack.hermes("status").returncode == 0)
    assert {n for n, pid in _programs(stack).items() if pid != again[n]} == {"scheduler"}


def test_when_only_the_supervisor_was_killed_up_starts_again_on_the_same_ports(
    killed: CrashedStack,
) -> None:
    stack = killed.stack
    before = {member.pid for member in processes.members(stack.home)}
    os.kill(int((stack.home / "run" / "supervisord.pid").read_text()), signal.SIGKILL)
    shown = stack.hermes("status", "--json")
    orphans = {p["name"] for p in json.loads(shown.stdout)["orphans"]}
    assert (shown.returncode, "api-server" in orphans) == (4, True)
    killed.up()
    after = {member.pid for member in processes.members(stack.home)}
    assert stack.airflow_url == f"http://127.0.0.1:{killed.ports.airflow}"
    assert not before & after


def test_after_a_sigkill_of_everything_up_needs_no_cleaning_and_sigint_stops_it_in_the_foreground(
    killed: CrashedStack, harness: Any
) -> None:
    stack = killed.stack
    harness.kill_at_once(processes.members(stack.home))
    (stack.home / "drain").touch()
    command = [str(HERMES), "up", "--foreground", "--home", str(stack.home), "--slots", "2"]
    with subprocess.Popen([*command, *killed.options], stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        assert any("Ctrl-C" in line for line in up.stdout)
        assert not (stack.home / "drain").exists()
        assert stack.hermes("status").returncode == 0
        up.send_signal(signal.SIGINT)
        rest = up.stdout.read()
    assert up.returncode == 0
    assert "no process is left" in rest
    assert processes.members(stack.home) == []


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

"""Programs whose process supervisor was killed: they are shown, and ended in order."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from hermes_ops.cli import assemble
from hermes_ops.errors import StackError
from hermes_ops.stack import lifecycle, preflight, processes, programs
from hermes_ops.stack.layout import Layout
from hermes_ops.stack.record import StackRecord
from hermes_ops.stack.settings import resolve
from hermes_ops.stack.supervisor_client import RUNNING, SupervisorClient

# Says its name on SIGTERM, so that the order of a stop can be read.
PROGRAM = """import os, signal, time
def end(*_):
    with open(os.environ["HERMES_HOME"] + "/ended", "a") as file:
        file.write(os.environ["HERMES_PROGRAM"] + "\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True:
    time.sleep(60)
"""
NAMES = ("mlflow", "scheduler", "controller")


def _await(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.fixture
def layout(tmp_path: Path) -> Iterator[Layout]:
    """Return the home of three programs under a real supervisor."""
    found = Layout(tmp_path / "home")
    found.create()
    record = StackRecord(
        home=str(found.home),
        airflow_url=f"http://127.0.0.1:{preflight.free_port()}",
        mlflow_url=f"http://127.0.0.1:{preflight.free_port()}",
        pool="gpus",
        slots=2,
        policy="fifo",
        policy_options={},
        mlflow_auth=False,
        standby=0,
        started_s=0.0,
    )
    table = [programs.Program(name, (sys.executable, "-c", PROGRAM)) for name in NAMES]
    programs.write_configuration(found, table, record)
    supervisor = SupervisorClient(found)
    supervisor.start()
    for name in NAMES:
        supervisor.start_program(name)
    _await(lambda: all(found.log(name).exists() for name in NAMES))
    _await(lambda: all("ready" in found.log(name).read_text() for name in NAMES))
    yield found
    supervisor.shutdown()
    processes.end(found.home)


def _kill_supervisor(layout: Layout) -> None:
    process = psutil.Process(int(layout.supervisor_pid.read_text()))
    process.kill()
    psutil.wait_procs([process], timeout=60)


def test_programs_without_a_supervisor_are_shown_with_what_to_do(layout: Layout) -> None:
    _await(lambda: all(p.state == RUNNING for p in lifecycle.status(layout).programs))
    pids = {p.name: p.pid for p in lifecycle.status(layout).programs}
    _kill_supervisor(layout)
    seen = lifecycle.status(layout)
    assert {p.name: p.pid for p in seen.orphans} == pids
    said = CliRunner().invoke(assemble(), ["status", "--home", str(layout.home)])
    assert said.exit_code == 4
    words = " ".join(said.output.split())
    assert f"`hermes up --home {layout.home}`" in words
    assert f"`hermes down --home {layout.home}`" in words
    as_json = CliRunner().invoke(assemble(), ["status", "--json", "--home", str(layout.home)])
    document = json.loads(as_json.stdout)
    assert (as_json.exit_code, document["running"]) == (4, False)
    assert {p["name"] for p in document["orphans"]} == set(NAMES)


def test_programs_of_a_stack_whose_record_is_of_another_version_are_shown_with_what_to_do(
    layout: Layout,
) -> None:
    _await(lambda: all(p.state == RUNNING for p in lifecycle.status(layout).programs))
    layout.record.write_text('{"home": "/state", "of_a_later_version": 1}')
    said = CliRunner().invoke(assemble(), ["status", "--home", str(layout.home)])
    assert said.exit_code == 0
    assert "not running" not in said.output
    assert set(NAMES) <= set(said.output.split())
    assert "stack.json cannot be read" in said.output
    assert "run `hermes down`, then `hermes up`" in said.output


def test_down_ends_the_orphans_of_a_killed_supervisor_in_order(layout: Layout) -> None:
    _kill_supervisor(layout)
    assert lifecycle.down(layout, 0.0, lambda _: None)
    assert (layout.home / "ended").read_text().split() == ["controller", "scheduler", "mlflow"]
    assert processes.members(layout.home) == []


def test_a_supervisor_that_does_not_answer_starts_nothing_that_is_being_ended(
    layout: Layout,
) -> None:
    layout.supervisor_socket.unlink()
    lifecycle.stop(layout, SupervisorClient(layout), 0.0, lambda _: None)
    assert processes.members(layout.home) == []


def test_a_supervisor_that_is_stopped_does_not_hang_who_asks_it(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_ops.stack.supervisor_client.ANSWER_WAIT_S", 0.3)
    os.kill(int(layout.supervisor_pid.read_text()), signal.SIGSTOP)
    assert not SupervisorClient(layout).is_alive()
    assert len(lifecycle.status(layout).orphans) == len(NAMES) + 1
    lifecycle.stop(layout, SupervisorClient(layout), 0.0, lambda _: None)
    assert processes.members(layout.home) == []


def test_a_disk_that_takes_no_file_does_not_keep_down_from_its_work(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "touch", full)
    monkeypatch.setattr(Path, "unlink", full)  # as on a file system that is read-only
    assert lifecycle.down(layout, 40.0, lambda _: None)
    assert processes.members(layout.home) == []


def test_a_port_of_an_orphan_is_accepted_and_one_of_another_program_refused(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        settings = resolve(tmp_path, {"airflow_port": port, "mlflow_port": 0}, {})
        preflight.check_ports(settings, {os.getpid()})
        with pytest.raises(StackError, match=rf"process {os.getpid()}, listens"):
            preflight.check_ports(settings, set())


def test_waiting_in_the_foreground_ends_when_the_supervisor_has_gone_for_good() -> None:
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    answers = iter([True, False, False, True, False, False, False])
    try:
        assert not lifecycle.wait_for_signal(lambda: None, lambda: next(answers), look_s=0.0)
        assert list(answers) == []

        def interrupted() -> bool:
            os.kill(os.getpid(), signal.SIGTERM)
            return True

        assert lifecycle.wait_for_signal(lambda: None, interrupted, look_s=0.0)
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def test_airflow_and_mlflow_cannot_be_given_one_port(tmp_path: Path) -> None:
    settings = resolve(tmp_path, {"airflow_port": 4711, "mlflow_port": 4711}, {})
    with pytest.raises(StackError, match="cannot share port 4711"):
        preflight.check_ports(settings, set())
    preflight.check_ports(resolve(tmp_path, {"airflow_port": 0, "mlflow_port": 0}, {}), set())


def test_a_refusal_leaves_what_an_earlier_stack_left_running(layout: Layout) -> None:
    _kill_supervisor(layout)
    before = {member.pid for member in processes.members(layout.home)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ports = {"airflow_port": port, "mlflow_port": 0}
        settings = resolve(layout.home, {"slots": 1, **ports}, {})
        with pytest.raises(StackError, match=f"Port {port}"):
            lifecycle.up(settings, lambda _: None)
    assert {member.pid for member in processes.members(layout.home)} == before

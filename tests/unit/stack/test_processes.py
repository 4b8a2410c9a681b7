from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hermes_ops.stack import launch, processes
from hermes_ops.stack.layout import Layout
from hermes_ops.trial.processes.record import ProcessRecord
from hermes_ops.trial.processes.tree import Process, process_of

SLEEP = "print('ready', flush=True); import time; time.sleep(60)"
READY = f"""import os, signal
def end(*_):
    print("terminated", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
{SLEEP}"""
IGNORES_TERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process with extra variables in its environment and wait until it is ready."""
    started: list[subprocess.Popen[str]] = []

    def run(
        code: str = READY, arguments: tuple[str, ...] = (), **variables: str
    ) -> subprocess.Popen[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HERMES_")}
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env={**clean, **variables},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def running(process: subprocess.Popen[str]) -> Process:
    found = process_of(process.pid)
    assert found is not None
    return found


def _end_of(process: subprocess.Popen[str]) -> str:
    """Return "terminated", or "killed" if the process could not say anything at its end."""
    assert process.stdout is not None
    return process.stdout.read().strip() or "killed"


def test_a_process_with_our_marks_is_ours(tmp_path: Path, start: Start) -> None:
    ours = start(HERMES_HOME=str(tmp_path), HERMES_PROGRAM="mlflow")
    assert [(m.pid, m.program) for m in processes.members(tmp_path)] == [(ours.pid, "mlflow")]


def test_what_a_trial_has_started_is_its_own_whatever_it_calls_itself(
    tmp_path: Path, start: Start
) -> None:
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], env={{}})"
    parent = start(f"{code}; {SLEEP}", HERMES_HOME=str(tmp_path), HERMES_TRIAL="4")
    child = psutil.Process(parent.pid).children()[0]
    assert {(m.pid, m.trial) for m in processes.members(tmp_path)} == {
        (parent.pid, "4"),
        (child.pid, "4"),
    }
    child.kill()


def test_what_a_trials_reaper_has_written_down_is_found_and_ended(
    tmp_path: Path, start: Start
) -> None:
    left, other, ended = start(SLEEP), start(SLEEP), start(SLEEP)
    record = ProcessRecord(tmp_path / "processes" / "a.json", "7")
    known, gone = running(left), running(ended)
    ended.kill()
    ended.wait()
    before = running(other).started_ticks - 1_000
    taken = Process(other.pid, before)  # its id was that of a process that has ended
    record.write([known, gone, taken])
    found = [(m.pid, m.trial, m.supervises_trial) for m in processes.members(tmp_path)]
    assert found == [(left.pid, "7", False)]
    assert processes.end(tmp_path) == 1
    assert process_of(left.pid) is None
    assert other.poll() is None
    assert processes.members(tmp_path) == []
    assert not record.path.exists()


def test_a_record_of_another_boot_names_no_process(tmp_path: Path, start: Start) -> None:
    record = ProcessRecord(tmp_path / "processes" / "a.json", "7")
    record.write([running(start(SLEEP))])
    document = json.loads(record.path.read_text())
    record.path.write_text(json.dumps({**document, "boot": "another"}))
    assert processes.members(tmp_path) == []


def test_a_trial_counts_once_with_its_helper_and_its_script() -> None:
    def member(pid: int, parent: int, supervises: bool = True) -> processes.HomeProcess:
        process: Any = SimpleNamespace(pid=pid, ppid=lambda: parent)
        return processes.HomeProcess(process, "", "0", supervises)

    first = [member(10, 1), member(11, 10), member(12, 11, supervises=False)]
    second = [member(20, 1), member(21, 20)]
    assert [m.pid for m in processes.leaders([*first, *second])] == [10, 20]


def test_a_shell_that_only_exports_the_home_is_not_ours(tmp_path: Path, start: Start) -> None:
    start(HERMES_HOME=str(tmp_path))
    assert processes.members(tmp_path) == []


def test_a_process_of_another_home_is_not_ours(tmp_path: Path, start: Start) -> None:
    start(HERMES_HOME=str(tmp_path / "other"), HERMES_PROGRAM="mlflow")
    assert processes.members(tmp_path) == []


def test_a_process_whose_home_is_another_folder_of_that_name_is_not_ours(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(HERMES_HOME=str(tmp_path), HERMES_PROGRAM="mlflow")
    (tmp_path / "other").mkdir()
    real = os.stat

    def stat(path: Path, *arguments: Any, **named: Any) -> os.stat_result:
        inside = str(path).startswith("/proc/") and str(path).endswith(str(tmp_path))
        return real(tmp_path / "other" if inside else path, *arguments, **named)

    monkeypatch.setattr(os, "stat", stat)
    assert processes.members(tmp_path) == []


def test_a_program_is_its_first_process_not_those_that_it_started(
    tmp_path: Path, start: Start
) -> None:
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}])"
    marks = {"HERMES_HOME": str(tmp_path), "HERMES_PROGRAM": "scheduler"}
    parent = start(f"{child}; {SLEEP}", **marks)
    found = processes.members(tmp_path)
    assert len(found) == 2
    assert [m.pid for m in processes.programs(found)] == [parent.pid]
    processes.end(tmp_path)


def test_a_process_that_ignores_sigterm_is_killed(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PROGRAM_GRACE_S", 0.1)
    stubborn = start(IGNORES_TERM, HERMES_HOME=str(tmp_path), HERMES_PROGRAM="mlflow")
    assert processes.end(tmp_path) == 1
    assert _end_of(stubborn) == "killed"


def test_hermes_trial_is_asked_to_stop_and_its_script_is_left_to_it(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "TRIAL_GRACE_S", 3.0)
    marks = {"HERMES_HOME": str(tmp_path), "HERMES_TRIAL": "3"}
    leader = start(READY, ("-m", "hermes_ops.trial"), **marks)
    script = start(READY, **marks)
    processes.end_trials(processes.members(tmp_path))
    assert _end_of(leader) == "terminated"
    assert _end_of(script) == "killed"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["/venv/bin/python", "-m", "hermes_ops.trial", "--", "python", "train.py"], True),
        (["/venv/bin/python", "/venv/bin/hermes-trial", "--", "python", "train.py"], True),
        (["python", "train.py", "--note", "hermes-trial"], False),
        (["python", "-P", "-m", "hermes_ops.trial.standby"], False),
    ],
)
def test_the_command_line_tells_hermes_trial_from_the_users_script(
    command: list[str], expected: bool
) -> None:
    assert processes.is_trial_command(command) is expected


def test_the_launcher_ends_only_what_its_own_program_left(tmp_path: Path, start: Start) -> None:
    marks = {"HERMES_HOME": str(tmp_path)}
    left = start(HERMES_PROGRAM="mlflow", **marks)
    other = start(HERMES_PROGRAM="api-server", **marks)
    assert launch.reap(tmp_path, "mlflow") == 1
    assert _end_of(left) == "terminated"
    assert psutil.pid_exists(other.pid)


def test_the_scheduler_that_comes_back_ends_trials_without_a_program(
    tmp_path: Path, start: Start
) -> None:
    marks = {"HERMES_HOME": str(tmp_path), "HERMES_TRIAL": "0"}
    trial = start(READY, ("-m", "hermes_ops.trial"), **marks)
    assert launch.reap(tmp_path, "scheduler") == 1
    assert _end_of(trial) == "terminated"


def test_the_keeper_of_standby_interpreters_ends_no_live_trial(
    tmp_path: Path, start: Start
) -> None:
    serving = start(HERMES_HOME=str(tmp_path), HERMES_PROGRAM="standby")
    assert launch.reap(tmp_path, "standby") == 0
    assert serving.poll() is None


def test_the_launcher_becomes_the_program_with_its_environment(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.create()
    code = "import os; print(os.environ['MARK'], 'HERMES_OTHER' in os.environ, os.nice(0))"
    one = {"command": [sys.executable, "-c", code], "environment": {"MARK": "here"}, "nice": 3}
    table = {"one": one, "old": {k: v for k, v in one.items() if k != "nice"}}
    layout.programs.write_text(json.dumps(table))
    environment, mine = {**os.environ, "HERMES_OTHER": "1"}, os.nice(0)
    for name, nice in (("one", min(19, mine + 3)), ("old", mine)):
        command = [sys.executable, "-m", "hermes_ops.stack.launch", "--home", str(tmp_path), name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.split() == ["here", "False", str(nice)]

"""The standby keeper: a script in a standby interpreter is as in a fresh one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hermes_ops.trial.relevant import relevant

ROOT = Path(__file__).parents[3]

SCRIPT = """
import os, sys, json, threading
import fakeheavy
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "cwd": os.getcwd(), "path": sys.path,
    "main": sys.modules["__main__"].__file__, "env": dict(os.environ), "exe": sys.executable,
    "thread": threading.current_thread() is threading.main_thread(),
}), flush=True)
print("loss=1")
if "code" in sys.argv[1]:
    sys.exit(3)
if "raise" in sys.argv[1]:
    raise ValueError("oh dear")
if "sleep" in sys.argv[1]:
    print("pid", os.getpid(), flush=True)
    import time; time.sleep(60)
"""


THREADED = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


def wait_for(condition: Callable[[], object], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class World:
    """A keeper and trials that use it.

    `copies`: what the script imports starts no thread, so that the standby can be copied.
    """

    def __init__(self, base: Path, copies: bool) -> None:
        self.base, self.copies = base, copies
        self.socket = base / "standby.sock"
        self.script = base / "train.py"
        self.script.write_text(SCRIPT)
        (base / "lib").mkdir()
        (base / "lib" / "sklearn.py").write_text("" if copies else THREADED)
        (base / "lib" / "fakeheavy.py").write_text("import sklearn")
        self.environment = {**os.environ, "PYTHONPATH": str(base / "lib")}
        self.keeper = subprocess.Popen(
            [sys.executable, "-m", "hermes_ops.trial.standby", *self.options()],
            cwd=ROOT,
            env=self.environment,
        )
        self.started: list[subprocess.Popen[bytes]] = []
        wait_for(self.socket.exists)

    def options(self) -> list[str]:
        return ["--socket", str(self.socket), "--slots", "1"]

    def start(self, name: str, word: str, standby: bool = True) -> subprocess.Popen[bytes]:
        options = ["--standby", str(self.socket)] if standby else []
        command = [sys.executable, "-m", "hermes_ops.trial", "--dir", str(self.base / name)]
        command += ["--epoch", "1", "--directory", str(self.base)]
        process = subprocess.Popen(
            [*command, *options, "--", sys.executable, "train.py", word],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**self.environment, "PYTHONPATH": f"{ROOT}:{self.base / 'lib'}"},
        )
        self.started.append(process)
        return process

    def run(self, name: str, word: str, standby: bool = True) -> tuple[int, str]:
        process = self.start(name, word, standby)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output.decode()

    def children(self) -> list[int]:
        """The interpreters: each is below a reaper of its own."""
        reapers = psutil.Process(self.keeper.pid).children()
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child.pid for reaper in reapers for child in reaper.children()]
        return []

    def ready(self) -> None:
        """Wait until a standby has done its imports: it then sleeps on its socket."""
        wait_for(lambda: [_waits(pid) for pid in self.children()] == [True])
        time.sleep(0.2)  # the keeper hears of it

    def close(self) -> None:
        self.keeper.kill()
        self.keeper.wait()
        for process in self.started:
            process.kill()
            process.wait()
            process.stdout.close()


def _waits(pid: int) -> bool:
    """True when the process sleeps on a socket, False when it does anything else or has ended."""
    try:
        place = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return False
    return "unix_stream" in place or "recv" in place


@pytest.fixture(params=[True, False], ids=["copied", "used up"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, request.param)
    yield world
    world.close()


def facts(output: str) -> dict:
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    for name in ("HERMES_SEGMENT", "HERMES_STARTED_S"):
        found["env"].pop(name)
    return json.loads(
        json.dumps(found).replace("/standby-run", "/trial").replace("/fresh", "/trial")
    )


def taught(world: World) -> None:
    world.run("teacher", "x")
    world.ready()


def test_a_script_in_a_standby_interpreter_is_as_in_a_fresh_one(world: World) -> None:
    taught(world)
    standby = world.children()[0]
    process = world.start("standby-run", "sleep-and-more")
    line = process.stdout.readline().decode()
    process.stdout.readline()
    pid = int(process.stdout.readline().split()[1])
    assert pid in world.children()
    assert (pid == standby, alive(standby)) == (not world.copies, True)
    process.terminate()
    assert process.wait(20) == 75
    _, fresh = world.run("fresh", "code", standby=False)
    ours, theirs = facts(line), facts(fresh)
    assert ours.pop("argv") == ["train.py", "sleep-and-more"]
    assert theirs.pop("argv") == ["train.py", "code"]
    assert ours == theirs


@pytest.mark.parametrize(("word", "code", "text"), [("code", 3, ""), ("raise", 1, "oh dear")])
def test_exit_codes_and_tracebacks_are_those_of_a_fresh_start(
    world: World, word: str, code: int, text: str
) -> None:
    taught(world)
    standby = world.children()[0]
    ours, output = world.run("standby-run", word)
    assert alive(standby) == world.copies
    theirs, expected = world.run("fresh", word, standby=False)
    assert ours == theirs == code
    assert output.split("loss=1")[1] == expected.split("loss=1")[1]
    assert text in output


def test_the_trial_dies_with_its_supervisor_and_with_the_keeper(world: World) -> None:
    for name, end in (("a", "supervisor"), ("b", "keeper")):
        taught(world) if name == "a" else world.ready()
        process = world.start(name, "sleep")
        while b"pid" not in (line := process.stdout.readline()):
            pass
        pid = int(line.split()[1])
        assert pid in world.children()
        if end == "supervisor":
            process.kill()
        else:
            world.keeper.kill()
            assert process.wait(20) == 75
        wait_for(lambda pid=pid: not alive(pid))


def test_without_a_keeper_a_trial_starts_plainly(world: World) -> None:
    world.keeper.send_signal(signal.SIGTERM)
    world.keeper.wait(30)
    assert not world.socket.exists()
    code, output = world.run("plain", "x")
    assert code == 0
    assert "loss=1" in output


def test_only_its_user_can_open_the_socket(world: World) -> None:
    assert world.socket.stat().st_mode & 0o777 == 0o600


def test_a_message_that_is_none_does_not_stop_the_keeper(world: World) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(world.socket))
        client.sendall(b"%16d" % 5 + b"rubbi")
    taught(world)
    assert world.run("after", "x")[0] == 0


def test_a_template_serves_trial_after_trial(tmp_path: Path) -> None:
    world = World(tmp_path, copies=True)
    try:
        taught(world)
        template = world.children()
        for name in ("first", "second"):
            assert world.run(name, "code")[0] == 3
            assert world.children() == template
    finally:
        world.close()


def test_a_standby_that_still_imports_takes_the_order(tmp_path: Path) -> None:
    world = World(tmp_path, copies=False)
    try:
        (tmp_path / "lib" / "sklearn.py").write_text("import time\ntime.sleep(3)\n" + THREADED)
        world.run("teacher", "x")
        wait_for(world.children)
        standby = world.children()[0]
        process = world.start("early", "sleep")
        while b"pid" not in (line := process.stdout.readline()):
            pass
        assert int(line.split()[1]) == standby
    finally:
        world.close()


def test_only_what_imports_depend_on_makes_a_profile() -> None:
    environment = {"TF_X": "1", "HERMES_TRIAL": "3", "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM": "2"}
    assert relevant(environment) == (("OMP_NUM", "2"), ("TF_X", "1"))

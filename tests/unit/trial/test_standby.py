"""The standby server: a script in a standby interpreter is as in a fresh one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_ops.trial.hook import import_variables
from tests.standby_server import StandbyServer, wait_for
from tests.unit.trial.supervised import output_of

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
if "waits" in sys.argv[1]:
    import subprocess
    subprocess.call([sys.executable, "child.py"])
"""

CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (open("saved", "w").close(), sys.exit()))
print("waiting", flush=True)
time.sleep(60)
"""

THREADED = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def has_ended(pid: int) -> bool:
    return not alive(pid)


class World:
    """A standby server and trials that use it.

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
        self.path = str(base / "lib")
        self.environment = {**os.environ, "PYTHONPATH": self.path}
        self.standby = StandbyServer(self.socket, self.environment)
        self.server = self.standby.process
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, word: str, standby: bool = True) -> subprocess.Popen[bytes]:
        options = ["--standby", str(self.socket)] if standby else []
        command = [sys.executable, "-m", "hermes_ops.trial", "--dir", str(self.base / name)]
        command += ["--epoch", "1", "--directory", str(self.base)]
        process = subprocess.Popen(
            [*command, *options, "--", sys.executable, "train.py", word],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**self.environment, "PYTHONPATH": f"{ROOT}:{self.path}"},
        )
        self.started.append(process)
        return process

    def run(self, name: str, word: str, standby: bool = True) -> tuple[int, str]:
        process = self.start(name, word, standby)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output.decode()

    def children(self) -> list[int]:
        return self.standby.interpreters()

    def ready(self) -> None:
        self.standby.await_ready()

    def close(self) -> None:
        self.standby.close()
        for process in self.started:
            process.kill()
            process.wait()
            output_of(process).close()


@pytest.fixture(params=[True, False], ids=["copied", "used up"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, request.param)
    yield world
    world.close()


def facts(output: str) -> dict[str, Any]:
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    for name in ("HERMES_SEGMENT", "HERMES_STARTED_S", "HERMES_TEMPORARY_DIR", "TMPDIR"):
        found["env"].pop(name, None)
    text = json.dumps(found).replace("/standby-run", "/trial").replace("/fresh", "/trial")
    same_folder: dict[str, Any] = json.loads(text)
    return same_folder


def taught(world: World) -> None:
    world.run("teacher", "x")
    world.ready()


def test_a_script_in_a_standby_interpreter_is_as_in_a_fresh_one(world: World) -> None:
    taught(world)
    standby = world.children()[0]
    process = world.start("standby-run", "sleep-and-more")
    line = output_of(process).readline().decode()
    output_of(process).readline()
    pid = int(output_of(process).readline().split()[1])
    assert pid in world.children()
    assert (pid == standby, alive(standby)) == (not world.copies, True)
    process.terminate()
    assert process.wait(60) == 75
    _, fresh = world.run("fresh", "code", standby=False)
    ours, theirs = facts(line), facts(fresh)
    assert ours.pop("argv") == ["train.py", "sleep-and-more"]
    assert theirs.pop("argv") == ["train.py", "code"]
    assert ours == theirs


@pytest.mark.parametrize("path", ["own", "./lib/../own:"])
def test_a_relative_path_of_modules_begins_in_the_working_directory(
    world: World, path: str
) -> None:
    (world.base / "own").mkdir()
    (world.base / "lib" / "fakeheavy.py").rename(world.base / "own" / "fakeheavy.py")
    world.path += f":{path}"
    taught(world)
    standby = world.children()[0]
    code, output = world.run("standby-run", "code")
    assert alive(standby) == world.copies, "it was not used"
    _, fresh = world.run("fresh", "code", standby=False)
    assert code == 3, output
    assert facts(output)["path"] == facts(fresh)["path"]


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


def test_the_trial_dies_with_its_supervisor_and_with_the_standby_server(world: World) -> None:
    for name, end in (("a", "supervisor"), ("b", "server")):
        taught(world) if name == "a" else world.ready()
        process = world.start(name, "sleep")
        while b"pid" not in (line := output_of(process).readline()):
            pass
        pid = int(line.split()[1])
        assert pid in world.children()
        if end == "supervisor":
            process.kill()
        else:
            world.server.kill()
            assert process.wait(60) == 75
        wait_for(partial(has_ended, pid))


def test_what_a_script_waits_for_gets_the_signal_to_stop_before_the_script(world: World) -> None:
    (world.base / "child.py").write_text(CHILD)
    taught(world)
    standby = world.children()[0]
    process = world.start("standby-run", "waits")
    while b"waiting" not in output_of(process).readline():
        pass
    process.terminate()
    assert process.wait(60) == 75
    assert alive(standby) == world.copies, "it was not used"
    assert (world.base / "saved").exists()


def test_without_a_keeper_a_trial_starts_plainly(world: World) -> None:
    world.server.send_signal(signal.SIGTERM)
    world.server.wait(60)
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
        while b"pid" not in (line := output_of(process).readline()):
            pass
        assert int(line.split()[1]) == standby
    finally:
        world.close()


def test_an_interpreter_that_waits_holds_no_secret_of_the_trial_that_taught_it(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, copies=True)
    try:
        references = {"LICENCE": "{env:MINE}"}
        own = {"HERMES_REFERENCES": json.dumps(references), "MINE": "hush-hush-1"}
        world.environment.update(own, API_TOKEN="hush-hush-2")
        code, output = world.run("teacher", "x")
        assert code == 0
        world.ready()
        waiting = psutil.Process(world.children()[0]).environ()
        assert "hush-hush" not in " ".join(waiting.values())
        world.environment["MINE"] = "hush-hush-3"
        code, output = world.run("next", "x")
        assert code == 0
        assert '"LICENCE": "***"' in output
        assert "hush-hush" not in output
    finally:
        world.close()


def test_a_script_is_compiled_as_it_is_written(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def f(rate: float) -> None: ...\nprint(f.__annotations__['rate'])\n")
    code = f"from hermes_ops.trial.standby.interpreter import _run; _run({str(script)!r})"
    fresh, ours = (
        subprocess.run(
            [sys.executable, *words], cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout
        for words in ([str(script)], ["-c", code])
    )
    assert ours == fresh == "<class 'float'>\n"


def test_only_what_imports_depend_on_makes_a_profile() -> None:
    environment = {"TF_X": "1", "HERMES_TRIAL": "3", "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM": "2"}
    assert import_variables(environment) == (("OMP_NUM", "2"), ("TF_X", "1"))


@pytest.mark.parametrize("name", ["SCIPY_ARRAY_API", "PYTORCH_JIT", "KMP_AFFINITY", "NPY_X"])
def test_what_numerical_packages_read_when_they_are_imported_makes_a_profile(name: str) -> None:
    assert import_variables({name: "1", "SOMETHING": "else"}) == ((name, "1"),)

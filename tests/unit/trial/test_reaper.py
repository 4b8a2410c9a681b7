"""Whatever a trial starts ends with it, however it tries to get away and however the trial ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hermes_ops.trial.outcome import INFRASTRUCTURE
from hermes_ops.trial.processes.record import forget_ended, recorded
from hermes_ops.trial.processes.tree import (
    Descendants,
    Process,
    descendants,
    is_alive,
    kill,
    process_of,
)
from tests.standby_server import StandbyServer, wait_for
from tests.unit.trial.supervised import SupervisedTrial, output_of

ROOT = Path(__file__).parents[3]

SCRIPT = """
import ctypes, os, sys, time
import sklearn
end, pids = sys.argv[1], os.path.join(os.environ["HERMES_TRIAL_DIR"], "pids")

def helper(*escapes):
    if os.fork():
        return
    for escape in escapes:
        escape()
    null = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(null, handle)
    with open(pids, "a") as stream:
        stream.write(f"{os.getpid()}\\n")
    if another_program in escapes:
        os.execve("/bin/sleep", ["[kworker/0:1]", "600"], {})
    time.sleep(600)
    os._exit(0)

def orphan():
    if os.fork():
        os._exit(0)

def rename():
    ctypes.CDLL(None).prctl(15, b"sshd", 0, 0, 0)

def another_program():
    pass

helper(os.setsid)
helper(os.setsid, orphan)
helper(lambda: os.setpgid(0, 0))
helper(rename, os.setsid, orphan)
helper(os.setsid, orphan, another_program)
while not os.path.exists(pids) or len(open(pids).read().split()) < 5:
    time.sleep(0.01)
with open(os.environ["HERMES_CHECKPOINT_DIR"] + "/state", "w") as stream:
    stream.write("1")
print("loss=1", flush=True)
print("started", os.getpid(), flush=True)
if end == "waits":
    time.sleep(600)
sys.exit(3 if end == "fails" else 0)
"""
THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(9**6,), daemon=True)"


class World:
    """A trial whose script starts five processes that get away; `place`: where it runs."""

    def __init__(self, base: Path, place: str) -> None:
        self.base, self.place = base, place
        self.home, self.folder, self.socket = base / "home", base / "trial", base / "s.sock"
        (base / "train.py").write_text(SCRIPT)
        (base / "lib").mkdir()
        started = "" if place == "copied" else f"{THREADED}.start()"
        (base / "lib" / "sklearn.py").write_text(started)
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("HERMES_")},
            "PYTHONPATH": f"{ROOT}:{base / 'lib'}",
            "HERMES_HOME": str(self.home),
            "HERMES_TRIAL": "0",
        }
        self.started: list[subprocess.Popen[bytes]] = []
        self.bystander = self._open([sys.executable, "-c", "import time; time.sleep(600)"])
        if place != "plain":
            self._teach()

    def _open(
        self, command: list[str], output: int | None = None, errors: int | None = None
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command, cwd=ROOT, env=self.environment, stdout=output, stderr=errors
        )
        self.started.append(process)
        return process

    def _teach(self) -> None:
        """Have the imports of such a script done by a standby interpreter."""
        self.standby = StandbyServer(self.socket, self.environment)
        self.server = self.standby.process
        self.started.append(self.server)
        process = self.start("ends", folder=self.base / "teacher")
        process.communicate(timeout=60)
        self.standby.await_ready()
        self.taught = self.standby.interpreters()

    def start(self, end: str, folder: Path | None = None) -> subprocess.Popen[bytes]:
        options = ["--dir", str(folder or self.folder), "--epoch", "1", "--objective", "loss"]
        options += ["--directory", str(self.base), "--lock-wait", "20"]
        if self.place != "plain":
            options += ["--standby", str(self.socket)]
        command = [sys.executable, "-m", "hermes_ops.trial", *options]
        return self._open(
            [*command, "--", sys.executable, "train.py", end],
            output=subprocess.PIPE,
            errors=subprocess.STDOUT,
        )

    def begun(self, end: str) -> subprocess.Popen[bytes]:
        """A trial whose five processes run; `script` is then the script's own."""
        process = self.start(end)
        for line in output_of(process):
            if line.startswith(b"started"):
                self.script = int(line.split()[1])
                return process
        raise AssertionError("it never started")

    def helpers(self) -> list[Process]:
        """Those of the five that live."""
        pids = [int(pid) for pid in (self.folder / "pids").read_text().split()]
        return [process for pid in pids if (process := process_of(pid)) is not None]

    def reaper(self) -> int:
        return psutil.Process(self.script).ppid()

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        with contextlib.suppress(OSError):
            for helper in self.helpers():
                kill(helper)


@pytest.fixture(params=["plain", "copied", "used up"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, request.param)
    yield world
    world.close()


def test_nothing_that_a_script_has_started_outlives_it(world: World) -> None:
    for end, code in (("ends", 0), ("fails", 3), ("waits", 75)):
        (world.folder / "result.json").unlink(missing_ok=True)
        (world.folder / "pids").unlink(missing_ok=True)
        process = world.begun(end)
        if end == "waits":
            assert len(world.helpers()) == 5
            process.terminate()
        process.communicate(timeout=60)
        assert (end, process.returncode) == (end, code)
        assert world.helpers() == []
        assert list(recorded(world.home)) == []
    assert world.bystander.poll() is None
    if world.place == "copied":
        assert world.standby.interpreters() == world.taught


@pytest.mark.parametrize("killed", ["hermes-trial", "reaper", "script", "server"])
def test_nothing_outlives_a_trial_of_which_a_part_is_killed(world: World, killed: str) -> None:
    if killed == "server" and world.place == "plain":
        pytest.skip("no standby server")
    process = world.begun("waits")
    assert len(world.helpers()) == 5
    match killed:
        case "hermes-trial":
            process.kill()
        case "reaper":
            os.kill(world.reaper(), signal.SIGKILL)
        case "script":
            os.kill(world.script, signal.SIGKILL)
        case "server":
            world.server.kill()
    process.communicate(timeout=60)
    wait_for(lambda: world.helpers() == [])
    wait_for(lambda: process_of(world.script) is None)
    assert world.bystander.poll() is None
    if killed in ("reaper", "server"):
        assert process.returncode == 75


SHARING = """
import os, time
from multiprocessing import shared_memory
shared = shared_memory.SharedMemory(create=True, size=1000)
with open(os.environ["HERMES_CHECKPOINT_DIR"] + "/state", "w") as stream:
    stream.write("1")
print("shared", shared.name, flush=True)
END
"""


@pytest.mark.parametrize("end", ["stopped", "killed", "failed"])
def test_shared_memory_of_a_script_does_not_outlive_it(tmp_path: Path, end: str) -> None:
    trial = SupervisedTrial(tmp_path)
    ending = "raise RuntimeError('a bad shard')" if end == "failed" else "time.sleep(600)"
    trial.script.write_text(SHARING.replace("END", ending))
    process = trial.supervise([], [sys.executable, str(trial.script)])
    name = output_of(process).readline().split()[1].decode()
    assert end == "failed" or Path("/dev/shm", name).exists()
    if end == "stopped":
        process.terminate()
    elif end == "killed":
        process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: not Path("/dev/shm", name).exists())
    trial.close()
    if end == "failed":
        assert trial.result["reason"] == "exit code 1: RuntimeError: a bad shard"


def test_what_outlives_a_kill_of_everything_is_known_and_ended_by_the_next_segment(
    world: World,
) -> None:
    process = world.begun("waits")
    helpers = set(world.helpers())
    wait_for(lambda: helpers <= {p for _, p in recorded(world.home)})
    reapers = [p.pid for p in psutil.Process(process.pid).children()]
    everything = [process.pid, world.reaper(), *reapers]
    if world.place != "plain":
        everything.append(world.server.pid)
    for pid in everything:
        os.kill(pid, signal.SIGSTOP)  # at one moment: none sees another go
    for pid in everything:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    wait_for(lambda: process_of(world.script) is None)
    assert set(world.helpers()) == helpers, "the test itself has ended some"
    forget_ended(world.home)
    assert {p for _, p in recorded(world.home)} == helpers
    world.place = "plain"
    (world.folder / "pids").unlink()
    world.start("ends").communicate(timeout=60)
    assert not any(is_alive(helper) for helper in helpers)
    assert list(recorded(world.home)) == []
    assert world.bystander.poll() is None


STARTER = """
import os, sys
from hermes_ops.trial.processes.reaper import PlainChild, fork_reaper
reaper = fork_reaper(at_end=lambda: open(sys.argv[1], "w").close())
child = PlainChild(reaper, ["true"], dict(os.environ), None)
while child.poll() is None:
    pass
os._exit(0)
"""


def test_a_starter_that_is_killed_after_its_script_s_end_has_its_rest_ended(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    subprocess.run([sys.executable, "-c", STARTER, str(ended)], check=True)
    wait_for(ended.exists)


def test_a_process_whose_id_was_given_away_is_not_killed() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        known = process_of(process.pid)
        assert known is not None
        kill(Process(known.pid, known.started_ticks + 1))
        kill(known, signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
        assert process_of(process.pid) is None


def test_a_process_whose_first_thread_has_ended_is_alive_and_can_be_killed() -> None:
    ends = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    ends += "; ctypes.CDLL(None).pthread_exit(None)"
    with subprocess.Popen([sys.executable, "-c", ends]) as process:
        state = Path(f"/proc/{process.pid}/stat")
        wait_for(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z")
        known = process_of(process.pid)
        assert known in descendants(os.getpid())
        assert known is not None
        kill(known)
        assert process.wait(60) == -signal.SIGKILL
        assert process_of(process.pid) is None


def test_descendants_are_found_by_their_parents_alone_and_each_time_the_same() -> None:
    watched = Descendants(os.getpid())
    before = set(descendants(os.getpid()))  # other tests have helpers of their own
    assert set(watched.find_live()) == before
    child = "import subprocess, time; subprocess.Popen(['sleep', '60'], env={}); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", child], start_new_session=True) as process:
        wait_for(lambda: len(set(watched.find_live()) - before) >= 2)
        found = set(watched.find_live())
        assert found == set(descendants(os.getpid()))
        assert set(descendants(os.getpid(), without=[process.pid])) == before
        for one in found - before:
            kill(one)
    wait_for(lambda: set(watched.find_live()) == before)


def test_the_record_lies_where_the_next_start_looks(tmp_path: Path) -> None:
    world = World(tmp_path, "plain")
    try:
        world.begun("waits")
        wait_for(lambda: list(recorded(world.home)))
        (path,) = (world.home / "processes").glob("*.json")
        assert json.loads(path.read_text())["trial"] == "0"
    finally:
        world.close()


REAPER_IS_KILLED_AT_ONCE = """
import os, signal, sys
from hermes_ops.trial import segment
fork_reaper = segment.fork_reaper
def fork_and_kill(**options):
    reaper = fork_reaper(**options)
    os.kill(reaper.pid, signal.SIGKILL)
    os.waitpid(reaper.pid, 0)
    return reaper
segment.fork_reaper = fork_and_kill
sys.exit(segment.run(sys.argv[1:]))
"""


def test_a_reaper_that_is_killed_before_the_script_starts_is_no_failure_of_it(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", REAPER_IS_KILLED_AT_ONCE, "--dir", str(tmp_path)]
    words = ["--epoch", "1", "--objective", "loss", "--", sys.executable, "-c", "pass"]
    ended = subprocess.run([*command, *words], capture_output=True, check=False, text=True)
    assert ended.returncode == INFRASTRUCTURE, ended.stdout + ended.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["outcome"], result["cause"]) == ("interrupted", "")

"""Several workers in standby interpreters, or as many of them as there are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hermes_ops.trial.processes.record import own_record
from tests.standby_server import StandbyServer, wait_for
from tests.unit.trial.supervised import ROOT, output_of

SCRIPT = """
import os, sys, time
import sklearn
folder, rank = os.environ["HERMES_TRIAL_DIR"], os.environ.get("HERMES_RANK", "0")
print("loss=1", flush=True)
if sys.argv[1] == "teach":
    sys.exit(0)
with open(os.path.join(folder, ".pid-" + rank), "w") as stream:
    stream.write(str(os.getpid()))
os.rename(os.path.join(folder, ".pid-" + rank), os.path.join(folder, "pid-" + rank))
while not all(os.path.exists(os.path.join(folder, "pid-%d" % n)) for n in range(2)):
    time.sleep(0.01)
print("together", flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
if rank == sys.argv[1]:
    sys.exit(3)
"""
THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(9**6,), daemon=True)"


class World:
    """A standby server with one interpreter, which can be copied or not."""

    def __init__(self, base: Path, copies: bool) -> None:
        self.base, self.folder, self.socket = base, base / "trial", base / "s.sock"
        (base / "train.py").write_text(SCRIPT)
        (base / "lib").mkdir()
        (base / "lib" / "sklearn.py").write_text("" if copies else f"{THREADED}.start()")
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("HERMES_")},
            "PYTHONPATH": f"{ROOT}:{base / 'lib'}",
        }
        self.standby = StandbyServer(self.socket, self.environment)
        self.started: list[subprocess.Popen[bytes]] = []
        self.start("teach", "teacher", workers=1).communicate(timeout=60)
        self.standby.await_ready()

    def start(self, word: str, name: str = "trial", workers: int = 2) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "hermes_ops.trial", "--dir", str(self.base / name)]
        command += ["--epoch", "1", "--directory", str(self.base), "--standby", str(self.socket)]
        command += ["--workers", str(workers), "--tf-config", "--", sys.executable, "train.py"]
        process = subprocess.Popen(
            [*command, word],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=self.environment,
        )
        self.started.append(process)
        return process

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def together(self, word: str) -> subprocess.Popen[bytes]:
        process = self.start(word)
        for line in output_of(process):
            if line == b"together\n":
                return process
        raise AssertionError("the workers never met")

    def close(self) -> None:
        self.standby.close()
        for process in self.started:
            process.kill()
            process.wait()
            output_of(process).close()


@pytest.fixture(params=[True, False], ids=["copied", "used up"])
def copies(request: pytest.FixtureRequest) -> bool:
    found: bool = request.param
    return found


@pytest.fixture
def world(tmp_path: Path, copies: bool) -> Iterator[World]:
    world = World(tmp_path, copies)
    yield world
    world.close()


def test_workers_start_in_standby_interpreters_as_far_as_there_are_any(
    world: World, copies: bool
) -> None:
    process = world.together("wait")
    interpreters = world.standby.interpreters()
    assert [world.pid(rank) in interpreters for rank in range(2)] == [True, copies]
    record = own_record(world.folder)
    pids = [world.pid(rank) for rank in range(2)]
    wait_for(lambda: set(pids) <= {p.pid for p in record.alive()})
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert not any(map(psutil.pid_exists, pids))
    wait_for(lambda: not list(world.folder.glob("processes*.json")))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_fails_in_an_interpreter_is_named(world: World, rank: int) -> None:
    process = world.start(str(rank))
    process.communicate(timeout=60)
    assert process.returncode == 3
    result = json.loads((world.folder / "result.json").read_text())
    assert f"rank {rank} of 2 failed first" in result["reason"]


@pytest.mark.parametrize("killed", ["hermes-trial", "server"])
def test_no_worker_outlives_hermes_trial_or_the_server(
    world: World, copies: bool, killed: str
) -> None:
    process = world.together("wait")
    pids = [world.pid(rank) for rank in range(2)]
    if killed == "hermes-trial":
        process.kill()
    else:
        os.kill(world.standby.process.pid, signal.SIGKILL)
        if not copies:  # the one that is left has its time; a second signal is a person's
            wait_for(lambda: not psutil.pid_exists(pids[0]))
            process.terminate()
        assert process.wait(60) == 75
    wait_for(lambda: not any(map(psutil.pid_exists, pids)))

"""hermes-trial with a store: a trial that goes on in another folder, as on another machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EPOCHS = 8

TRAINING = """
import json, os, random, signal, sys, time
folder = os.environ["HERMES_CHECKPOINT_DIR"]
EPOCHS = int(os.environ["HERMES_MAX_EPOCHS"])
pause = int(os.environ.get("PAUSE", "0"))
names = sorted(n for n in os.listdir(folder) if n.startswith("epoch-"))
state = {"epoch": 0, "loss": 1.0, "random": None}
if names:
    with open(os.path.join(folder, names[-1], "state.json")) as stream:
        state = json.load(stream)
draw = random.Random(7)
if state["random"]:
    draw.setstate((3, tuple(state["random"]), None))
for epoch in range(state["epoch"] + 1, EPOCHS + 1):
    state["loss"] *= draw.uniform(0.5, 0.99)
    state.update(epoch=epoch, random=draw.getstate()[1])
    fresh = os.path.join(folder, f".epoch-{epoch:03d}")
    os.mkdir(fresh)
    with open(os.path.join(fresh, "state.json"), "w") as stream:
        json.dump(state, stream)
    os.rename(fresh, os.path.join(folder, f"epoch-{epoch:03d}"))
    print(f"epoch={epoch} loss={state['loss']!r}", flush=True)
    if epoch == pause:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        print("pausing", flush=True)
        time.sleep(600)
"""


class World:
    """Folders as of several machines, and one store."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.script = base / "train.py"
        self.script.write_text(TRAINING)
        self.store = f"file://{base}/store"
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, node: str, epoch: int, **variables: str) -> subprocess.Popen[bytes]:
        ours = {
            "HERMES_CHECKPOINT_STORE": self.store,
            "HERMES_KEEP_CHECKPOINTS": "2",
            "HERMES_SWEEP": "digits",
            "HERMES_TRIAL": "3",
        }
        options = ["--dir", str(self.base / node), "--epoch", str(epoch), "--objective", "loss"]
        command = [sys.executable, "-m", "hermes_ops.trial", *options, "--max-epochs", str(EPOCHS)]
        process = subprocess.Popen(
            [*command, "--", sys.executable, str(self.script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **ours, **variables},
        )
        self.started.append(process)
        return process

    def run(self, node: str, epoch: int, **variables: str) -> tuple[int, str]:
        process = self.start(node, epoch, **variables)
        output, _ = process.communicate(timeout=240)
        return process.returncode, output.decode()

    def curve(self, node: str) -> list[tuple[int, float]]:
        path = self.base / node / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(m["step"], m["value"]) for m in map(json.loads, lines) if m["name"] == "loss"]

    def manifests(self) -> list[Path]:
        return list((self.base / "store" / "digits" / "3" / "copies").glob("*.json"))

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def says(process: subprocess.Popen[bytes], word: bytes) -> None:
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(f"{word!r} was never printed")


def wait_for(condition: Callable[[], object], limit_s: float = 240.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


def test_a_trial_that_is_stopped_goes_on_in_another_folder_with_the_same_curve(
    world: World,
) -> None:
    assert world.run("uninterrupted", 1, HERMES_CHECKPOINT_STORE="")[0] == 0
    first = world.start("node-a", 1, PAUSE="3")
    says(first, b"pausing")
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=240)
    assert first.returncode == 75
    code, output = world.run("node-b", 2)
    assert code == 0, output
    assert "comes from the store" in output
    curve = world.curve("node-a") + world.curve("node-b")
    assert [step for step, _ in curve] == list(range(1, EPOCHS + 1))
    assert curve == world.curve("uninterrupted")
    assert len(list((world.base / "node-b" / "checkpoints").iterdir())) <= 3


def test_a_machine_that_dies_loses_no_more_than_what_was_not_copied_yet(world: World) -> None:
    first = world.start("node-a", 1, PAUSE="4")
    says(first, b"pausing")
    wait_for(lambda: any("epoch-004" in m.read_text() for m in world.manifests()))
    first.kill()
    first.wait()
    code, output = world.run("node-b", 2)
    assert code == 0, output
    assert [step for step, _ in world.curve("node-b")] == list(range(5, EPOCHS + 1))


def test_a_trial_that_began_from_scratch_fetches_nothing(world: World) -> None:
    first = world.start("node-a", 1, PAUSE="2")
    says(first, b"pausing")
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=240)
    assert world.manifests()
    code, output = world.run("node-b", 2, HERMES_BEGAN_ANEW="2")
    assert code == 0, output
    assert [step for step, _ in world.curve("node-b")] == list(range(1, EPOCHS + 1))


def test_a_store_without_its_package_fails_the_trial_with_the_remedy(world: World) -> None:
    code, output = world.run("node-a", 1, HERMES_CHECKPOINT_STORE="nonsense://bucket")
    assert code == 1
    assert "failed: checkpoints.store nonsense://bucket" in output
    result = json.loads((world.base / "node-a" / "result.json").read_text())
    assert (result["outcome"], result["epoch"]) == ("failed", 1)


def test_a_store_that_cannot_be_written_does_not_fail_the_trial(world: World) -> None:
    (world.base / "store").write_text("a file in the way")
    code, output = world.run("node-a", 1)
    assert code == 0, output
    assert len(world.curve("node-a")) == EPOCHS

"""hermes-trial with a store: a trial that goes on in another folder, as on another machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import psutil
import pytest

from hermes_ops.airflow.trial.connections import storage_environment
from hermes_ops.trial.outcome import INFRASTRUCTURE
from tests.bucket import Bucket
from tests.unit.trial.supervised import output_of

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
        self.files: Any = fsspec.filesystem("file")
        self.variables: dict[str, str] = {}
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
            env={**os.environ, **ours, **self.variables, **variables},
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

    def manifests(self) -> list[str]:
        texts = []
        for path in self.files.glob(f"{self.store}/digits/3/copies/*.json"):
            with contextlib.suppress(FileNotFoundError):  # an older copy goes as a newer one comes
                texts.append(self.files.cat_file(path).decode())
        return texts

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
            output_of(process).close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


@pytest.fixture
def by_s3(world: World, s3: Bucket) -> World:
    """The world whose store is a bucket; its clients ask a server that is away once."""
    world.store, world.files = f"{s3.url}/{uuid.uuid4().hex}", s3.files()
    world.variables = {**s3.variables, "AWS_MAX_ATTEMPTS": "1"}
    return world


@pytest.fixture(params=["world", pytest.param("by_s3", marks=pytest.mark.heavy)])
def any_world(request: pytest.FixtureRequest) -> World:
    found: World = request.getfixturevalue(request.param)
    return found


def says(process: subprocess.Popen[bytes], word: bytes) -> bytes:
    """All until it says the word."""
    said = b""
    for line in output_of(process):
        said += line
        if word in line:
            return said
    raise AssertionError(f"{word!r} was never printed")


def wait_for(condition: Callable[[], object], limit_s: float = 240.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


def test_a_trial_that_is_stopped_goes_on_in_another_folder_with_the_same_curve(
    any_world: World,
) -> None:
    assert any_world.run("uninterrupted", 1, HERMES_CHECKPOINT_STORE="")[0] == 0
    first = any_world.start("node-a", 1, PAUSE="3")
    says(first, b"pausing")
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=240)
    assert first.returncode == 75
    code, output = any_world.run("node-b", 2)
    assert code == 0, output
    assert "comes from the store" in output
    curve = any_world.curve("node-a") + any_world.curve("node-b")
    assert [step for step, _ in curve] == list(range(1, EPOCHS + 1))
    assert curve == any_world.curve("uninterrupted")
    assert len(list((any_world.base / "node-b" / "checkpoints").iterdir())) <= 3


def test_a_machine_that_dies_loses_no_more_than_what_was_not_copied_yet(any_world: World) -> None:
    first = any_world.start("node-a", 1, PAUSE="4")
    says(first, b"pausing")
    wait_for(lambda: any("epoch-004" in m for m in any_world.manifests()))
    first.kill()
    first.wait()
    code, output = any_world.run("node-b", 2)
    assert code == 0, output
    assert [step for step, _ in any_world.curve("node-b")] == list(range(5, EPOCHS + 1))


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


@pytest.mark.heavy
def test_a_bucket_that_is_away_for_a_while_is_said_once_and_caught_up(
    by_s3: World, s3: Bucket
) -> None:
    with s3.away():
        first = by_s3.start("node-a", 1, PAUSE="4")
        said = says(first, b"are not copied to")
    wait_for(lambda: any("epoch-004" in m for m in by_s3.manifests()))
    first.send_signal(signal.SIGTERM)
    said += first.communicate(timeout=240)[0]
    assert said.count(b"are not copied to") == 1
    code, output = by_s3.run("node-b", 2)
    assert code == 0, output
    assert [step for step, _ in by_s3.curve("node-b")] == list(range(5, EPOCHS + 1))


@pytest.mark.heavy
def test_a_trial_that_cannot_learn_what_a_bucket_has_gives_its_gpus_back(
    by_s3: World, s3: Bucket
) -> None:
    with s3.away():
        code, output = by_s3.run("node-b", 2)
    assert code == INFRASTRUCTURE, output
    assert by_s3.curve("node-b") == []


@pytest.mark.heavy
@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_a_bucket_is_opened_by_the_right_keys_alone(by_s3: World, s3: Bucket, wrong: str) -> None:
    code, output = by_s3.run("node-a", 1, **{wrong: "wrong"})
    assert code == 0, output
    assert "cannot be read" in output
    assert s3.key not in output
    assert s3.secret not in output
    assert by_s3.manifests() == []


@pytest.mark.heavy
def test_the_keys_of_a_bucket_from_a_connection_are_in_no_log_no_file_and_no_command_line(
    by_s3: World, s3: Bucket
) -> None:
    by_s3.variables = storage_environment(connection(s3))
    first = by_s3.start("node-a", 1, PAUSE="3")
    said = says(first, b"pausing")
    family = psutil.Process(first.pid)
    lines = [" ".join(p.cmdline()) for p in (family, *family.children(recursive=True))]
    first.send_signal(signal.SIGTERM)
    said += first.communicate(timeout=240)[0]
    assert by_s3.manifests()
    files = [p.read_text() for p in by_s3.base.rglob("*") if p.is_file()]
    for key in (s3.key, s3.secret):
        assert not [text for text in (said.decode(), *lines, *files) if key in text]


def connection(s3: Bucket) -> Any:
    """As Airflow has it."""
    return SimpleNamespace(
        conn_id="bucket", conn_type="aws", login=s3.key, password=s3.secret,
        extra_dejson={"endpoint_url": s3.endpoint},
    )  # fmt: skip

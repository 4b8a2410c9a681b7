"""Trials of several workers, in the environment that `make horovod-env` builds.

HERMES_TEST_HOROVOD_PYTHON names another interpreter, such as that of `make horovod-env-keras2`;
with HERMES_TEST_HOROVOD_KERAS=keras the scripts import its Keras 2 in place of tf_keras.

The workers are forks of a standby interpreter, as under `hermes up`: TensorFlow and Horovod are
imported once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.horovod_env import PYTHON
from tests.horovod_python import VARIABLES as HOROVOD_VARIABLES
from tests.horovod_python import horovod_python
from tests.standby_server import Taught

ROOT = Path(__file__).parents[2]
KERAS = os.environ.get("HERMES_TEST_HOROVOD_KERAS", "tf_keras")
VARIABLES = {
    **HOROVOD_VARIABLES,
    "CUDA_VISIBLE_DEVICES": "",
    "TF_USE_LEGACY_KERAS": "1" if KERAS == "tf_keras" else "0",
}


IMPORTS = f"numpy, tensorflow, {KERAS}, horovod.tensorflow.keras"


class HorovodTrial:
    """A trial in a folder, and what its ranks have written down in it."""

    def __init__(self, base: Path, script: str, taught: Taught | None) -> None:
        base.mkdir(parents=True, exist_ok=True)
        self.folder, self.taught = base / "trial", taught
        self.text = script.replace("import tf_keras as keras", f"import {KERAS} as keras")
        self.script = base / "train.py" if taught is None else taught.script
        self.output = ""
        self.segments = 0

    def segment(self, workers: int, at: str = "none:-1:0:0", **variables: str) -> int:
        """Run a segment and return the exit code of hermes-trial.

        `at` is SIGNAL:EPOCH:BATCH:RANK, with * for all ranks.
        """
        self.segments += 1
        command = [sys.executable, "-m", "hermes_ops.trial", "--dir", str(self.folder)]
        command += ["--epoch", str(self.segments), "--objective", "loss"]
        command += ["--workers", str(workers)] if workers > 1 else []
        command += [] if self.taught is None else self.taught.options
        self.script.write_text(self.text)
        finished = subprocess.run(
            [*command, "--", str(PYTHON), str(self.script)],
            env={**os.environ, **VARIABLES, "AT": at, **variables},
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        self.output = finished.stdout + finished.stderr
        return finished.returncode

    def metrics(self) -> dict[tuple[str, int], float]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        found = [(m["name"], m["step"], m["value"]) for m in map(json.loads, lines)]
        assert len({(n, s) for n, s, _ in found}) == len(found), "a step is there twice"
        return {(n, s): v for n, s, v in found}

    def notes(self, rank: int) -> list[dict[str, Any]]:
        """What a rank has written down, over all segments: its batches, and its end."""
        text = (self.folder / f"notes-{rank}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def batches(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Each (epoch, batch) that a rank has trained at that size, in order."""
        notes = [n for n in self.notes(rank) if "batch" in n and n["size"] == size]
        return [(n["epoch"], n["batch"]) for n in notes]

    def rates(self, size: int) -> list[float]:
        """The learning rate of each batch of rank 0 at that size."""
        return [n["rate"] for n in self.notes(0) if "batch" in n and n["size"] == size]

    def weights(self, rank: int) -> list[float]:
        """What the weights are at the end."""
        found: list[float] = self.notes(rank)[-1]["weights"]
        return found

    @property
    def result(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return content


Trials = Callable[[str], HorovodTrial]


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Taught]:
    """A standby server that has imported what Horovod scripts import."""
    python = horovod_python()
    made = Taught(tmp_path_factory.mktemp("standby"))
    server = made.teach(str(python), IMPORTS, VARIABLES)
    yield made
    server.close()


def _maker(folder: Path, taught: Taught | None) -> Trials:
    made: list[HorovodTrial] = []

    def make(script: str) -> HorovodTrial:
        made.append(HorovodTrial(folder / str(len(made)), script, taught))
        return made[-1]

    return make


@pytest.fixture
def trials(taught: Taught, tmp_path: Path) -> Trials:
    """Make trials of a script whose workers are forks of a standby interpreter."""
    return _maker(tmp_path, taught)


@pytest.fixture
def plain_trials(taught: Taught, tmp_path: Path) -> Trials:
    """Make trials of a script whose workers are new processes."""
    return _maker(tmp_path, None)

"""Trials of PyTorch scripts, in the interpreter of `torch_python`.

The tests need no more than PyTorch there. Those with the marker `gpu` need a GPU too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.torch_python import torch_python

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


class Device(NamedTuple):
    """Where the processes of a trial train, by which backend, and how many of them can."""

    name: str
    backend: str
    most_processes: int

    @property
    def variables(self) -> dict[str, str]:
        hidden = {} if self.name == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
        return {"OMP_NUM_THREADS": "1", **hidden}


class TorchTrial:
    """A trial of a PyTorch script in a folder, and what its processes have written down."""

    def __init__(self, base: Path, device: Device) -> None:
        base.mkdir(parents=True, exist_ok=True)
        self.folder, self.device, self.output, self.segments = base / "trial", device, "", 0

    def start(
        self,
        workers: int,
        command: Sequence[str] = (str(HERE / "watched_ddp.py"),),
        options: Sequence[str] = (),
        **variables: str,
    ) -> subprocess.Popen[str]:
        """Start a segment, as the operator does: `--torchrun` where there is one process."""
        self.segments += 1
        own = ["--dir", str(self.folder), "--epoch", str(self.segments), "--objective", "val_loss"]
        own += ["--workers", str(workers)] if workers > 1 else ["--torchrun"]
        inherited = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "hermes_ops.trial",
                *own,
                *options,
                "--",
                torch_python(),
                *command,
            ],
            env={**inherited, **self.device.variables, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )

    def segment(self, workers: int, stop_at: str = "", **variables: str) -> int:
        """Run a segment of the example and return the exit code of hermes-trial."""
        words = [str(HERE / "watched_ddp.py"), "--backend", self.device.backend, "--epochs", "5"]
        process = self.start(workers, words, STOP_AT=stop_at, **variables)
        self.output, _ = process.communicate()
        return process.returncode

    def metrics(self) -> dict[tuple[str, int], float]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return {(m["name"], m["step"]): m["value"] for m in map(json.loads, lines)}

    def notes(self, rank: int) -> list[dict[str, Any]]:
        """What a rank has written down, over all segments."""
        text = (self.folder / f"notes-{rank}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def steps(self, rank: int) -> list[int]:
        """How many steps each process of that rank has made."""
        made = [(note["process"], note["step"]) for note in self.notes(rank) if "step" in note]
        return list(dict(made).values())

    def samples(self, ranks: int, epoch: int) -> list[int]:
        """The numbers of the samples that all ranks have seen in an epoch, sorted."""
        notes = [note for rank in range(ranks) for note in self.notes(rank)]
        batches = [note["samples"] for note in notes if note.get("epoch") == epoch]
        return sorted(number for batch in batches for number in batch)

    @property
    def result(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return content


@pytest.fixture(scope="session")
def has_gpu() -> bool:
    """Tell whether PyTorch sees a GPU; skip without PyTorch."""
    code = "import torch; print(torch.cuda.is_available())"
    answer = subprocess.run(
        [torch_python(), "-c", code], capture_output=True, text=True, check=True
    )
    return answer.stdout.split() == ["True"]


CPU = Device("cpu", "gloo", 2)
SHARED_GPU = Device("cuda", "gloo", 2)
GPU = Device("cuda", "nccl", 1)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(CPU, id="cpu-gloo"),
        pytest.param(SHARED_GPU, id="cuda-gloo", marks=pytest.mark.gpu),
        pytest.param(GPU, id="cuda-nccl", marks=pytest.mark.gpu),
    ],
)
def device(request: pytest.FixtureRequest, has_gpu: bool) -> Device:
    """A device with a backend; one GPU is shared by two processes with Gloo, never with NCCL."""
    chosen: Device = request.param
    if chosen.name == "cuda" and not has_gpu:
        pytest.skip("there is no GPU")
    return chosen


@pytest.fixture(scope="module")
def whole(device: Device, tmp_path_factory: pytest.TempPathFactory) -> TorchTrial:
    """A trial of the example on that device that was never stopped."""
    trial = TorchTrial(tmp_path_factory.mktemp("whole"), device)
    assert trial.segment(device.most_processes) == 0, trial.output
    return trial


@pytest.fixture
def gpu(has_gpu: bool) -> Device:
    if not has_gpu:
        pytest.skip("there is no GPU")
    return GPU

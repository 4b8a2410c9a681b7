"""Trials in standby interpreters on a real GPU, and what they leave there.

HERMES_TEST_GPU names the GPU, by its index; without it these tests are skipped. The interpreter
that runs them has PyTorch for CUDA.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.standby_server import StandbyServer, Taught

ROOT = Path(__file__).parents[2]
GPU = os.environ.get("HERMES_TEST_GPU", "")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("torch") is None, reason="this interpreter has no PyTorch"),
    pytest.mark.skipif(not GPU, reason="HERMES_TEST_GPU names no GPU"),
    pytest.mark.timeout(300),
]
MIB_OF_TENSOR = 4096
NOISE_MIB = 512
PATIENCE_S = 60.0

HOLDING = f"""
import json, os, time
import torch
held = torch.zeros({MIB_OF_TENSOR} << 18, device="cuda")
print(json.dumps({{"pid": os.getpid(), "visible": os.environ["CUDA_VISIBLE_DEVICES"],
    "gpus": torch.cuda.device_count()}}), flush=True)
for epoch in range(1, 100_000):
    held.add_(1.0)
    print(f"loss={{1.0 / epoch}}", flush=True)
    time.sleep(0.05)
"""


def used_mib() -> int:
    """Return the memory of the GPU that is in use, in MiB."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id", GPU]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout)


@pytest.fixture
def free_mib() -> int:
    """The memory of the GPU that is in use before the trial begins, in MiB."""
    return used_mib()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def standby(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Taught, StandbyServer]]:
    """A standby server whose interpreter has imported PyTorch and has touched no GPU."""
    made = Taught(tmp_path_factory.mktemp("standby"))
    server = made.teach(sys.executable, "torch", {})
    yield made, server
    server.close()


@pytest.fixture
def running(
    tmp_path: Path, standby: tuple[Taught, StandbyServer]
) -> Iterator[subprocess.Popen[str]]:
    """A trial that holds memory of the GPU, in a standby interpreter."""
    taught, _ = standby
    taught.script.write_text(HOLDING)
    command = [sys.executable, "-m", "hermes_ops.trial", "--dir", str(tmp_path), "--epoch", "1"]
    with subprocess.Popen(
        [*command, *taught.options, "--", sys.executable, str(taught.script)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": GPU},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        yield process
        process.kill()


def facts_of(running: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what the script says of itself, once it trains."""
    assert running.stdout is not None
    facts: dict[str, Any] = {}
    for line in running.stdout:
        if line.startswith('{"pid"'):
            facts = json.loads(line)
        if line.startswith("loss=0.1"):
            break
    return facts


def test_a_preempted_trial_in_a_standby_interpreter_has_freed_its_gpu_when_its_end_is_reported(
    free_mib: int, running: subprocess.Popen[str], standby: tuple[Taught, StandbyServer]
) -> None:
    facts = facts_of(running)
    assert facts["pid"] in standby[1].interpreters()
    assert (facts["visible"], facts["gpus"]) == (GPU, 1)
    assert used_mib() - free_mib > MIB_OF_TENSOR - NOISE_MIB
    running.send_signal(signal.SIGTERM)
    assert running.wait() == 75
    assert used_mib() - free_mib < NOISE_MIB


def test_a_killed_trial_leaves_no_memory_on_the_gpu(
    free_mib: int, running: subprocess.Popen[str]
) -> None:
    assert facts_of(running)
    assert used_mib() - free_mib > MIB_OF_TENSOR - NOISE_MIB
    running.kill()
    wait_for(lambda: used_mib() - free_mib < NOISE_MIB)

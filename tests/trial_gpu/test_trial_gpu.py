"""Trials on a real GPU: in a standby interpreter, on the GPUs that they were given, and after them.

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
from pathlib import Path

import pytest

from tests.standby_server import Taught

ROOT = Path(__file__).parents[2]
GPU = os.environ.get("HERMES_TEST_GPU", "")
pytestmark = [
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
    "gpus": torch.cuda.device_count(), "standby": "HERMES_STANDBY" in os.environ}}), flush=True)
for epoch in range(1, 100_000):
    held.add_(1.0)
    print(f"loss={{1.0 / epoch}}", flush=True)
    time.sleep(0.05)
"""

TOO_LARGE = """
import torch
print("loss=1", flush=True)
blocks = [torch.zeros(8 << 30, device="cuda") for _ in range(1000)]
"""


def used_mib() -> int:
    """Return the memory of the GPU that is in use, in MiB."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id", GPU]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Taught]:
    """A standby server whose interpreter has imported PyTorch and has touched no GPU."""
    made = Taught(tmp_path_factory.mktemp("standby"))
    server = made.teach(sys.executable, "torch", {})
    yield made
    server.close()


def start(taught: Taught, folder: Path, script: str, *options: str) -> subprocess.Popen[str]:
    """Start hermes-trial with the script, on the GPU that the tests may use."""
    taught.script.write_text(script)
    command = [sys.executable, "-m", "hermes_ops.trial", "--dir", str(folder), "--epoch", "1"]
    return subprocess.Popen(
        [*command, *taught.options, *options, "--", sys.executable, str(taught.script)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": GPU},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_preempted_trial_in_a_standby_interpreter_has_freed_its_gpu_when_its_end_is_reported(
    tmp_path: Path, taught: Taught
) -> None:
    before = used_mib()
    running = start(taught, tmp_path / "trial", HOLDING)
    try:
        lines: list[str] = []
        assert running.stdout is not None
        for line in running.stdout:
            lines.append(line)
            if line.startswith("loss=0.1"):
                break
        assert used_mib() - before > MIB_OF_TENSOR - NOISE_MIB, lines
        running.send_signal(signal.SIGTERM)
        rest = running.stdout.read()
        code = running.wait()
        after = used_mib()
    finally:
        running.kill()
    assert code == 75, rest
    assert after - before < NOISE_MIB
    facts = json.loads(next(line for line in lines if line.startswith('{"pid"')))
    assert facts["visible"] == GPU
    assert facts["gpus"] == 1


def test_a_killed_trial_leaves_no_memory_on_the_gpu(tmp_path: Path, taught: Taught) -> None:
    before = used_mib()
    running = start(taught, tmp_path / "trial", HOLDING)
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("loss=0.1"):
            break
    assert used_mib() - before > MIB_OF_TENSOR - NOISE_MIB
    running.kill()
    running.wait()
    wait_for(lambda: used_mib() - before < NOISE_MIB)


def test_a_trial_out_of_gpu_memory_fails_with_that_reason(tmp_path: Path, taught: Taught) -> None:
    running = start(taught, tmp_path / "trial", TOO_LARGE)
    output, _ = running.communicate()
    assert running.returncode not in (0, 75), output
    result = json.loads((tmp_path / "trial" / "result.json").read_text())
    assert "out of memory" in result["reason"], result

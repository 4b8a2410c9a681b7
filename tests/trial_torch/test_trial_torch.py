"""Trials of several PyTorch processes: stopped, resumed at the same size and at others, failing.

An epoch of the example has 1437 samples in batches of 64, which all processes divide: 23 steps.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.torch_python import torch_python
from tests.trial_torch.conftest import ROOT, Device, TorchTrial

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

SAMPLES, STEPS = 1437, 23
PREEMPTED = 75


def test_a_trial_stopped_in_mid_epoch_and_resumed_has_the_curve_of_one_that_was_not(
    tmp_path: Path, device: Device, whole: TorchTrial
) -> None:
    size, cut = device.most_processes, TorchTrial(tmp_path, device)
    assert cut.segment(size, stop_at=f"{size - 1}:30") == PREEMPTED, cut.output
    assert cut.result["outcome"] == "preempted"
    assert cut.steps(0)[0] % STEPS, "it was not stopped in mid-epoch"
    assert cut.segment(size) == 0, cut.output
    found, expected = cut.metrics(), whole.metrics()
    assert found == {key: pytest.approx(value, rel=1e-5) for key, value in expected.items()}
    assert len(found) == 3 * 5
    assert sum(cut.steps(0)) == sum(whole.steps(0)) == 5 * STEPS
    for rank in range(size):
        assert cut.steps(rank) == cut.steps(0)
        weights = cut.notes(rank)[-1]["weights"]
        assert weights == cut.notes(0)[-1]["weights"]
        assert weights == pytest.approx(whole.notes(0)[-1]["weights"], rel=1e-5)


def test_a_trial_that_changes_its_size_sees_each_sample_once_and_goes_on_with_its_curve(
    tmp_path: Path, device: Device, whole: TorchTrial
) -> None:
    if device.most_processes == 1:
        pytest.skip("one GPU is one process with NCCL")
    cut = TorchTrial(tmp_path, device)
    assert cut.segment(2, stop_at="1:30") == PREEMPTED, cut.output
    # Alone it ends one epoch, whose last sample two processes leave out: the curve is a little off.
    assert cut.segment(1, stop_at="0:14") == PREEMPTED, cut.output
    assert cut.segment(2) == 0, cut.output
    with_two, alone, with_two_again = cut.steps(0)
    assert cut.steps(1) == [with_two, with_two_again]
    assert with_two + alone + with_two_again == 5 * STEPS
    found, expected, total = cut.metrics(), whole.metrics(), 0
    assert sorted(found) == sorted(expected)
    for epoch in range(5):
        seen = cut.samples(2, epoch)
        assert len(set(seen)) == len(seen), "a sample was seen twice"
        assert SAMPLES - len(seen) <= 2, "more was left out than divides unevenly"
        total += len(seen)
        assert found["samples", epoch + 1] == total
        for name in ("val_loss", "val_accuracy"):
            assert found[name, epoch + 1] == pytest.approx(expected[name, epoch + 1], abs=0.02)


def test_all_ranks_of_a_script_without_a_handler_die_after_the_same_step(
    tmp_path: Path, device: Device, whole: TorchTrial
) -> None:
    if device.most_processes == 1:
        pytest.skip("one GPU is one process with NCCL")
    cut = TorchTrial(tmp_path, device)
    assert cut.segment(2, stop_at="1:30", LEAVE="die") == PREEMPTED, cut.output
    assert cut.steps(0) == cut.steps(1)
    assert cut.result["outcome"] == "preempted"
    assert cut.segment(2) == 0, cut.output
    found, expected = cut.metrics(), whole.metrics()
    assert found == {key: pytest.approx(value, rel=1e-5) for key, value in expected.items()}


def test_a_rank_that_is_killed_is_named_and_the_trial_goes_on_with_one_process(
    tmp_path: Path, device: Device
) -> None:
    if device.most_processes == 1:
        pytest.skip("one GPU is one process with NCCL")
    trial = TorchTrial(tmp_path, device)
    assert trial.segment(2, KILL_AT="1:30") not in (0, 70, PREEMPTED)
    assert trial.result["reason"].startswith("rank 1 of 2 failed first"), trial.result
    assert trial.segment(1) == 0, trial.output
    assert sorted(step for name, step in trial.metrics() if name == "val_loss") == [1, 2, 3, 4, 5]


def test_a_process_alone_has_the_variables_of_torchrun_and_no_group(
    tmp_path: Path, has_gpu: bool
) -> None:
    trial = TorchTrial(tmp_path / "trial", Device("cpu", "gloo", 1))
    names = "['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'HERMES_SIZE']"
    code = (
        "import os, torch.distributed as d; d.init_process_group('gloo'); "
        f"print([os.environ.get(n) for n in {names}], d.get_world_size()); print('val_loss=1')"
    )
    output, _ = trial.start(1, ("-c", code)).communicate()
    assert "['0', '1', '0', '1', None] 1" in output


# -- one GPU ---------------------------------------------------------------------------------------


def used_mib() -> int:
    """The memory of the first GPU that is in use, in MiB."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    answer = subprocess.run(query, capture_output=True, text=True, check=True)
    return int(answer.stdout.split()[0])


HOLDS_MEMORY = """
import time, torch
held = torch.zeros(1 << 30, device="cuda")  # 4 GiB
torch.cuda.synchronize()
print("val_loss=1", flush=True)
print("ready", flush=True)
time.sleep(600)
"""

RUNS_OUT = """
import torch
print("val_loss=1", flush=True)
held = [torch.zeros(1 << 32, device="cuda") for _ in range(64)]
"""


@pytest.mark.gpu
def test_the_memory_of_a_preempted_trials_gpu_is_free_when_its_end_is_reported(
    tmp_path: Path, gpu: Device
) -> None:
    trial, before_mib = TorchTrial(tmp_path / "trial", gpu), used_mib()
    process = trial.start(1, ("-c", HOLDS_MEMORY))
    assert process.stdout is not None
    assert any("ready" in line for line in process.stdout)
    assert used_mib() >= before_mib + 4096
    process.terminate()
    process.communicate()
    assert used_mib() <= before_mib + 64
    assert trial.result["outcome"] == "interrupted", "it has no checkpoint"


@pytest.mark.gpu
def test_a_lack_of_memory_of_the_gpu_is_tried_again_and_named(tmp_path: Path, gpu: Device) -> None:
    trial, before_mib = TorchTrial(tmp_path / "trial", gpu), used_mib()
    process = trial.start(1, ("-c", RUNS_OUT))
    process.communicate()
    assert process.returncode == 1
    assert "out of memory" in trial.result["reason"].lower()
    assert trial.result["retryable"]
    assert used_mib() <= before_mib + 64


@pytest.mark.gpu
def test_a_trial_sees_the_gpus_of_its_lease_and_no_others(tmp_path: Path, gpu: Device) -> None:
    code = "import os, torch; print('sees', torch.cuda.device_count()); print('val_loss=1')"
    for gpus, seen in (("0", 1), ("9", 0)):
        trial = TorchTrial(tmp_path / gpus, gpu)
        options = ["--gpus", gpus, "--gpu-locks", str(tmp_path / "locks")]
        (tmp_path / "locks").mkdir(exist_ok=True)
        output, _ = trial.start(1, ("-c", code), options).communicate()
        assert f"sees {seen}\n" in output


@pytest.mark.gpu
def test_the_plain_example_on_a_gpu_has_the_same_curve_after_a_stop(
    tmp_path: Path, gpu: Device
) -> None:
    if subprocess.run(
        [torch_python(), "-c", "import sklearn"], capture_output=True, check=False
    ).returncode:
        pytest.skip("the interpreter has no scikit-learn")
    whole, cut = TorchTrial(tmp_path / "whole", gpu), TorchTrial(tmp_path / "cut", gpu)
    command = (str(ROOT / "examples" / "pytorch" / "train.py"), "--epochs", "12")
    output, _ = whole.start(1, command).communicate()
    assert whole.result["outcome"] == "finished", output
    process = cut.start(1, command)
    assert process.stdout is not None
    assert any("epoch=4 " in line for line in process.stdout)
    process.terminate()
    process.communicate()
    assert cut.result["outcome"] == "preempted"
    output, _ = cut.start(1, command).communicate()
    assert cut.result["outcome"] == "finished", output
    expected = whole.metrics()
    assert cut.metrics() == {key: pytest.approx(value, rel=1e-4) for key, value in expected.items()}
    assert len(expected) == 2 * 12

"""Keras on several devices of one process, and what TensorFlow and JAX need in several processes.

Logical processors stand for GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trial_keras.conftest import JAX, ROOT, VARIABLES, Interpreter
from tests.trial_keras.test_trial_keras import Run, scripts

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

MIRRORED = (
    scripts.PREAMBLE
    + """
count = int(os.environ["DEVICES"])
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * count)
keras.utils.set_random_seed(5)
devices = [f"/cpu:{number}" for number in range(count)]
with tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice()).scope():
    network = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
    network.compile(keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
x, y = data()
network.fit(x[:128], y[:128], validation_data=(x[128:], y[128:]), batch_size=16, epochs=5,
    shuffle=False, verbose=0, callbacks=[Signal()])
print("trained on", network.optimizer.iterations.numpy(), "batches", count, "devices", flush=True)
"""
)


def test_keras_by_mirrored_strategy_goes_on_with_more_devices_and_with_fewer(
    tmp_path: Path, standby: Callable[[str], Interpreter], monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = standby(sys.executable)
    whole = Run(tmp_path, "whole", interpreter, MIRRORED)
    run = Run(tmp_path, "run", interpreter, MIRRORED)
    monkeypatch.setenv("DEVICES", "1")
    assert whole.segment() == 0, whole.output
    assert run.segment("TERM:0:1:3") == 75, run.output
    monkeypatch.setenv("DEVICES", "2")
    assert run.segment("TERM:0:3:3") == 75, run.output
    monkeypatch.setenv("DEVICES", "1")
    assert run.segment() == 0, run.output
    assert run.said("trained") == whole.said("trained") == ["trained on 40 batches 1 devices"]
    expected = whole.metrics()
    assert run.metrics() == {key: pytest.approx(value, abs=1e-4) for key, value in expected.items()}
    assert {step for _, step in expected} == {1, 2, 3, 4, 5}


def run_workers(folder: Path, python: str, code: str, *options: str) -> list[str]:
    """Run the code in two workers; return what rank 0 has printed."""
    (folder / "train.py").write_text(code)
    command = [sys.executable, "-m", "hermes_ops.trial", "--dir", str(folder / "trial")]
    command += ["--epoch", "1", "--workers", "2", *options, "--", python, str(folder / "train.py")]
    finished = subprocess.run(
        command,
        env={**os.environ, **VARIABLES},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout.splitlines()


JAX_SCRIPT = """
import os
import jax, numpy
jax.distributed.initialize(
    num_processes=int(os.environ["WORLD_SIZE"]), process_id=int(os.environ["RANK"]))
from jax.experimental.multihost_utils import process_allgather
values = process_allgather(numpy.float32(jax.process_index() + 1))
print("ranks", jax.process_count(), "sum", float(values.sum()), flush=True)
"""


def test_jax_finds_the_other_workers_by_its_variables(tmp_path: Path) -> None:
    if not JAX.exists():
        pytest.skip(f"no JAX interpreter at {JAX}")
    assert "ranks 2 sum 3.0" in run_workers(tmp_path, str(JAX), JAX_SCRIPT)


TENSORFLOW_SCRIPT = """
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
number = float(strategy.cluster_resolver.task_id + 1)
context = tf.distribute.get_replica_context
total = strategy.run(lambda: context().all_reduce("sum", tf.constant(number)))
print("workers", strategy.num_replicas_in_sync, "sum", float(total), flush=True)
"""


def test_tensorflow_finds_the_other_workers_by_tf_config(tmp_path: Path) -> None:
    found = run_workers(tmp_path, sys.executable, TENSORFLOW_SCRIPT, "--tf-config")
    assert "workers 2 sum 3.0" in found

"""What scripts use of TensorBoard is there: TensorFlow itself no longer brings it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trial_keras.conftest import Interpreter

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

FIT = """
import keras, numpy as np, sys
x = np.zeros((8, 2), "float32"); y = np.zeros(8, "float32")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, y, epochs=2, verbose=0, callbacks=[keras.callbacks.TensorBoard(sys.argv[1])])
"""
AUTOLOG = """
import mlflow
mlflow.set_tracking_uri(sys.argv[2])
mlflow.autolog(log_models=False, silent=True)
with mlflow.start_run() as run:
    model.fit(x, y, epochs=3, verbose=0)
print("points", len(mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")))
"""


def run(interpreter: str, script: str, folder: Path) -> str:
    finished = subprocess.run(
        [interpreter, "-c", script, str(folder / "board"), f"sqlite:///{folder}/mlflow.db"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_the_tensorboard_callback_writes_event_files(
    tmp_path: Path, interpreter: Interpreter
) -> None:
    run(interpreter.path, FIT, tmp_path)
    assert list((tmp_path / "board" / "train").glob("events.out.tfevents.*"))


def test_mlflow_logs_a_keras_fit_by_itself(tmp_path: Path) -> None:
    assert run(sys.executable, FIT + AUTOLOG, tmp_path).splitlines()[-1] == "points 3"

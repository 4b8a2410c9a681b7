"""The model that a Keras script leaves without a line of its own is one that MLflow can load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_ops.tracking.artifacts import package_model

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

SCRIPT = """
import keras, numpy as np
keras.utils.set_random_seed(1)
x = np.random.rand(64, 4).astype("float32")
y = x.sum(axis=1, keepdims=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile("adam", "mse")
model.fit(x, y, epochs=3, verbose=0)
print("predicts", float(model.predict(np.ones((1, 4)), verbose=0)[0, 0]), flush=True)
"""
LOAD = """
import sys, mlflow, numpy as np
model = mlflow.pyfunc.load_model(sys.argv[1])
print(model.metadata.signature.inputs.to_json())
print("predicts", float(model.predict(np.ones((1, 4), "float32"))[0, 0]))
"""


def _run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _predicted(output: str) -> float:
    (line,) = [line for line in output.splitlines() if line.startswith("predicts")]
    return float(line.split()[1])


def test_a_keras_model_is_loaded_by_mlflow_with_its_signature(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    trial = ["-m", "hermes_ops.trial", "--dir", str(tmp_path / "trial"), "--epoch", "1"]
    said = _run(*trial, "--objective", "loss", "--", sys.executable, str(script))
    folder = tmp_path / "trial" / "model"
    assert package_model(folder, "run-1")
    loaded = _run("-c", LOAD, str(folder))
    assert '"shape": [-1, 4]' in loaded
    assert _predicted(loaded) == pytest.approx(_predicted(said), rel=1e-4)


WORSENS = """
import keras, numpy as np
keras.utils.set_random_seed(1)
x = np.random.rand(64, 4).astype("float32")
y = x.sum(axis=1, keepdims=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), "mse")

class Worsen(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        value = float(self.model(np.ones((1, 4), "float32"))[0, 0])
        print("predicts", epoch, value, flush=True)
        if epoch == 1:
            self.model.optimizer.learning_rate = 3.0

model.fit(x, y, validation_data=(x, y), epochs=4, verbose=0, callbacks=[Worsen()])
"""
LOAD_KERAS = """
import sys, keras, numpy as np
model = keras.models.load_model(sys.argv[1])
print("predicts", float(model(np.ones((1, 4), "float32"))[0, 0]))
"""


def test_the_saved_model_is_that_of_the_best_epoch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WORSENS)
    trial = ["-m", "hermes_ops.trial", "--dir", str(tmp_path / "trial"), "--epoch", "1"]
    said = _run(*trial, "--objective", "val_loss", "--", sys.executable, str(script))
    shown = [line.split() for line in said.splitlines() if line.startswith("predicts")]
    by_epoch = {int(epoch): float(value) for _, epoch, value in shown}
    assert sorted(by_epoch) == [0, 1, 2, 3]
    loaded = _predicted(_run("-c", LOAD_KERAS, str(tmp_path / "trial" / "model" / "model.keras")))
    assert loaded == pytest.approx(by_epoch[1], rel=1e-4)
    assert by_epoch[3] != pytest.approx(by_epoch[1], rel=1e-2)

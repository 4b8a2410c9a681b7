"""An ordinary Horovod script, with stamps of when it began, had Horovod, and its first batch.

A worker trains on its part of the data. A batch takes --pause seconds more than it computes: they
stand for what a GPU would do. It trains for --epochs, or while the file of `--while` is there.
"""

import time

started_s = time.time()

import argparse  # noqa: E402 - the stamp comes first
import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402

import horovod.tensorflow.keras as hvd  # noqa: E402
import numpy as np  # noqa: E402
import tf_keras as keras  # noqa: E402

SAMPLES, BATCH = 640, 8

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=0.002)
parser.add_argument("--pause", type=float, default=0.1)
parser.add_argument("--samples", type=int, default=SAMPLES)
parser.add_argument("--epochs", type=int, default=1_000_000)
parser.add_argument("--while", dest="lasts", type=Path)
options = parser.parse_args()
hvd.init()
keras.utils.set_random_seed(7)
stamp = {"line_s": started_s, "init_s": time.time(), "size": hvd.size()}


class Device(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Takes its time for a batch, stamps the first one, and ends once the file is gone."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:  # noqa: ARG002
        time.sleep(options.pause)
        if hvd.rank() == 0 and "first_batch_s" not in stamp:
            stamp["first_batch_s"] = time.time()
            with (Path(os.environ["HERMES_TRIAL_DIR"]) / "stamps.jsonl").open("a") as file:
                file.write(json.dumps(stamp) + "\n")

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:  # noqa: ARG002
        if options.lasts is not None and not options.lasts.exists():
            self.model.stop_training = True


rng = np.random.RandomState(0)
features = rng.normal(size=(options.samples, 32)).astype("float32")
targets = features @ rng.normal(size=(32, 1)).astype("float32")
part = slice(hvd.rank(), None, hvd.size())
model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(options.rate * hvd.size())), "mse")
model.fit(
    features[part],
    targets[part],
    batch_size=BATCH,
    epochs=options.epochs,
    verbose=2 if hvd.rank() == 0 else 0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Device()],
)

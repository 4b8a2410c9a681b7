"""An ordinary Horovod script: it trains a linear model, and pauses while a file exists.

Each worker writes what it is into the folder of the variable WORKERS_LOG, and beside that how many
batches it has trained.
"""

import argparse
import json
import os
import pathlib
import time

import horovod.tensorflow.keras as hvd
import numpy as np
import tf_keras as keras

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, required=True)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--slow-while", type=pathlib.Path, required=True)
parser.add_argument("--pause", type=float, default=4.0)
options = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(7)
log = pathlib.Path(os.environ["WORKERS_LOG"], f"{os.getpid()}-{hvd.rank()}.json")
facts = {
    "pid": os.getpid(), "trial": os.environ["HERMES_TRIAL"], "sweep": os.environ["HERMES_SWEEP"],
    "rank": hvd.rank(), "size": hvd.size(), "time_s": time.time(),
}  # fmt: skip
written = log.with_suffix(".new")
written.write_text(json.dumps(facts))
written.rename(log)


class Count(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Writes down how many batches this process has trained."""

    def __init__(self) -> None:
        super().__init__()
        self.file = log.with_suffix(".batches").open("w")
        self.batches = 0

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.batches += 1
        self.file.seek(0)
        self.file.write(str(self.batches))
        self.file.flush()


class Slow(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Waits after each epoch while the file exists, the less the more workers there are."""

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if options.slow_while.exists():
            time.sleep(options.pause / hvd.size())


rng = np.random.RandomState(0)
features = rng.normal(size=(96, 8)).astype("float32")
targets = features @ rng.normal(size=(8, 1)).astype("float32")
part = slice(hvd.rank(), None, hvd.size())
model = keras.Sequential([keras.layers.Dense(1)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(options.rate * hvd.size()))
model.compile(optimizer, "mse")
model.fit(
    features[part],
    targets[part],
    batch_size=8,
    epochs=options.epochs,
    verbose=2 if hvd.rank() == 0 else 0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Count(), Slow()],
)

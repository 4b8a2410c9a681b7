"""An ordinary Horovod script: it trains a linear model, and pauses while a file exists."""

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
options = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(7)
log = pathlib.Path(os.environ["WORKERS_LOG"], f"{os.getpid()}-{hvd.rank()}.json")
facts = {"rank": hvd.rank(), "size": hvd.size(), "time_s": time.time()}
written = log.with_suffix(".new")
written.write_text(json.dumps(facts))
written.rename(log)


class Slow(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Waits after each epoch while the file exists, the less the more workers there are."""

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if options.slow_while.exists():
            time.sleep(4.0 / hvd.size())


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
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Slow()],
)

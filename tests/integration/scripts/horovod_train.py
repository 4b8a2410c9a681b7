"""An ordinary Horovod script: it trains a linear model, and pauses while a file exists."""

import time

import horovod.tensorflow.keras as hvd
import numpy as np
import tf_keras as keras
from data_parallel import listed, parse_options  # type: ignore[import-not-found]

options = parse_options()
hvd.init()
keras.utils.set_random_seed(7)
file = listed(hvd.rank(), hvd.size())


class Count(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Writes down how many batches this process has trained."""

    def __init__(self) -> None:
        super().__init__()
        self.file = file.open("w")
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

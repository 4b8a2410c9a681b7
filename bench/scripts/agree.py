"""Horovod training whose epochs are, by turns, with and without the look for an agreed stop.

Rank 0 stamps the mean seconds of a step of each epoch, and whether that epoch had the agreement.
"""

import argparse
import json
import os
import time
from pathlib import Path

import horovod.tensorflow.keras as hvd
import numpy as np
import tf_keras as keras

from hermes_ops.trial.keras.ranks import HorovodRanks

WIDTH, BATCH = 512, 64

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
options = parser.parse_args()
hvd.init()
keras.utils.set_random_seed(7)


class Turns(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Lets every other epoch of a pair be without the agreement, and measures its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.agrees = True
        self.began_s: list[float] = []
        is_due, mark = HorovodRanks.is_stop_due, HorovodRanks.mark_step

        def is_due_in_turn(ranks: HorovodRanks, asked: bool) -> bool:
            return self.agrees and is_due(ranks, asked)

        def mark_in_turn(ranks: HorovodRanks) -> None:
            if self.agrees:
                mark(ranks)

        HorovodRanks.is_stop_due = is_due_in_turn  # type: ignore[assignment, method-assign]
        HorovodRanks.mark_step = mark_in_turn  # type: ignore[assignment, method-assign]

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:  # noqa: ARG002
        self.agrees = epoch % 4 in (0, 3)  # first in one pair, second in the next one
        self.began_s = []

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:  # noqa: ARG002
        self.began_s.append(time.perf_counter())

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:  # noqa: ARG002
        if hvd.rank() == 0:
            took_s = (self.began_s[-1] - self.began_s[0]) / (len(self.began_s) - 1)
            stamp = {"epoch": epoch, "agrees": self.agrees, "step_s": took_s}
            with (Path(os.environ["HERMES_TRIAL_DIR"]) / "stamps.jsonl").open("a") as file:
                file.write(json.dumps(stamp) + "\n")


rng = np.random.RandomState(hvd.rank())
features = rng.normal(size=(options.steps * BATCH, WIDTH)).astype("float32")
layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(3)]
model = keras.Sequential([*layers, keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.001)), "mse")
model.fit(
    features,
    features[:, :1],
    batch_size=BATCH,
    epochs=options.epochs,
    verbose=2 if hvd.rank() == 0 else 0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Turns()],
)

"""Horovod training whose steps are, by turns, with and without the look for an agreed stop.

Rank 0 stamps the median seconds of a step of each kind in each epoch, and of the look itself.
"""

import argparse
import json
import os
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

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
    """Lets two of four steps be without the agreement, and measures each step and the agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[tuple[float, bool]] = []  # of each step in this epoch: when, and its kind
        self.looks_s: list[float] = []
        self.agrees = True
        is_due, mark = HorovodRanks.is_stop_due, HorovodRanks.mark_step

        def is_due_in_turn(ranks: HorovodRanks, asked: bool) -> bool:
            self.agrees = len(self.began) % 4 in (0, 3)  # with, without, without, with
            started_s = time.perf_counter()
            self.began.append((started_s, self.agrees))
            if not self.agrees:
                return False
            due = is_due(ranks, asked)
            self.looks_s.append(time.perf_counter() - started_s)
            return due

        def mark_in_turn(ranks: HorovodRanks) -> None:
            if self.agrees:
                mark(ranks)

        HorovodRanks.is_stop_due = is_due_in_turn  # type: ignore[assignment, method-assign]
        HorovodRanks.mark_step = mark_in_turn  # type: ignore[assignment, method-assign]

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:  # noqa: ARG002
        self.began, self.looks_s = [], []

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:  # noqa: ARG002
        if hvd.rank() == 0:
            stamp = {"with_s": self.step_s(True), "without_s": self.step_s(False)}
            stamp["look_s"] = median(self.looks_s)
            with (Path(os.environ["HERMES_TRIAL_DIR"]) / "stamps.jsonl").open("a") as file:
                file.write(json.dumps(stamp) + "\n")

    def step_s(self, agrees: bool) -> float:
        """Return the median seconds of the epoch's steps of that kind."""
        steps = pairwise(self.began)
        return median(end_s - at_s for (at_s, kind), (end_s, _) in steps if kind is agrees)


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

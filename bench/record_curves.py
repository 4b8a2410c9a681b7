"""Record learning curves of small networks: examples/curves/mlp_*.npz.

`python -m bench.record_curves [NAME ...]` trains 320 configurations of scikit-learn's multi-layer
perceptron for 50 epochs each, one core, some minutes a file. Losses follow from the seeds; seconds
are CPU time as measured, times PACE, as of a network that is so much larger.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy is imported: one core's seconds
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits, make_classification, make_friedman1
from sklearn.metrics import log_loss, mean_squared_error
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.preprocessing import StandardScaler

Array = NDArray[np.float64]
FOLDER = Path(__file__).resolve().parents[1] / "examples" / "curves"
CONFIGURATIONS, EPOCHS, PACE = 320, 50, 50.0
WORST = 20.0  # what a larger loss counts as
NAMES = ("batch_size", "learning_rate", "momentum", "weight_decay", "num_layers", "max_units",
         "adam")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Data:
    """Standardised features and targets; a third is for validation."""

    train: Array
    valid: Array
    train_y: Array
    valid_y: Array
    classes: bool


def _split(x: Array, y: Array, *, classes: bool) -> Data:
    keep = y if classes else None
    train, valid, train_y, valid_y = train_test_split(
        x, y, test_size=0.33, random_state=0, stratify=keep
    )
    scaler = StandardScaler().fit(train)
    return Data(scaler.transform(train), scaler.transform(valid), train_y, valid_y, classes)


def _digits() -> Data:
    return _split(*load_digits(return_X_y=True), classes=True)


def _synthetic() -> Data:
    made = make_classification(1600, 24, n_informative=10, n_redundant=4, n_classes=4,
                               n_clusters_per_class=3, class_sep=1.0, flip_y=0.05,
                               random_state=1)  # fmt: skip
    return _split(*made, classes=True)


def _noisy() -> Data:
    made = make_classification(1200, 40, n_informative=8, n_classes=2, n_clusters_per_class=4,
                               class_sep=0.8, flip_y=0.2, random_state=2)  # fmt: skip
    return _split(*made, classes=True)


def _friedman() -> Data:
    x, y = make_friedman1(1500, 12, noise=1.0, random_state=3)
    return _split(x, (y - y.mean()) / y.std(), classes=False)


TASKS: dict[str, Callable[[], Data]] = {
    "mlp_digits": _digits,
    "mlp_synthetic": _synthetic,
    "mlp_noisy": _noisy,
    "mlp_friedman": _friedman,
}


def main(names: Sequence[str]) -> int:
    """Record the files of these names (default: all); return 2 for an unknown name."""
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are: {', '.join(TASKS)}", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")  # networks that diverge say so at every step
    for name in names or TASKS:
        _record(FOLDER / f"{name}.npz", TASKS[name]())
    return 0


def _record(path: Path, data: Data) -> None:
    random = np.random.default_rng(7)
    configurations = [_draw(random) for _ in range(CONFIGURATIONS)]
    curves = np.array([_train(data, each, seed) for seed, each in enumerate(configurations)])
    losses, scores, seconds = np.moveaxis(curves.astype(np.float32), 2, 0)
    np.savez_compressed(
        path,
        hyperparameter_names=np.array(NAMES),
        configs=np.array(configurations, np.float32),
        val_loss=losses,
        val_accuracy=scores,
        elapsed_s=np.maximum(seconds, 1e-4) * np.float32(PACE),
    )


def _draw(random: np.random.Generator) -> tuple[float, ...]:
    """Draw a configuration, in the order of NAMES."""
    batch = round(2 ** random.uniform(4, 8))
    rate = 10 ** random.uniform(-4, -0.5)
    momentum, decay = random.uniform(0.1, 0.99), 10 ** random.uniform(-5, -1)
    layers, units = int(random.integers(1, 5)), round(2 ** random.uniform(4, 8))
    adam = int(random.integers(0, 2))
    return batch, rate / 10 if adam else rate, momentum, decay, layers, units, adam


def _train(data: Data, configuration: tuple[float, ...], seed: int) -> Array:
    """Return EPOCHS x (loss, score, CPU seconds so far)."""
    batch, rate, momentum, decay, layers, units, adam = configuration
    kind = MLPClassifier if data.classes else MLPRegressor
    model = kind(
        hidden_layer_sizes=(int(units),) * int(layers),
        solver="adam" if adam else "sgd",
        alpha=decay,
        batch_size=int(batch),
        learning_rate_init=rate,
        momentum=momentum,
        random_state=seed,
    )
    rows, spent_s = [], 0.0
    for _ in range(EPOCHS):
        began_s = process_time()
        loss, score = _epoch(data, model)
        spent_s += process_time() - began_s
        rows.append((loss, score, spent_s))
    return np.array(rows)


def _epoch(data: Data, model: MLPClassifier | MLPRegressor) -> tuple[float, float]:
    """Train one epoch; return validation loss and score, NaN and 0 once the network diverged."""
    labels = np.unique(data.train_y)
    try:
        if data.classes:
            model.partial_fit(data.train, data.train_y, classes=labels)
            told = model.predict_proba(data.valid)
            loss = log_loss(data.valid_y, told, labels=labels)
            score = float((labels[told.argmax(axis=1)] == data.valid_y).mean())
        else:
            model.partial_fit(data.train, data.train_y)
            told = model.predict(data.valid)
            loss = mean_squared_error(data.valid_y, told)
            score = float(1 - loss / data.valid_y.var())
    except ValueError as error:
        if not re.search("finite|NaN|infinity", str(error)):  # what is said of such weights
            raise
        return np.nan, 0.0
    return min(float(loss), WORST), score


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

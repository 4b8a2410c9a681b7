"""Train a linear classifier by stochastic gradient descent, printing its loss after each epoch.

Not Keras: the loss is read from the output, and the state is kept in $HERMES_CHECKPOINT_DIR.
"""

import argparse
import os
import time
from pathlib import Path

import joblib
import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alpha", type=float, default=0.0001)
    parser.add_argument("--eta0", type=float, default=0.01)
    parser.add_argument("--penalty", choices=("l2", "l1", "elasticnet"), default="l2")
    parser.add_argument("--l1-ratio", type=float, default=0.15, help="of elasticnet alone")
    parser.add_argument("--schedule", choices=("constant", "invscaling"), default="constant")
    parser.add_argument("--power-t", type=float, default=0.25, help="of invscaling alone")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seconds-per-epoch", type=float, default=0.3)
    return parser.parse_args()


def save(path, state):
    temporary = path.with_suffix(".tmp")
    joblib.dump(state, temporary)
    os.replace(temporary, path)  # a checkpoint is either complete or not there


def main():
    arguments = parse_arguments()
    images, labels = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(images / 16.0, labels, random_state=0)
    path = Path(os.environ.get("HERMES_CHECKPOINT_DIR", ".")) / "state.joblib"
    if path.exists():
        epoch, model, order = joblib.load(path)
    else:
        model = SGDClassifier(
            loss="log_loss",
            alpha=arguments.alpha,
            eta0=arguments.eta0,
            penalty=arguments.penalty,
            l1_ratio=arguments.l1_ratio,
            learning_rate=arguments.schedule,
            power_t=arguments.power_t,
            random_state=0,
        )
        epoch, order = 0, np.random.RandomState(0)
    while epoch < arguments.epochs:
        started = time.monotonic()
        for batch in np.array_split(order.permutation(len(x_train)), 40):
            model.partial_fit(x_train[batch], y_train[batch], classes=np.arange(10))
        loss = log_loss(y_test, model.predict_proba(x_test), labels=np.arange(10))
        epoch += 1
        time.sleep(max(0.0, arguments.seconds_per_epoch - (time.monotonic() - started)))
        accuracy, weights = model.score(x_test, y_test), np.count_nonzero(model.coef_)
        print(
            f"epoch={epoch} loss={loss:.6f} accuracy={accuracy:.4f} weights={weights}", flush=True
        )
        save(path, (epoch, model, order))


if __name__ == "__main__":
    main()

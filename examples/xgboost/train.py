"""Train boosted trees on handwritten digits with XGBoost, with a checkpoint every ten rounds.

An ordinary script: a round is an epoch, its loss is read from the output, and the model is kept in
$HERMES_CHECKPOINT_DIR, or beside the script where that is not set.
"""

import argparse
import os
from pathlib import Path

import xgboost
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--eta", type=float, default=0.3)
    parser.add_argument("--max-depth", type=int, default=4)
    parser.add_argument("--min-child-weight", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    return parser.parse_args()


def save(path, booster):
    temporary = path.with_name("temporary.tmp.ubj")
    booster.save_model(temporary)
    os.replace(temporary, path)  # a checkpoint is either complete or not there


def main():
    arguments = parse_arguments()
    images, labels = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(images, labels, random_state=0)
    path = Path(os.environ.get("HERMES_CHECKPOINT_DIR", ".")) / "model.ubj"
    parameters = {
        "objective": "multi:softprob",
        "num_class": 10,
        "eta": arguments.eta,
        "max_depth": arguments.max_depth,
        "min_child_weight": arguments.min_child_weight,
        "device": os.environ.get("XGBOOST_DEVICE", "cpu"),
    }
    train, test = xgboost.DMatrix(x_train, y_train), xgboost.DMatrix(x_test, y_test)
    model_file = path if path.exists() else None
    booster = xgboost.Booster(parameters, [train, test], model_file=model_file)
    for done in range(booster.num_boosted_rounds(), arguments.rounds):
        booster.update(train, done)
        loss = log_loss(y_test, booster.predict(test))
        print(f"step={done + 1} val_loss={loss:.6f}", flush=True)
        if (done + 1) % arguments.checkpoint_every == 0:
            save(path, booster)


if __name__ == "__main__":
    main()

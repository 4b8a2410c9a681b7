"""Fits a classifier by partial_fit and saves it as an MLflow model with its signature."""

import os
import sys
from pathlib import Path

import mlflow.sklearn  # noqa: TID253 - a script of a user
import numpy as np
from mlflow.models import infer_signature  # noqa: TID253 - a script of a user
from sklearn.linear_model import SGDClassifier

x = np.random.RandomState(0).rand(60, 3)
y = (x.sum(axis=1) > 1.5).astype(int)
model = SGDClassifier(alpha=float(sys.argv[1]), random_state=0)
folder = Path(os.environ["HERMES_TRIAL_DIR"]) / "model"
for epoch in range(1, 4):
    model.partial_fit(x, y, classes=[0, 1])
    if epoch == 3 and not folder.exists():  # before the last value: with that the trial is over
        signature = infer_signature(x, model.predict(x))
        mlflow.sklearn.save_model(model, str(folder), signature=signature)
    print(f"epoch={epoch} loss={1 - model.score(x, y)}", flush=True)

"""Writes down its arguments and environment, and logs a metric of its own to MLflow."""

import json
import os
import sys
from pathlib import Path

import mlflow  # noqa: TID253 - an ordinary user script

facts = {"argv": sys.argv[1:], "environment": dict(os.environ)}
Path(os.environ["PROBE_FILE"]).write_text(json.dumps(facts))
print("epoch=1 loss=0.5", flush=True)
with mlflow.start_run():
    mlflow.log_metric("own_metric", 42.0, step=1)

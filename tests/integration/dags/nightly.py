"""Scheduled Airflow DAGs of the sweep files beside this one, and of a folder that a test fills."""

import os
from pathlib import Path

from hermes_ops.airflow import nightly_dags

PARAMS = {"epochs": 5, "slow_while": "/nowhere"}
globals().update(nightly_dags(Path(__file__).parent / "sweeps", params=PARAMS))
globals().update(nightly_dags(Path(os.environ["HERMES_HOME"]) / "night-files"))

"""A scheduled Airflow DAG for each file in the folder `sweeps` beside this one with a schedule."""

from pathlib import Path

from hermes_ops.airflow import nightly_dags

globals().update(nightly_dags(Path(__file__).parent / "sweeps"))

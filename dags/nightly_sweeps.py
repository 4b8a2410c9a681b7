"""A scheduled Airflow DAG for each file with a schedule in the folder `sweeps` next to this one."""

from pathlib import Path

from hermes_ops.airflow import nightly_dags

globals().update(nightly_dags(Path(__file__).parent / "sweeps"))

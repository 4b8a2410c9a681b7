"""Removes sweeps that ended 90 days ago, each night, once somebody has switched the DAG on.

There is no such DAG where tasks have no log-in of Hermes at Airflow, as in the chart: there the
value `prune` has a job do it.
"""

import os

from hermes_ops.airflow import prune_dag

LOG_INS = ("HERMES_AIRFLOW_PASSWORD_FILE", "HERMES_AIRFLOW_TOKEN_FILE", "HERMES_AIRFLOW_TOKEN")

if any(name in os.environ for name in LOG_INS):
    hermes_prune = prune_dag(older_than="90d")

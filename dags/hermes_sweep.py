"""The sweep DAG: trigger it with a sweep file's content (form, REST or `hermes sweep run`)."""

import os

from hermes_ops.airflow import sweep_dag

hermes_sweep = sweep_dag("hermes_sweep", pool=os.environ.get("HERMES_POOL", "gpus"))

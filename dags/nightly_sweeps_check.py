"""No DAG: an import error in Airflow that names each file in `sweeps` which is not valid.

Apart from nightly_sweeps.py, since an import error takes all DAGs of its own file along.
"""

from pathlib import Path

from hermes_ops.airflow import refuse_broken

refuse_broken(Path(__file__).parent / "sweeps")

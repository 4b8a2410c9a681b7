"""No Airflow DAG: the files that are not valid in the folder that a test fills."""

import os
from pathlib import Path

from hermes_ops.airflow import refuse_broken

refuse_broken(Path(os.environ["HERMES_HOME"]) / "night-files")

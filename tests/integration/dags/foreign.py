"""A task that has nothing to do with Hermes and wants a slot of the same pool."""

import os
import time
from pathlib import Path

from airflow.sdk import DAG
from airflow.sdk import task as make_task

AT_MOST_S = 300.0

with DAG("foreign", schedule=None, catchup=False, is_paused_upon_creation=False):

    @make_task(pool="gpus", priority_weight=5_000_000, weight_rule="absolute")
    def hold(run_id: str | None = None) -> None:
        """Hold the slot while a file is there, which says that it is held."""
        held = Path(os.environ["HERMES_HOME"]) / f"{run_id}.held"
        held.touch()
        started = time.time()
        while held.exists() and time.time() < started + AT_MOST_S:
            time.sleep(0.1)

    hold()

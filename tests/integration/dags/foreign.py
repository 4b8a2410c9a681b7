"""A task that has nothing to do with Hermes and wants a slot of the same pool."""

import os
import time
from pathlib import Path

from airflow.sdk import DAG
from airflow.sdk import task as make_task

SECONDS = 8.0

with DAG("foreign", schedule=None, catchup=False, is_paused_upon_creation=False):

    @make_task(pool="gpus", priority_weight=5_000_000, weight_rule="absolute")
    def hold(run_id: str | None = None) -> None:
        """Hold the slot and leave the times of it in a file."""
        started = time.time()
        time.sleep(SECONDS)
        file = Path(os.environ["HERMES_HOME"]) / f"{run_id}.foreign"
        file.write_text(f"{started} {time.time()}")

    hold()

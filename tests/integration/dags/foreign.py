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
        """Hold the slot until a file says that it may go; leave the times of it in another."""
        home = Path(os.environ["HERMES_HOME"])
        started = time.time()
        (home / f"{run_id}.holds").touch()
        while not (home / f"{run_id}.let-go").exists() and time.time() < started + AT_MOST_S:
            time.sleep(0.1)
        (home / f"{run_id}.foreign").write_text(f"{started} {time.time()}")

    hold()

"""A sweep in a group that takes long enough to be stopped, and a task behind it."""

import os
from pathlib import Path

from airflow.sdk import DAG, task

from hermes_ops.airflow import SweepTaskGroup

SLOW = Path(os.environ["HERMES_HOME"]) / "halted-slow"  # it trains slowly while this is there
SWEEP = {
    "name": "group-halted",
    "objective": {"metric": "loss"},
    "search": {
        "algorithm": "grid",
        "max_trials": 2,
        "space": {"rate": {"type": "choice", "values": [0.5, 0.51]}},
    },
    "trial": {
        "command": [
            "python",
            "stub.py",
            "--rate={rate}",
            "--epochs=1000",
            "--pause=0.25",
            f"--slow-while={SLOW}",
        ],
        "directory": str(Path(__file__).parents[1] / "scripts"),
    },
    "budget": {"max_epochs": 1000},
}

with DAG("halted", schedule=None, catchup=False):
    search = SweepTaskGroup("search", SWEEP)

    @task
    def behind(steps: int) -> int:
        return steps

    behind(search.best["steps"])

"""Two sweeps in one DAG at once, with connections, templates, callbacks and an XCom of a task."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, BaseNotifier, task

from hermes_ops.airflow import SweepTaskGroup

SCRIPTS = Path(__file__).parents[1] / "scripts"
HOME = Path(os.environ["HERMES_HOME"])


class Notifier(BaseNotifier):
    """Leaves a file that says who has told it."""

    template_fields = ("words",)

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words

    def notify(self, context: Any) -> None:
        (HOME / f"told-{context['ti'].task_id}").write_text(self.words)


def content(name: str, *command: Any, **trial: Any) -> dict[str, Any]:
    return {
        "name": name,
        "objective": {"metric": "loss"},
        "search": {
            "algorithm": "grid",
            "max_trials": 2,
            "space": {"rate": {"type": "choice", "values": [0.5, 1.0]}},
        },
        "trial": {"command": ["python", *command], "directory": "../scripts", **trial},
        "budget": {"max_epochs": 5},
    }


RETRIED = {"retries": 3, "retry_delay": timedelta(seconds=1)}

with DAG("groups", schedule=None, catchup=False, default_args=RETRIED):

    @task
    def epochs() -> str:
        return "3"

    environment = {
        "PROBE_FILE": str(HOME / "probe-{{ ds }}"),
        "INTERVAL": "{{ data_interval_start | ds }} to {{ data_interval_end | ds }}",
        "LICENCE": "{{ conn.group_mlflow.password }}",
    }
    probe = SweepTaskGroup(
        "probe",
        content("group-probe", "probe.py", "--rate={rate}", "{{ ds }}", environment=environment),
        mlflow_conn_id="group_mlflow",
        storage_conn_id="group_storage",
        on_success_callback=Notifier("done on {{ ds }}"),
    )
    stub = SweepTaskGroup(
        "stub", content("group-stub", "stub.py", "--rate", "{rate}", "--epochs", epochs())
    )

    @task
    def collect(config: dict[str, Any], run: str, model: str | None, steps: int) -> dict[str, Any]:
        return {"config": config, "run": run, "model": model, "steps": steps}

    best = stub.best
    collect(best["config"], best["mlflow_run_id"], best["model_uri"], best["steps"])

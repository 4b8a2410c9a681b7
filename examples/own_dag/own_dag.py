"""A sweep inside an Airflow DAG of one's own, and a DAG that runs whenever that sweep has ended.

Copy it into a folder of DAGs. The training script is examples/sgd/train.py.
"""

from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, task

from hermes_ops.airflow import SweepTaskGroup, sweep, sweep_asset

SCRIPT = Path(__file__).parents[1] / "sgd"

RETRIED = {"retries": 3, "retry_delay": timedelta(seconds=5)}

with DAG("own_dag", schedule="@daily", catchup=False, default_args=RETRIED):

    @task
    def prepare() -> int:
        """Stands in for whatever makes the data; its result decides how long trials train."""
        return 4

    search = SweepTaskGroup(
        "search",
        {
            "name": "own-dag",
            "objective": {"metric": "loss"},
            "search": {
                "algorithm": "random",
                "max_trials": 3,
                "space": {"alpha": {"type": "loguniform", "low": 1e-6, "high": 0.01}},
            },
            "trial": {
                "command": ["python", "train.py", "--alpha={alpha}", "--epochs=4"],
                "directory": str(SCRIPT),
                "environment": {"DATA_DAY": "{{ ds }}", "OMP_NUM_THREADS": "1"},
            },
            "budget": {"max_epochs": prepare()},
        },
    )

    @sweep(pool="gpus")
    def refine(best: dict, ds: str | None = None) -> dict:
        """A second sweep around what the first one found, by a function that returns it."""
        alpha = best["alpha"]
        return {
            "name": "own-dag-refined",
            "objective": {"metric": "loss"},
            "search": {
                "algorithm": "random",
                "max_trials": 2,
                "space": {"alpha": {"type": "loguniform", "low": alpha / 3, "high": alpha * 3}},
            },
            "trial": {
                "command": ["python", "train.py", "--alpha={alpha}", "--epochs=3"],
                "directory": str(SCRIPT),
                "environment": {"DATA_DAY": str(ds), "OMP_NUM_THREADS": "1"},
            },
            "budget": {"max_epochs": 3},
        }

    @task
    def deploy(config: dict, run: str, model: str) -> str:
        """What is behind a sweep gets its best configuration, MLflow run and model by XCom."""
        return f"{config} {run} {model}"

    best = refine(search.best["config"]).best
    deploy(best["config"], best["mlflow_run_id"], best["model_uri"])

with DAG("own_dag_follows", schedule=[sweep_asset("own_dag", "refine")], catchup=False):

    @task
    def look(triggering_asset_events=None) -> dict:
        """The event of a sweep's end says what came out of it."""
        ((event, *_),) = triggering_asset_events.values()
        return event.extra

    look()

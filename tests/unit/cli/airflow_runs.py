"""An Airflow with DAG runs, for the commands that look for sweeps in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes_ops.airflow.client import TaskKey
from hermes_ops.errors import NotPermitted


class Airflow:
    """Airflow with DAG runs, each as (DAG, run, state, {task: state}), newest first."""

    def __init__(self, *runs: tuple[str, str, str, Mapping[str, str | None]]) -> None:
        self.runs = runs
        self.put: list[tuple[Any, ...]] = []
        self.notes: list[tuple[Any, ...]] = []
        self.cleared: list[tuple[Any, ...]] = []
        self.hidden: set[str] = set()
        """DAGs that Airflow does not show to the user."""

    def dag_run(self, dag: str, run: str) -> Any:
        self._refuse(dag)
        return next((self._run(r) for r in self.runs if r[:2] == (dag, run)), None)

    def dag_runs(self, dags: list[str]) -> Any:
        return [self._run(r) for r in self.runs if r[0] in dags]

    def _refuse(self, dag: str) -> None:
        if dag in self.hidden:
            raise NotPermitted(f"Airflow refused GET /api/v2/dags/{dag} (403): Forbidden")

    def task_instance(self, task: TaskKey) -> Any:
        self._refuse(task.dag_id)
        found = (t for t in self._tasks() if _key(t) == (task.dag_id, task.run_id, task.task_id))
        return next(found, None)

    def made_by(self, operator: str, dag: str = "~", run: str = "~", limit: int = 50) -> Any:
        end = {"PlanOperator": "plan", "ReportOperator": "report"}[operator]
        made = [t for t in self._tasks() if t["task_id"].rpartition(".")[2] == end]
        return [t for t in made if t["dag_id"] in (dag, t["dag_id"] if dag == "~" else dag)
                and run in ("~", t["dag_run_id"])][:limit]  # fmt: skip

    def put_state(self, *record: Any) -> None:
        self.put.append(record)

    def user_name(self) -> str:
        return "anna"

    def note(self, task: Any, text: str) -> None:
        self.notes.append((task, text))

    def get_state(self, task: TaskKey, key: str) -> Any:
        stored = (record[2] for record in self.put if record[:2] == (task, key))
        return next(stored, None)

    def clear(self, *asked: Any) -> None:
        self.cleared.append(asked)

    def _run(self, run: tuple[Any, ...]) -> Any:
        dates = {"start_date": "began", "end_date": "ended"}
        return {"dag_id": run[0], "dag_run_id": run[1], "state": run[2], **dates}

    def _tasks(self) -> list[dict[str, Any]]:
        dates = {"start_date": "task began", "end_date": "task ended"}
        return [
            {"dag_id": dag, "dag_run_id": run, "task_id": task, "state": state, **dates}
            for dag, run, _, tasks in self.runs
            if dag not in self.hidden
            for task, state in tasks.items()
        ]


def _key(task: dict[str, Any]) -> tuple[str, str, str]:
    return task["dag_id"], task["dag_run_id"], task["task_id"]

"""The DAG of a sweep: plan → mapped trials → report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Asset, Param, TaskGroup, TriggerRule, XComArg, get_parsing_context

from hermes_ops.airflow.identity import PLAN_TASK, REPORT_TASK, TRIAL_TASK
from hermes_ops.airflow.sweep.nights import Nights
from hermes_ops.airflow.sweep.source import DEFAULT_POOL, SweepSource
from hermes_ops.airflow.sweep.tasks import PlanOperator, ReportOperator
from hermes_ops.airflow.trial.connections import Connections
from hermes_ops.airflow.trial.operator import HermesTrialOperator, trial_defaults
from hermes_ops.config import dag_params_schema

UNLIMITED = 100_000
"""The pool and the controller bound what runs; Airflow's own limits must not."""


def sweep_dag(
    dag_id: str = "hermes_sweep",
    *,
    pool: str = DEFAULT_POOL,
    schedule: Any = None,  # noqa: ANN401 - whatever Airflow takes
    defaults: Mapping[str, Any] | None = None,
    mlflow_conn_id: str | None = None,
    storage_conn_id: str | None = None,
    **dag_arguments: Any,  # noqa: ANN401 - Airflow's own
) -> DAG:
    """A DAG that runs one sweep a run, from the run's configuration over `defaults`.

    :param pool: the Airflow pool whose slots are the GPUs
    :param defaults: a sweep file's content; the trigger form begins with it
    :param mlflow_conn_id: the connection that leads to MLflow, in the place of its variables
    :param storage_conn_id: the connection whose access to storage the scripts get
    """
    connections = Connections(mlflow_conn_id, storage_conn_id)
    own = {"params": _params(defaults or {}), "is_paused_upon_creation": False, **dag_arguments}
    with empty_dag(dag_id, schedule=schedule, doc_md=__doc__, **own) as dag:
        sweep_tasks(SweepSource(pool=pool), connections, outlets=[sweep_asset(dag_id)])
    return dag


def empty_dag(dag_id: str, **dag_arguments: Any) -> DAG:  # noqa: ANN401 - Airflow's own
    """A DAG whose runs and tasks nothing but the pool bounds, to be filled with a sweep."""
    ours = {"max_active_tasks": UNLIMITED, "max_active_runs": UNLIMITED, "tags": ["hermes"]}
    return DAG(dag_id, catchup=False, **{**ours, **dag_arguments})


def sweep_asset(dag_id: str, group_id: str | None = None) -> Asset:
    """The asset that is updated whenever a sweep of that DAG, or of that group in it, has ended.

    A DAG that is to run then has it as its schedule. The event's `extra` is what the sweep's last
    task returns.
    """
    path = f"{dag_id}/{group_id}" if group_id else dag_id
    return Asset(name=f"hermes-sweep/{path}", uri=f"hermes://sweeps/{path}")


@dataclass(frozen=True, slots=True)
class SweepTasks:
    """The tasks of a sweep."""

    plan: PlanOperator
    trial: Any  # Airflow's mapped operator
    report: ReportOperator


def sweep_tasks(
    source: SweepSource,
    connections: Connections,
    group: TaskGroup | None = None,
    nights: Nights | None = None,
    **report_arguments: Any,  # noqa: ANN401 - Airflow's own
) -> SweepTasks:
    """The three tasks in the DAG, and in the group, whose context is entered."""

    def full(task_id: str) -> str:
        return task_id if group is None else str(group.child_id(task_id))

    again = {"retries": 10, "retry_delay": timedelta(seconds=5)}
    plan = PlanOperator(
        task_id=PLAN_TASK,
        trial_task=full(TRIAL_TASK),
        source=source,
        connections=connections,
        nights=nights,
        **{**again, "retries": 3},
    )
    XComArg.apply_upstream_relationship(plan, source.references)
    trial = HermesTrialOperator.partial(
        task_id=TRIAL_TASK,
        pool=source.pool,
        mlflow_conn_id=connections.mlflow,
        storage_conn_id=connections.storage,
        **{**trial_defaults(), "execution_timeout": None, "trigger_rule": TriggerRule.ALL_SUCCESS},
    ).expand(number=plan.output)
    report = ReportOperator(
        task_id=REPORT_TASK,
        plan_task=full(PLAN_TASK),
        trial_task=full(TRIAL_TASK),
        connections=connections,
        **{**again, "trigger_rule": TriggerRule.ALL_DONE, "multiple_outputs": True},
        **report_arguments,
    )
    plan >> trial >> report
    return SweepTasks(plan, trial, report)


def _params(defaults: Mapping[str, Any]) -> dict[str, Param]:
    """The trigger form; empty when the file is read for a trial, which has no use for it.

    Airflow validates every field four times at each start of a mapped task: 0.1 s on a machine
    of two cores, while a GPU idles.
    """
    if get_parsing_context().task_id == TRIAL_TASK:
        return {}
    return {
        key: Param(defaults.get(key, schema.get("default")), **_keywords(schema))
        for key, schema in dag_params_schema().items()
    }


def _keywords(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in schema.items() if k != "default"}

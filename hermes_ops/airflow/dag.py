"""The DAG of a sweep: plan → mapped trials → report."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param, TriggerRule

from hermes_ops.airflow.operator import HermesTrialOperator, trial_defaults
from hermes_ops.airflow.tasks import PlanOperator, ReportOperator
from hermes_ops.config import dag_params_schema

UNLIMITED = 100_000
"""The pool and the controller bound what runs; Airflow's own limits must not."""


def sweep_dag(
    dag_id: str = "hermes_sweep",
    *,
    pool: str = "gpus",
    schedule: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    **dag_arguments: Any,  # noqa: ANN401 - Airflow's own
) -> DAG:
    """A DAG that runs one sweep a run, from the run's configuration over `defaults`.

    :param pool: the Airflow pool whose slots are the GPUs
    :param defaults: a sweep file's content; the trigger form begins with it
    """
    params = {
        key: Param((defaults or {}).get(key, schema.get("default")), **_keywords(schema))
        for key, schema in dag_params_schema().items()
    }
    with DAG(
        dag_id,
        schedule=schedule,
        catchup=False,
        params=params,
        max_active_tasks=UNLIMITED,
        max_active_runs=UNLIMITED,
        is_paused_upon_creation=False,
        tags=["hermes"],
        doc_md=__doc__,
        **dag_arguments,
    ) as dag:
        plan = PlanOperator(task_id="plan", trial_task="trial", retries=3,
                            retry_delay=timedelta(seconds=5))  # fmt: skip
        trial = HermesTrialOperator.partial(task_id="trial", pool=pool, **trial_defaults()).expand(
            number=plan.output
        )
        report = ReportOperator(task_id="report", plan_task="plan", trial_task="trial", retries=10,
                                retry_delay=timedelta(seconds=5),
                                trigger_rule=TriggerRule.ALL_DONE)  # fmt: skip
        plan >> trial >> report
    return dag


def _keywords(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in schema.items() if k != "default"}

"""The DAG of a sweep: plan → mapped trials → report."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param, TriggerRule, get_parsing_context

from hermes_ops.airflow.operator import HermesTrialOperator, trial_defaults
from hermes_ops.airflow.tasks import PlanOperator, ReportOperator
from hermes_ops.config import dag_params_schema

TRIAL_TASK = "trial"
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
    with DAG(
        dag_id,
        schedule=schedule,
        catchup=False,
        params=_params(defaults or {}),
        max_active_tasks=UNLIMITED,
        max_active_runs=UNLIMITED,
        is_paused_upon_creation=False,
        tags=["hermes"],
        doc_md=__doc__,
        **dag_arguments,
    ) as dag:
        plan = PlanOperator(task_id="plan", trial_task=TRIAL_TASK, retries=3,
                            retry_delay=timedelta(seconds=5))  # fmt: skip
        trial = HermesTrialOperator.partial(
            task_id=TRIAL_TASK, pool=pool, **trial_defaults()
        ).expand(number=plan.output)
        report = ReportOperator(
            task_id="report",
            plan_task="plan",
            trial_task=TRIAL_TASK,
            retries=10,
            retry_delay=timedelta(seconds=5),
            trigger_rule=TriggerRule.ALL_DONE,
        )
        plan >> trial >> report
    return dag


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

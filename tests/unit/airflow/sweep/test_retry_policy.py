"""The retries of a sweep's first and last task: an outage of a service must not cost a night."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.definitions.retry_policy import RetryAction
from airflow.serialization.serialized_objects import DagSerialization

from hermes_ops.airflow.sweep.dag import (
    PLAN_RETRY_POLICY,
    REPORT_RETRY_POLICY,
    OutageRetryPolicy,
    SweepTaskGroup,
    empty_dag,
    sweep_dag,
)
from hermes_ops.errors import HermesError, Unavailable
from tests.unit.airflow.builders import sweep_file

AWAY = Unavailable("MLflow at http://mlflow did not answer")


def waited_s(policy: OutageRetryPolicy, error: Exception, cleared_at: int = 0) -> list[float]:
    """Return the pauses until the task has failed for good; it was cleared after so many tries."""
    max_tries, pauses_s = cleared_at + policy.retries, list[float]()
    for number in range(cleared_at + 1, max_tries + 1):  # with the last one Airflow asks no more
        decision = policy.evaluate(error, number, max_tries)
        if decision.action is RetryAction.FAIL:
            break
        assert decision.retry_delay is not None
        pauses_s.append(decision.retry_delay.total_seconds())
    return pauses_s


@pytest.mark.parametrize("cleared_at", [0, 7])
def test_a_plan_waits_an_hour_for_mlflow_and_a_report_a_day(cleared_at: int) -> None:
    plan, report = (
        waited_s(PLAN_RETRY_POLICY, AWAY, cleared_at),
        waited_s(REPORT_RETRY_POLICY, AWAY, cleared_at),
    )
    assert plan[:5] == [5.0, 10.0, 20.0, 40.0, 60.0]
    assert 3_600 - 60 < sum(plan) <= 3_600
    assert 86_400 - 300 < sum(report) <= 86_400
    assert max(report) == 300.0


@pytest.mark.parametrize("cleared_at", [0, 7])
def test_another_error_is_tried_a_few_times_as_before(cleared_at: int) -> None:
    wrong = HermesError("MLflow refused the request")
    assert waited_s(PLAN_RETRY_POLICY, wrong, cleared_at) == [5.0] * 3
    assert waited_s(REPORT_RETRY_POLICY, wrong, cleared_at) == [5.0] * 10


def test_the_tasks_of_a_sweep_have_that_patience_also_in_airflows_database() -> None:
    dag = sweep_dag("hermes_sweep")
    plan, report = (dag.get_task(name) for name in ("plan", "report"))
    assert (plan.retry_policy, report.retry_policy) == (PLAN_RETRY_POLICY, REPORT_RETRY_POLICY)
    stored = DagSerialization.from_dict(DagSerialization.to_dict(dag))
    assert stored.get_task("plan").retries == PLAN_RETRY_POLICY.retries


def test_a_user_who_decides_on_the_retries_of_a_report_gets_those() -> None:
    with empty_dag("d"):
        group = SweepTaskGroup("digits", sweep_file(), retries=2)
    report: Any = group.report
    assert (report.retries, report.retry_policy) == (2, None)

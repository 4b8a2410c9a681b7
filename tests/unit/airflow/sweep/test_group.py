"""Sweeps inside a DAG of one's own: its tasks, their order, what others may take of them."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, Asset, get_parsing_context, task
from airflow.serialization.serialized_objects import DagSerialization

from hermes_ops.airflow.prune.dag import prune_dag
from hermes_ops.airflow.sweep import dag as dags
from hermes_ops.airflow.sweep.dag import (
    REPORT_RETRY_POLICY,
    SweepTaskGroup,
    sweep,
    sweep_asset,
    sweep_dag,
)
from hermes_ops.airflow.sweep.machine_cleanup import machine_cleanup_dag
from hermes_ops.errors import ConfigError
from tests.unit.airflow.builders import sweep_file


def secret_file(**changes: Any) -> dict[str, Any]:
    environment = {"HF_TOKEN": "swordfish", "DB": "{{ conn.db.password }}"}
    trial = {"command": ["python", "t.py"], "directory": "/", "environment": environment}
    return sweep_file(trial=trial, **changes)


def test_a_group_stands_between_what_is_before_and_behind_it() -> None:
    with DAG("mine") as dag:

        @task
        def extract() -> int:
            return 3

        @task
        def use(config: Any, run: str) -> None: ...

        found = SweepTaskGroup("digits", sweep_file())
        extract() >> found
        use(found.best["config"], found.best["mlflow_run_id"])
    assert dag.get_task("digits.plan").upstream_task_ids == {"extract"}
    assert dag.get_task("digits.trial").upstream_task_ids == {"digits.plan"}
    assert dag.get_task("digits.report").upstream_task_ids == {"digits.trial"}
    assert dag.get_task("use").upstream_task_ids == {"digits.report"}


def test_results_that_a_sweep_is_made_of_are_waited_for() -> None:
    with DAG("mine") as dag:

        @task
        def extract() -> int:
            return 3

        SweepTaskGroup("a", sweep_file(budget={"max_epochs": extract()}))
    assert dag.get_task("a.plan").upstream_task_ids == {"extract"}


def test_a_function_makes_a_group_of_its_own_name() -> None:
    with DAG("mine") as dag:

        @task
        def extract() -> int:
            return 3

        @sweep(pool="a100")
        def digits(epochs: int, ds: str | None = None) -> dict[str, Any]:
            raise AssertionError("runs in the plan, not when the file is read")

        @sweep
        def plain() -> dict[str, Any]:
            raise AssertionError("as above")

        found = digits(extract())
        found >> plain()
    assert dag.get_task("digits.plan").upstream_task_ids == {"extract"}
    assert dag.get_task("digits.trial").pool == "a100"
    assert dag.get_task("plain.plan").upstream_task_ids == {"digits.report"}


def test_each_tasks_names_those_of_its_own_group() -> None:
    with DAG("mine") as dag:
        SweepTaskGroup("outer", sweep_file(), group={"tooltip": "a sweep"})
        SweepTaskGroup("other", sweep_file())
    plan: Any = dag.get_task("outer.plan")
    report: Any = dag.get_task("other.report")
    assert plan.trial_task == "outer.trial"
    assert (report.plan_task, report.trial_task) == ("other.plan", "other.trial")


def test_a_sweeps_asset_and_callbacks_are_its_reports() -> None:
    def told(context: Any) -> None: ...

    with DAG("mine") as dag:
        found = SweepTaskGroup("digits", sweep_file(), on_success_callback=told)
    report = dag.get_task("digits.report")
    assert found.asset == sweep_asset("mine", "digits")
    assert report.outlets == [sweep_asset("mine", "digits")]
    assert report.on_success_callback == [told]
    assert not dag.get_task("digits.plan").on_success_callback


def test_the_arguments_of_a_sweep_are_those_that_airflow_takes_for_a_task() -> None:
    own = Asset("own")
    with DAG("mine") as dag:
        SweepTaskGroup("digits", sweep_file(), retries=2, outlets=own)
        SweepTaskGroup("other", sweep_file(), outlets=None)
    report, other = dag.get_task("digits.report"), dag.get_task("other.report")
    assert (report.retries, other.retries) == (2, REPORT_RETRY_POLICY.retries)
    assert report.outlets == [sweep_asset("mine", "digits"), own]
    assert other.outlets == [sweep_asset("mine", "other")]


def test_defaults_of_the_dag_do_not_change_how_trials_are_scheduled() -> None:
    spoiled = {"retries": 0, "priority_weight": 7, "pool_slots": 1, "trigger_rule": "one_failed",
               "execution_timeout": timedelta(5), "depends_on_past": True,
               "wait_for_downstream": True, "retry_exponential_backoff": 2,
               "max_retry_delay": timedelta(1), "max_active_tis_per_dag": 1,
               "max_active_tis_per_dagrun": 1}  # fmt: skip
    with DAG("mine", default_args=spoiled) as dag:
        SweepTaskGroup("digits", sweep_file())
    trial: Any = dag.get_task("digits.trial")
    assert (trial.retries, trial.priority_weight, trial.pool_slots) == (100, 1, 10_000)
    assert trial.execution_timeout is None
    unset = ("depends_on_past", "wait_for_downstream", "retry_exponential_backoff",
             "max_retry_delay", "retry_policy", "max_active_tis_per_dag",
             "max_active_tis_per_dagrun")  # fmt: skip
    assert [name for name in unset if trial.partial_kwargs[name]] == []
    assert trial.trigger_rule == "all_success"
    assert dag.get_task("digits.report").trigger_rule == "all_done"


def test_no_secret_of_a_sweep_is_in_the_dag_that_airflow_stores() -> None:
    with DAG("mine") as dag:
        SweepTaskGroup("digits", secret_file(), mlflow_conn_id="our_mlflow")
    stored = json.dumps(DagSerialization.to_dict(dag), default=str)
    assert "swordfish" not in stored
    assert "digits.trial" in stored


def test_trials_render_the_templates_of_connections_that_the_dags_file_has_and_no_others() -> None:
    with DAG("mine") as dag:
        SweepTaskGroup("digits", secret_file())
    of_file: Any = dag.get_task("digits.trial")
    triggered: Any = sweep_dag("triggered").get_task("trial")
    assert of_file.partial_kwargs["connection_templates"] == ("{{ conn.db.password }}",)
    assert triggered.partial_kwargs["connection_templates"] == ()


def test_a_bad_sweep_is_refused_when_the_file_is_read_but_not_at_a_tasks_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = sweep_file(colour="red")
    with DAG("mine"), pytest.raises(ConfigError, match="colour"):
        SweepTaskGroup("digits", bad)
    started = get_parsing_context()._replace(dag_id="mine", task_id="digits.trial")
    monkeypatch.setattr(dags, "get_parsing_context", lambda: started)
    with DAG("mine") as dag:
        SweepTaskGroup("digits", bad)
    assert dag.has_task("digits.trial")


def test_a_sweep_file_is_found_beside_the_dags_file() -> None:
    file = Path(__file__).with_name("not-there.yaml")
    with DAG("mine"), pytest.raises(ConfigError, match=str(file)):
        SweepTaskGroup("digits", "not-there.yaml")


def test_a_sweep_whose_tasks_do_not_name_their_group_is_refused_as_prune_would_delete_its_run() -> (
    None
):
    with DAG("mine"), pytest.raises(ConfigError, match="prefix_group_id"):
        SweepTaskGroup("search", sweep_file(), group={"prefix_group_id": False})


@pytest.mark.parametrize("make", [sweep_dag, prune_dag, machine_cleanup_dag])
def test_a_dag_of_hermes_takes_the_arguments_that_it_sets_itself(make: Any) -> None:
    dag = make("mine", schedule="@daily", catchup=False, doc_md="Ours", tags=["ours"])
    assert (dag.catchup, dag.doc_md, dag.tags) == (False, "Ours", {"ours"})


def test_a_sweep_dag_may_be_scheduled_and_tells_its_asset() -> None:
    dag = sweep_dag("mine", pool="a100", schedule="@daily")
    assert dag.get_task("trial").pool == "a100"
    assert dag.get_task("report").outlets == [sweep_asset("mine")]
    assert "search" in dag.params

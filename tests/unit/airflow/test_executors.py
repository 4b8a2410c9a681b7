"""Which executors run trials as processes, and who says so before a sweep begins."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from airflow.executors import executor_loader
from airflow.executors.local_executor import LocalExecutor
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException

from hermes_ops.airflow import hosts
from hermes_ops.airflow.control.pool_file import publish, read_view
from hermes_ops.airflow.hosts import configured_refusal, process_refusal
from hermes_ops.airflow.sweep.dag import SweepTaskGroup, sweep, sweep_dag
from hermes_ops.airflow.sweep.nightly_dags import nightly_dags
from hermes_ops.airflow.sweep.tasks import PlanOperator
from hermes_ops.core.model import Gpu, Plan, Snapshot
from hermes_ops.errors import HermesError
from tests.unit.airflow.builders import SWEEP, DictStore, sweep_file

CELERY = "airflow.providers.celery.executors.celery_executor.CeleryExecutor"
MINE = f"{__name__}.MyExecutor"


class MyExecutor(LocalExecutor):
    """A company's own, which forks from the scheduler as well."""


class Away(LocalExecutor):
    """A company's own, which does not."""

    is_local = False


@pytest.fixture(autouse=True)
def uncached() -> Iterator[None]:
    """Airflow reads its executors once in a process."""

    def clear() -> None:
        executor_loader._executor_names.clear()
        for known in (
            executor_loader._alias_to_executors_per_team,
            executor_loader._module_to_executors_per_team,
            executor_loader._classname_to_executors_per_team,
            executor_loader._team_name_to_executors,
        ):
            known.clear()

    clear()
    yield
    clear()


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def configured(text: str) -> None:
        monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", text)

    return configured


@pytest.mark.parametrize(
    ("configuration", "trial"),
    [
        ("LocalExecutor", None),
        ("airflow.executors.local_executor.LocalExecutor", None),
        ("here:LocalExecutor,CeleryExecutor", None),
        ("CeleryExecutor,LocalExecutor", "LocalExecutor"),
        ("CeleryExecutor,gpus:LocalExecutor", "gpus"),
        (MINE, None),
        ("LocalExecutor;team=CeleryExecutor", None),
        ("no such, configuration:", None),  # Airflow itself refuses it
    ],
)
def test_trials_may_be_processes_where_the_scheduler_forks_them(
    configure: Callable[[str], None],
    configuration: str, trial: str | None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    configure(configuration)
    assert process_refusal(trial, "") == ""
    monkeypatch.setattr(hosts, "LOCAL_EXECUTORS", ())  # what is told by its name is one as well
    assert process_refusal(trial, "") == ""


@pytest.mark.parametrize(
    ("configuration", "trial", "name"),
    [
        ("CeleryExecutor", None, "CeleryExecutor"),
        (CELERY, None, "CeleryExecutor"),
        ("KubernetesExecutor", None, "KubernetesExecutor"),
        ("CeleryExecutor,LocalExecutor", None, "CeleryExecutor"),
        ("LocalExecutor,CeleryExecutor", "CeleryExecutor", "CeleryExecutor"),
        ("LocalExecutor,far:CeleryExecutor", "far", "CeleryExecutor"),
        ("LocalExecutor,far:KubernetesExecutor", "KubernetesExecutor", "KubernetesExecutor"),
        ("airflow.providers.edge3.executors.EdgeExecutor", None, "EdgeExecutor"),
        (f"{__name__}.Away", None, "Away"),
        ("of.another.Installation", None, "Installation"),
    ],
)
def test_trials_cannot_be_processes_of_workers_elsewhere(
    configure: Callable[[str], None], configuration: str, trial: str | None, name: str
) -> None:
    configure(configuration)
    assert process_refusal(trial, "").startswith(f"{name} runs the trials' tasks")


def test_a_pod_of_the_kubernetes_executor_may_be_configured_as_if_it_were_local(
    configure: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The official chart's pods are told LocalExecutor."""
    configure("LocalExecutor")
    assert process_refusal(None, None) == ""
    monkeypatch.setenv("AIRFLOW_IS_K8S_EXECUTOR_POD", "True")
    assert "KubernetesExecutor" in process_refusal(None, None)
    assert process_refusal("LocalExecutor", None) == ""  # the trials are not run as the plan is


def test_a_process_that_was_told_nothing_of_the_executor_refuses_nothing(
    configure: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIRFLOW__CORE__EXECUTOR", raising=False)
    assert configured_refusal() == ""
    configure("LocalExecutor")
    assert configured_refusal() == ""
    executor_loader._executor_names.clear()
    configure("CeleryExecutor")
    assert "CeleryExecutor" in configured_refusal()


def planned(plan: PlanOperator, params: dict[str, Any]) -> Any:
    class Instance(dict[str, Any]):
        def xcom_push(self, key: str, value: Any) -> None:
            self[key] = value

    context = {"run_id": SWEEP, "params": params, "task_state_store": DictStore(), "ti": Instance()}
    return plan.execute(context)


def own_dag() -> DAG:
    with DAG("mine", default_args={"executor": "CeleryExecutor"}) as dag:
        SweepTaskGroup("digits", sweep_file())
    return dag


def own_function() -> DAG:
    with DAG("mine") as dag:

        @sweep
        def digits() -> Any:
            return sweep_file()

        digits()
    return dag


@pytest.mark.parametrize(
    ("configuration", "make", "plan"),
    [
        ("CeleryExecutor", lambda _: sweep_dag(), "plan"),  # command line, form, REST
        ("KubernetesExecutor", lambda _: own_function(), "digits.plan"),
        ("LocalExecutor,CeleryExecutor", lambda _: own_dag(), "digits.plan"),
        ("CeleryExecutor", lambda folder: nightly_dags(folder)["nightly_digits"], "plan"),
    ],
)
def test_a_sweep_of_processes_is_refused_however_it_comes_in(
    configure: Callable[[str], None], configuration: str, make: Any, plan: str, tmp_path: Any
) -> None:
    configure(configuration)
    (tmp_path / "digits.json").write_text(json.dumps({**sweep_file(), "schedule": "0 2 * * *"}))
    task: Any = make(tmp_path).get_task(plan)
    with pytest.raises(AirflowFailException) as told:
        planned(task, sweep_file())
    said = str(told.value)
    assert said.startswith("trial.run_in: found process, and ")
    assert "LocalExecutor on one machine" in said
    assert "`run_in: pod`" in said


@pytest.mark.parametrize(
    ("configuration", "trial", "reason"),
    [
        ("LocalExecutor", {}, "an executor that stays on its machine"),
        ("KubernetesExecutor", {}, "run by KubernetesExecutor"),
        ("CeleryExecutor", {"run_in": "pod"}, "found pod; allowed: process"),
    ],
)
def test_a_sweep_that_no_worker_of_the_machines_would_take_is_refused(
    configure: Callable[[str], None],
    configuration: str,
    trial: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HERMES_MACHINES", "a=1,b=2")
    monkeypatch.setattr("hermes_ops.airflow.sweep.tasks.check_pods", lambda config: config)
    configure(configuration)
    file = sweep_file()
    plan: Any = sweep_dag().get_task("plan")
    with pytest.raises(AirflowFailException, match=reason):
        planned(plan, {**file, "trial": {**file["trial"], **trial}})


@pytest.mark.parametrize("executor", [CELERY, "airflow.providers.edge3.executors.EdgeExecutor"])
def test_processes_are_allowed_on_machines_that_are_named(
    configure: Callable[[str], None], executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_MACHINES", "a=1,b=2")
    configure(executor)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    plan: Any = sweep_dag().get_task("plan")
    with pytest.raises(HermesError, match="MLFLOW_TRACKING_URI is not set"):  # what comes next
        planned(plan, sweep_file())


def test_the_controllers_view_says_that_processes_are_refused() -> None:
    snapshot = Snapshot(7.0, (Gpu(0),), ())
    publish("gpus", snapshot, Plan(), {}, "p", process_refusal="CeleryExecutor runs them")
    assert (read_view("gpus") or {})["process_refusal"] == "CeleryExecutor runs them"
    publish("gpus", snapshot, Plan(), {}, "p")
    assert "process_refusal" not in (read_view("gpus") or {})

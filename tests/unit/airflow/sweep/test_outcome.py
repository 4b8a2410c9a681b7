from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.bases.xcom import BaseXCom
from airflow.serialization.serialized_objects import DagSerialization

from hermes_ops.airflow.sweep import sweep_report
from hermes_ops.airflow.sweep.dag import SweepTaskGroup
from hermes_ops.airflow.sweep.sweep_report import best_of
from hermes_ops.airflow.sweep.tasks import PlanOperator, ReportOperator
from hermes_ops.airflow.trial.links import (
    REPORT_XCOM,
    RUN_XCOM,
    SWEEP_XCOM,
    TRIALS_XCOM,
    StandingXCom,
    comparison_address,
    report_address,
    run_address,
)
from hermes_ops.airflow.trial.operator import HermesTrialOperator
from hermes_ops.tracking import SweepRef
from tests.unit.airflow.builders import sweep_file


def mlflow(*artifacts: str) -> Any:
    trials = [SimpleNamespace(number=n, run_id=f"run-{n}") for n in (0, 1)]
    known = SimpleNamespace(has=lambda run, name: run == "parent" and name in artifacts)
    return SimpleNamespace(trials=lambda ref: trials, artifacts=known)


@pytest.fixture(autouse=True)
def sweep(monkeypatch: pytest.MonkeyPatch) -> SweepRef:
    ref = SweepRef("a:g:run", "7", "parent")
    monkeypatch.setattr(sweep_report, "require_sweep", lambda tracker, sweep, experiment: ref)
    return ref


DOCUMENT = {"sweep": "a:g:run", "best": {"number": 1, "config": {"rate": 0.1}, "best": 0.5}}


def test_the_best_trial_comes_with_its_run_and_its_model(sweep: SweepRef) -> None:
    assert best_of(mlflow("model"), "digits", DOCUMENT) == (
        sweep,
        {
            "number": 1,
            "config": {"rate": 0.1},
            "best": 0.5,
            "sweep": "a:g:run",
            "mlflow_run_id": "run-1",
            "mlflow_sweep_run_id": "parent",
            "model_uri": "runs:/parent/model",
        },
    )


def test_a_trial_that_left_no_model_has_no_address_of_one() -> None:
    assert best_of(mlflow("report"), "digits", DOCUMENT)[1]["model_uri"] is None


def test_pages_are_named_without_the_password_of_their_server() -> None:
    page = run_address("https://me:swordfish@mlflow:5000/base/", "7", "r")
    assert page == "https://mlflow:5000/base/#/experiments/7/runs/r"
    trials = comparison_address("https://me:swordfish@mlflow:5000/base", SweepRef("s", "7", "r"))
    assert trials.startswith("https://mlflow:5000/base/#/experiments/7/runs?workflowType=")
    report = report_address("http://mlflow", "7", "r")
    assert report == "http://mlflow/#/experiments/7/runs/r/artifacts/report/report.html"


def test_each_link_leads_to_the_address_that_its_task_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = {RUN_XCOM: "trial's run", SWEEP_XCOM: "sweep's run", REPORT_XCOM: "report",
            TRIALS_XCOM: "its trials"}  # fmt: skip

    def get(*, ti_key: Any, key: str) -> Any:
        return left.get(key)

    monkeypatch.setattr("hermes_ops.airflow.trial.links.BaseXCom.get_value", get)
    task: Any = None
    key: Any = None
    assert {
        kind: {link.name: link.get_link(task, ti_key=key) for link in kind.operator_extra_links}
        for kind in (HermesTrialOperator, PlanOperator, ReportOperator)
    } == {
        HermesTrialOperator: {"MLflow run": "trial's run"},
        PlanOperator: {"Sweep in MLflow": "sweep's run", "Compare trials": "its trials"},
        ReportOperator: {
            "Sweep in MLflow": "sweep's run",
            "Compare trials": "its trials",
            "Sweep report": "report",
        },
    }
    left.clear()
    (link,) = HermesTrialOperator.operator_extra_links
    assert link.get_link(task, ti_key=key) == ""


def test_a_trials_link_alone_stays_when_airflow_clears_what_a_task_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deleted: list[str] = []

    def delete(cls: type, key: str, *place: object) -> None:
        deleted.append(key)

    monkeypatch.setattr(BaseXCom, "delete", classmethod(delete))
    for key in (RUN_XCOM, SWEEP_XCOM, "return_value"):
        StandingXCom.delete(key=key, task_id="trial", dag_id="d", run_id="r", map_index=3)
    assert deleted == [SWEEP_XCOM, "return_value"]


def test_airflow_reads_the_addresses_by_themselves_for_trials_too() -> None:
    with DAG("mine") as dag:
        SweepTaskGroup("digits", sweep_file())
    stored = DagSerialization.from_dict(DagSerialization.to_dict(dag))
    found = {t.task_id: {k.name: k.xcom_key for k in t.operator_extra_links} for t in stored.tasks}
    assert found == {
        "digits.plan": {"Sweep in MLflow": SWEEP_XCOM, "Compare trials": TRIALS_XCOM},
        "digits.trial": {"MLflow run": RUN_XCOM},
        "digits.report": {
            "Sweep in MLflow": SWEEP_XCOM,
            "Compare trials": TRIALS_XCOM,
            "Sweep report": REPORT_XCOM,
        },
    }

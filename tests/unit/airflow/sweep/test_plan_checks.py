from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from hermes_ops.airflow.control.quota_settings import QuotaSettings
from hermes_ops.airflow.sweep.tasks import refuse_class, refuse_length, refuse_missing
from hermes_ops.config import SweepConfig, parse
from hermes_ops.config.model import EXAMPLE
from hermes_ops.config.pool_quota import parse_quota
from hermes_ops.errors import ConfigError


def sweep(**trial: Any) -> SweepConfig:
    return parse({**EXAMPLE, "trial": {**EXAMPLE["trial"], **trial}}, "test", None)


def test_the_plan_refuses_references_to_what_trials_of_its_worker_do_not_have() -> None:
    worker = {"HF_TOKEN": "x", "AWS_KEY": "x", "PATH": "/", "HERMES_TRIAL_ENVIRONMENT": "HF_TOKEN"}
    refuse_missing(sweep(environment={"A": "{env:HF_TOKEN}{env:PATH}"}), worker)
    refuse_missing(sweep(run_in="pod", environment={"A": "{env:AWS_KEY}"}), worker)
    with pytest.raises(AirflowFailException) as refused:
        refuse_missing(sweep(environment={"A": "{env:AWS_KEY}", "B": "{env:NONE}"}), worker)
    text = str(refused.value)
    assert "trial.environment.A" in text
    assert "--trial-environment AWS_KEY" in text
    assert "trial.environment.B" in text


def test_the_plan_refuses_a_class_that_whoever_triggered_it_may_not_use() -> None:
    data = {"teams": [], "classes": [{"name": "interactive", "users": ["ann"]}]}
    QuotaSettings(parse_quota(data, "test")).write(QuotaSettings.file("gpus"))
    config = parse({**EXAMPLE, "class": "interactive"}, "test", None)

    def context(user: str | None) -> dict[str, Any]:
        return {"run_id": "digits-1", "dag_run": SimpleNamespace(triggering_user_name=user)}

    refuse_class(config, context("ann"))
    refuse_class(config, context(None))
    with pytest.raises(ConfigError, match="user bob may not use the class 'interactive'"):
        refuse_class(config, context("bob"))


@pytest.mark.parametrize(
    "environment",
    [{"HF_TOKEN": "{env:HF_TOKEN}"}, {"A": "{env:B}", "B": "{env:C}"}],
)
def test_a_variable_that_refers_itself_is_no_value_to_refer_to(environment: dict[str, str]) -> None:
    with pytest.raises(AirflowFailException, match=r"HF_TOKEN|trial\.environment\.B"):
        refuse_missing(sweep(environment=environment), {"PATH": "/"})
    refuse_missing(sweep(environment={"A": "{env:B}", "B": "plain"}), {"PATH": "/"})


@pytest.mark.parametrize(("setting", "is_alone", "trials", "is_refused"), [
    ("8", True, 9, True), ("8", False, 9, True), ("8", True, 8, False),
    ("", True, 1_025, True), ("", False, 1_025, False), ("", True, 1_024, False),
])  # fmt: skip
def test_the_plan_refuses_more_trials_than_a_mapped_task_of_airflow_may_have(
    setting: str, is_alone: bool, trials: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIRFLOW__CORE__MAX_MAP_LENGTH", raising=False)
    if setting:
        monkeypatch.setenv("AIRFLOW__CORE__MAX_MAP_LENGTH", setting)
    if not is_refused:
        refuse_length(trials, is_alone=is_alone)
        return
    with pytest.raises(AirflowFailException, match=r"at most \d+, which is .core. max_map_length"):
        refuse_length(trials, is_alone=is_alone)

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from hermes_ops.airflow.sweep.tasks import refuse_missing
from hermes_ops.config import SweepConfig, parse
from hermes_ops.config.model import EXAMPLE


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


@pytest.mark.parametrize(
    "environment",
    [{"HF_TOKEN": "{env:HF_TOKEN}"}, {"A": "{env:B}", "B": "{env:C}"}],
)
def test_a_variable_that_refers_itself_is_no_value_to_refer_to(environment: dict[str, str]) -> None:
    with pytest.raises(AirflowFailException, match=r"HF_TOKEN|trial\.environment\.B"):
        refuse_missing(sweep(environment=environment), {"PATH": "/"})
    refuse_missing(sweep(environment={"A": "{env:B}", "B": "plain"}), {"PATH": "/"})

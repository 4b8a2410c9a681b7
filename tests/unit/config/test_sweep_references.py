from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.airflow.open_secrets import redact
from hermes_ops.cli.sweep_check import inherited_names, reference_warnings
from hermes_ops.config import parse, render_environment
from hermes_ops.config.model import EXAMPLE
from hermes_ops.errors import ConfigError
from hermes_ops.stack.layout import Layout
from hermes_ops.stack.record import StackRecord, save


def sweep(**trial: Any) -> Any:
    return parse({**EXAMPLE, "trial": {**EXAMPLE["trial"], **trial}}, "test", None)


def test_the_configuration_the_lease_and_what_others_see_hold_the_reference_alone() -> None:
    config = sweep(environment={"A": "b", "HF_TOKEN": "{env:HF_TOKEN}"})
    rendered = render_environment(config, {})
    assert "HF_TOKEN" not in rendered
    assert json.loads(rendered["HERMES_REFERENCES"]) == {"HF_TOKEN": "{env:HF_TOKEN}"}
    login = sweep(environment={"URL": "https://u:{env:PW}@h"})
    assert redact(login).trial.environment == {"URL": "https://u:{env:PW}@h"}


def test_without_references_the_lease_has_no_variable_for_them() -> None:
    assert "HERMES_REFERENCES" not in render_environment(sweep(environment={"A": "b"}), {})


@pytest.mark.parametrize(
    ("trial", "place", "fix"),
    [
        ({"environment": {"T": "{env:AIRFLOW_HOME}"}}, "trial.environment.T", "services"),
        ({"environment": {"T": "${env:A}"}}, "trial.environment.T", "write {env:A}"),
        ({"command": ["python", "x.py", "{env:A}"]}, "trial.command[2]", "trial.environment"),
        (
            {"run_in": "pod", "pod": {"environment": {"T": "{env:A}"}}},
            "trial.pod.environment.T",
            "trial.environment",
        ),
    ],
)  # fmt: skip
def test_a_reference_that_may_not_be_is_refused_with_its_place_and_the_fix(
    trial: dict[str, Any], place: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        sweep(**trial)
    assert place in str(refused.value)
    assert fix in str(refused.value)


def test_a_variable_that_trials_of_the_stack_lack_is_a_warning_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_HOME", str(tmp_path))
    Layout(tmp_path).create()
    record = StackRecord(
        home=str(tmp_path), airflow_url="", mlflow_url="", pool="gpus", slots=1, policy="fifo",
        policy_options={}, mlflow_auth=False, standby=0, started_s=0.0,
        trial_environment=("HF_TOKEN",), inherited=("HF_TOKEN", "PATH"),
    )  # fmt: skip
    config = sweep(environment={"A": "{env:HF_TOKEN}", "B": "{env:OTHER}"})
    assert reference_warnings(config) == ()  # no stack is known
    save(Layout(tmp_path), record)
    (warning,) = reference_warnings(config)
    assert "trial.environment.B" in str(warning)
    assert "--trial-environment OTHER" in str(warning)
    assert reference_warnings(sweep(run_in="pod", environment={"B": "{env:OTHER}"})) == ()
    assert {"MLFLOW_TRACKING_URI", "HF_TOKEN"} <= inherited_names(record)

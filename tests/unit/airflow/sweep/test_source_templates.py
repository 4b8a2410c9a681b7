from __future__ import annotations

from typing import Any

import pytest

from hermes_ops.airflow.sweep.source import render_templates
from hermes_ops.config import parse, render_command
from hermes_ops.errors import ConfigError
from tests.unit.airflow.builders import sweep_file

VALUES = {"{{ ds }}": "2026-01-02", "{{ conn.x.password }}": "swordfish", "{{ odd }}": "{rate}"}


def sweep(**trial: Any) -> dict[str, Any]:
    return sweep_file(trial={"command": ["python", "train.py"], "directory": "/", **trial})


def replaced(**trial: Any) -> dict[str, Any]:
    found: dict[str, Any] = render_templates(sweep(**trial), VALUES.__getitem__, "test")["trial"]
    return found


def test_command_environment_and_paths_are_rendered() -> None:
    trial = replaced(
        command=["python", "{rate}", "--day={{ ds }}"],
        environment={"DAY": "of {{ ds }}"},
        directory="/data/{{ ds }}",
        tensorboard="runs/{{ ds }}",
    )
    assert trial["command"] == ["python", "{rate}", "--day=2026-01-02"]
    assert trial["environment"] == {"DAY": "of 2026-01-02"}
    assert (trial["directory"], trial["tensorboard"]) == ("/data/2026-01-02", "runs/2026-01-02")


def test_braces_without_a_space_behind_them_stay_what_they_are_in_a_sweep_file() -> None:
    command = ["python", '{{"a": 1}}', "{{{rate}}}", "{{ds}}"]
    assert replaced(command=command)["command"] == command


def test_braces_in_what_a_template_gives_name_no_parameter() -> None:
    data = render_templates(sweep(command=["python", "{{ odd }}"]), VALUES.__getitem__, "test")
    assert render_command(parse(data, "test", None), {"rate": 0.5})[1] == "{rate}"


def test_nothing_else_of_a_sweep_is_rendered() -> None:
    given = {**sweep(), "name": "{{ ds }}"}
    assert render_templates(given, VALUES.__getitem__, "test")["name"] == "{{ ds }}"


def test_a_variable_out_of_a_connection_is_a_secret() -> None:
    trial = replaced(environment={"DB": "{{ conn.x.password }}", "A": "b"}, secrets=["LICENCE"])
    assert trial["environment"] == {"DB": "{{ conn.x.password }}", "A": "b"}  # trials render it
    assert trial["secrets"] == ["LICENCE", "DB"]


def test_a_connection_in_a_command_is_refused_before_it_is_read() -> None:
    with pytest.raises(ConfigError, match=r"trial\.command\[1\].*trial\.environment"):
        render_templates(
            sweep(command=["python", "{{ conn.y.password }}"]), VALUES.__getitem__, "test"
        )


@pytest.mark.parametrize("trial", [None, {}, {"command": 3, "environment": ["x"], "python": None}])
def test_a_sweep_of_the_wrong_shape_is_left_to_the_check(trial: Any) -> None:
    given = {**sweep(), "trial": trial}
    assert render_templates(given, VALUES.__getitem__, "test")["trial"] in (
        trial,
        {**(trial or {}), "secrets": []},
    )

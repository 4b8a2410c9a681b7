"""Airflow's templates in a sweep that stands in a DAG's file: `{{ ds }}` and the like."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from hermes_ops.errors import ConfigError, Problem

Render = Callable[[str], str]

PATHS = ("directory", "python", "tensorboard")
_EXPRESSION = re.compile(r"\{\{-?\s.*?\s-?\}\}", re.DOTALL)
_SECRET = re.compile(r"\bconn\b")


def rendered(sweep: Mapping[str, Any], render: Render, source: str) -> dict[str, Any]:
    """The sweep with the templates in its command, its environment and its paths replaced.

    A template has a space behind its first braces and before its last ones (`{{ ds }}`): without
    them they stay what they are in a sweep file, plain braces. What a template gives is taken as it
    is: braces in it name no parameter. A variable that comes from a connection counts as a secret
    (`trial.secrets`); in a command, which everybody on the machine can read, ConfigError.
    """
    trial = sweep.get("trial")
    if not isinstance(trial, Mapping):
        return dict(sweep)
    fresh = dict(trial)
    if isinstance(command := trial.get("command"), list | tuple):
        _refuse_secrets(command, source)
        fresh["command"] = [_replaced(a, render, _doubled) for a in command]
    if isinstance(environment := trial.get("environment"), Mapping):
        fresh["environment"] = {k: _replaced(v, render, str) for k, v in environment.items()}
        secret = [k for k, v in environment.items() if _names_a_connection(v)]
        fresh["secrets"] = [*dict.fromkeys([*(trial.get("secrets") or ()), *secret])]
    fresh |= {k: _replaced(trial[k], render, str) for k in PATHS if k in trial}
    return {**sweep, "trial": fresh}


def _replaced(value: Any, render: Render, written: Callable[[str], str]) -> Any:  # noqa: ANN401 - whatever the file holds
    if not isinstance(value, str):
        return value
    return _EXPRESSION.sub(lambda found: written(render(found.group())), value)


def _doubled(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _names_a_connection(value: object) -> bool:
    found = _EXPRESSION.findall(value) if isinstance(value, str) else ()
    return any(_SECRET.search(expression) for expression in found)


def _refuse_secrets(command: list[Any] | tuple[Any, ...], source: str) -> None:
    for index, argument in enumerate(command):
        if _names_a_connection(argument):
            problem = Problem(
                f"trial.command[{index}]",
                "a template of a connection",
                "templates that are no secret",
                "put it into trial.environment and read it there",
            )
            raise ConfigError(source, (problem,))

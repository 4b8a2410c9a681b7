"""The settings of `hermes up`: from options, the environment and `hermes.toml`, in that order."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from hermes_ops.core.options import OptionValue, parse_options, split_options
from hermes_ops.errors import ConfigError, Problem, file_error_text
from hermes_ops.references import is_reserved
from hermes_ops.stack.credentials import OWN_USERS
from hermes_ops.stack.layout import Layout, absolute
from hermes_ops.trial.environment import PATTERN, split_names

AUTOMATIC_PORT = 0
SOURCE = "the configuration of the stack"

Role = Literal["viewer", "user", "op", "admin"]
"""What a person may do in Airflow, as its simple auth manager names it."""

UserName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class Settings(BaseModel):
    """The settings of one stack."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    home: Path
    slots: int | None = Field(default=None, ge=1, le=4096)
    pool: str = Field(default="gpus", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    policy: str = "frontrunner"
    policy_options: dict[str, OptionValue] = Field(default_factory=dict)
    airflow_port: int = Field(default=8080, ge=0, le=65535)
    mlflow_port: int = Field(default=5000, ge=0, le=65535)
    metrics_port: int = Field(default=AUTOMATIC_PORT, ge=0, le=65535)
    airflow_db: str | None = None
    mlflow_db: str | None = None
    mlflow_auth: bool = False
    standby: int | None = Field(default=None, ge=0, le=4096)
    dags: tuple[Path, ...] = ()
    trial_environment: tuple[str, ...] = ()
    start_timeout_s: float = Field(default=240.0, gt=0)
    drain_timeout_s: float = Field(default=40.0, ge=0)
    hang_timeout_s: float = Field(default=120.0, ge=0)
    airflow: dict[str, dict[str, str]] = Field(default_factory=dict)
    people: dict[UserName, Role] = Field(default_factory=dict)

    @field_validator("airflow_db", "mlflow_db")
    @classmethod
    def _check_database_url(cls, url: str | None) -> str | None:
        if url is None or url.startswith(
            ("sqlite:////", "postgresql://", "postgresql+psycopg2://")
        ):
            return url
        raise ValueError("only postgresql://user:password@host/name and sqlite:////absolute/path")

    @field_validator("dags")
    @classmethod
    def _make_absolute(cls, folders: tuple[Path, ...]) -> tuple[Path, ...]:
        # The services that read them run in another working directory.
        return tuple(absolute(folder) for folder in folders)

    @field_validator("trial_environment")
    @classmethod
    def _check_variable_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not re.fullmatch(PATTERN, name):
                raise ValueError(f"{name!r}: names of variables, or their beginning and a *")
            if is_reserved(name):
                raise ValueError(f"{name!r}: variables of the services reach no trial")
        return names

    @field_validator("people")
    @classmethod
    def _check_user_names(cls, people: dict[str, Role]) -> dict[str, Role]:
        for name in OWN_USERS:
            if name in people:
                raise ValueError(f"{name!r} is a user of every stack: give people other names")
        return people

    @property
    def layout(self) -> Layout:
        """The paths of this stack."""
        return Layout(self.home)


def resolve(
    home: Path, options: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> Settings:
    """Merge options, environment and `hermes.toml`; an option that is None was not given.

    Raises `ConfigError` with the source, the value and what is allowed.
    """
    environ = os.environ if environment is None else environment
    file = Layout(home).settings_file
    merged: dict[str, object] = {**_from_file(file), **_from_environment(environ)}
    merged.update({key: value for key, value in options.items() if value is not None})
    merged["home"] = home
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(SOURCE, _problems(error, file)) from error


def _from_file(file: Path) -> dict[str, object]:
    if not file.exists():
        return {}
    try:
        return dict(tomllib.loads(file.read_text("utf-8")))
    except (ValueError, OSError) as error:  # ValueError: no TOML, or no UTF-8
        problem = Problem(
            str(file), file_error_text(error), "a TOML file", f"correct or remove {file}"
        )
        raise ConfigError(SOURCE, (problem,)) from error


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    """Read `HERMES_<SETTING>`; lists are separated like PATH, options are k=v,k=v or JSON."""
    values: dict[str, object] = {}
    for name in Settings.model_fields:
        value = environ.get(f"HERMES_{name.upper()}")
        if value is None or name in {"home", "airflow", "people"}:
            continue
        values[name] = _parse(name, value)
    return values


def _parse(name: str, value: str) -> object:
    if name == "dags":
        return tuple(part for part in value.split(os.pathsep) if part)
    if name == "trial_environment":
        return split_names(value)
    if name == "policy_options" and value.startswith("{"):
        return _json(value)
    if name == "policy_options":
        return parse_options(split_options(value))
    return value


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        fix = "correct HERMES_POLICY_OPTIONS"
        problem = Problem("policy_options", f"{text!r} ({error})", "a JSON object or k=v,k=v", fix)
        raise ConfigError(SOURCE, (problem,)) from error


def _problems(error: ValidationError, file: Path) -> tuple[Problem, ...]:
    return tuple(_problem(detail, file) for detail in error.errors())


def _problem(detail: ErrorDetails, file: Path) -> Problem:
    from hermes_ops.config.problems import plain_rule  # a fifth of a second, for an error alone

    name = ".".join(str(part) for part in detail["loc"]) or "settings"
    setting_names = ", ".join(sorted(set(Settings.model_fields) - {"home"}))
    unknown = detail["type"] == "extra_forbidden"
    return Problem(
        where=name,
        # A database address carries a password: it is never echoed.
        found="an unknown setting" if unknown else _shown(name, detail["input"]),
        allowed=setting_names if unknown else plain_rule(detail),
        fix=f"correct {' or '.join([*_places(name.partition('.')[0]), str(file)])}",
    )


_WITHOUT_OPTION = ("start_timeout_s", "drain_timeout_s", "hang_timeout_s")
_IN_FILE_ALONE = ("airflow", "people")


def _places(setting: str) -> list[str]:
    """Return the option and the variable that set a setting, where they exist."""
    if setting in _IN_FILE_ALONE or setting not in Settings.model_fields:
        return []
    variable = f"HERMES_{setting.upper()}"
    if setting in _WITHOUT_OPTION:
        return [variable]
    option = "policy-option" if setting == "policy_options" else setting.replace("_", "-")
    return [f"--{option}", variable]


def _shown(name: str, value: object) -> str:
    return "(not shown)" if name.endswith("_db") else repr(value)

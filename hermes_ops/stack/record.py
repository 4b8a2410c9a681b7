"""`stack.json`: the facts of the running stack that clients need; it holds no secret."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from hermes_ops.core.options import OptionValue
from hermes_ops.errors import StackError
from hermes_ops.stack.credentials import CONTROLLER_USER
from hermes_ops.stack.layout import Layout, default_home, write_private
from hermes_ops.trial.environment import SETTING

MLFLOW_USER = "admin"


@dataclass(frozen=True, slots=True)
class StackRecord:
    """One running stack: addresses, pool and policy; `started_s` is Unix time.

    `trial_environment` is the setting of that name, `inherited` the names of the variables that
    trials inherit of the shell in which the stack was started.
    """

    home: str
    airflow_url: str
    mlflow_url: str
    pool: str
    slots: int
    policy: str
    policy_options: dict[str, OptionValue]
    mlflow_auth: bool
    standby: int
    started_s: float
    metrics_url: str = ""
    trial_environment: tuple[str, ...] = ()
    inherited: tuple[str, ...] = ()


def save(layout: Layout, record: StackRecord) -> None:
    """Write `stack.json` atomically."""
    write_private(layout.record, json.dumps(asdict(record), indent=2) + "\n")


def load(home: Path) -> StackRecord:
    """Return the stack that was started in `home`; raises `StackError` where none was."""
    file = Layout(home).record
    try:
        return StackRecord(**json.loads(file.read_text()))
    except FileNotFoundError:
        message = f"Hermes is not running in {home}: start it with `hermes up --home {home}`"
        raise StackError(message) from None
    except (ValueError, TypeError) as error:
        message = f"{file} cannot be read ({error}): run `hermes down`, then `hermes up`"
        raise StackError(message) from error


def client_environment(home: Path | None = None) -> dict[str, str]:
    """Return the variables with which a client reaches the stack of `home`.

    `home` defaults to `$HERMES_HOME`, else `~/.hermes`. The password of Airflow's user is named
    by its file; MLflow's clients take theirs from the environment only.
    Raises `StackError` where no stack was started.
    """
    layout = Layout(home or default_home())
    return environment_of(load(layout.home))


def environment_of(record: StackRecord) -> dict[str, str]:
    """Return the variables of `client_environment` for a stack whose record is loaded."""
    layout = Layout(Path(record.home))
    environment = {
        "HERMES_HOME": record.home,
        "HERMES_POOL": record.pool,
        "HERMES_SLOTS": str(record.slots),
        "HERMES_POLICY": record.policy,
        "HERMES_POLICY_OPTIONS": json.dumps(record.policy_options),
        "HERMES_AIRFLOW_URL": record.airflow_url,
        "HERMES_AIRFLOW_USER": CONTROLLER_USER,
        "HERMES_AIRFLOW_PASSWORD_FILE": str(layout.controller_password),
        "HERMES_AIRFLOW_TOKEN": "",  # one of the shell is another Airflow's
        "HERMES_AIRFLOW_TOKEN_FILE": "",
        "AIRFLOW_HOME": str(layout.airflow),
        "AIRFLOW_CONFIG": str(layout.airflow_config),
        "MLFLOW_TRACKING_URI": record.mlflow_url,
        SETTING: ",".join(record.trial_environment),
        **quiet_environment(),
    }
    if record.mlflow_auth:
        environment["MLFLOW_TRACKING_USERNAME"] = MLFLOW_USER
        environment["MLFLOW_TRACKING_PASSWORD"] = layout.mlflow_password.read_text().strip()
    return environment


def quiet_environment() -> dict[str, str]:
    """Return the variables that disable telemetry and keep loopback away from any proxy."""
    direct = ["127.0.0.1", "localhost"]
    others = [part for part in os.environ.get("NO_PROXY", "").split(",") if part]
    no_proxy = ",".join(dict.fromkeys([*others, *direct]))
    return {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }

"""How a command reaches the running services: the stack of a home, else the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hermes_ops.errors import StackError

if TYPE_CHECKING:
    from hermes_ops.airflow.client import AirflowClient
    from hermes_ops.tracking import Tracker


@dataclass(frozen=True, slots=True)
class Connection:
    """The clients of one stack; `pool` is the pool that it serves."""

    airflow: AirflowClient
    tracker: Tracker
    pool: str
    airflow_url: str
    mlflow_url: str


def connect_tracker(home: Path | None) -> Tracker:
    """Reach MLflow alone: that of the stack of `home`, or the one that the environment names."""
    from hermes_ops.tracking import Tracker

    _take_environment(home, ("MLFLOW_TRACKING_URI",))
    return Tracker(os.environ["MLFLOW_TRACKING_URI"])


def _take_environment(home: Path | None, needed: tuple[str, ...]) -> None:
    """Set the variables of the stack of `home`; StackError when neither it nor they are there."""
    from hermes_ops.stack import client_environment

    try:
        os.environ.update(client_environment(home))
    except StackError:
        if any(name not in os.environ for name in needed):
            raise
        if home is not None:
            os.environ["HERMES_HOME"] = str(home.absolute())


def connect(home: Path | None) -> Connection:
    """Reach the stack of `home` ($HERMES_HOME, else ~/.hermes), or what the environment names."""
    from hermes_ops.airflow.client import AirflowClient, Credentials
    from hermes_ops.tracking import Tracker

    _take_environment(home, ("HERMES_AIRFLOW_URL", "MLFLOW_TRACKING_URI"))
    credentials = Credentials.from_environment()
    uri = os.environ["MLFLOW_TRACKING_URI"]
    return Connection(
        AirflowClient(credentials),
        Tracker(uri),
        os.environ.get("HERMES_POOL", "gpus"),
        credentials.url,
        uri,
    )

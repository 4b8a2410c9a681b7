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


def connect(home: Path | None) -> Connection:
    """Reach the stack of `home` ($HERMES_HOME, else ~/.hermes), or what the environment names."""
    from hermes_ops.airflow.client import AirflowClient, Credentials
    from hermes_ops.stack import client_environment
    from hermes_ops.tracking import Tracker

    try:
        os.environ.update(client_environment(home))
    except StackError:
        if "HERMES_AIRFLOW_URL" not in os.environ or "MLFLOW_TRACKING_URI" not in os.environ:
            raise
        if home is not None:
            os.environ["HERMES_HOME"] = str(home.absolute())
    credentials = Credentials.from_environment()
    uri = os.environ["MLFLOW_TRACKING_URI"]
    return Connection(
        AirflowClient(credentials),
        Tracker(uri),
        os.environ.get("HERMES_POOL", "gpus"),
        credentials.url,
        uri,
    )

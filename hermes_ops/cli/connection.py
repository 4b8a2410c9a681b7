"""The running services as a command reaches them, and the person who gives the command."""

from __future__ import annotations

import logging
import os
import pwd
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hermes_ops.core.amounts import utc_text
from hermes_ops.errors import HermesError, StackError

if TYPE_CHECKING:
    from hermes_ops.airflow.client import AirflowClient
    from hermes_ops.cli.sweep_location import SweepLocation
    from hermes_ops.tracking import Tracker

log = logging.getLogger(__name__)

Home = Annotated[
    Path | None, typer.Option(help="State folder; $HERMES_HOME, else ~/.hermes.", metavar="FOLDER")
]


@dataclass(frozen=True, slots=True)
class Connection:
    """The clients of one stack; `pool` is the pool that it serves."""

    airflow: AirflowClient
    tracker: Tracker
    pool: str
    airflow_url: str
    mlflow_url: str

    @classmethod
    def from_home(cls, home: Path | None) -> Connection:
        """Connect to the stack of `home` ($HERMES_HOME, else ~/.hermes), or of the environment."""
        from hermes_ops.airflow.client import AirflowClient
        from hermes_ops.airflow.credentials import AirflowCredentials
        from hermes_ops.retry import MANY
        from hermes_ops.tracking import Tracker

        _adopt_environment(home, ("HERMES_AIRFLOW_URL", "MLFLOW_TRACKING_URI"))
        credentials = AirflowCredentials.from_environment()
        uri = os.environ["MLFLOW_TRACKING_URI"]
        return cls(
            AirflowClient(credentials, pauses=MANY),
            Tracker(uri),
            os.environ.get("HERMES_POOL", "gpus"),
            credentials.url,
            uri,
        )


def connect_tracker(home: Path | None) -> Tracker:
    """Connect to MLflow alone: that of the stack of `home`, or the one of the environment."""
    from hermes_ops.tracking import Tracker

    _adopt_environment(home, ("MLFLOW_TRACKING_URI",))
    return Tracker(os.environ["MLFLOW_TRACKING_URI"])


def _adopt_environment(home: Path | None, needed: tuple[str, ...]) -> None:
    """Set the variables of the stack of `home`.

    Raise StackError if there is no stack and a needed variable is not set either.
    """
    from hermes_ops.stack import client_environment

    try:
        os.environ.update(client_environment(home))
    except StackError:
        if any(name not in os.environ for name in needed):
            raise
        if home is not None:
            os.environ["HERMES_HOME"] = str(home.absolute())


ACTIONS_TAG = "hermes.actions"
"""Tag of a sweep's MLflow run: a line for each command that was given to it, newest last."""

MOST_ACTIONS = 20
_MOST_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Person:
    """The user that Airflow has authenticated, and the names of the system's user and host."""

    airflow_user: str
    system_user: str
    host: str

    def __str__(self) -> str:
        return f"{self.system_user}@{self.host}, Airflow user {self.airflow_user}"


def current_person(airflow: AirflowClient) -> Person:
    """Return the person who runs this program and is logged in to Airflow."""
    try:
        name = airflow.user_name()
    except HermesError as error:
        log.debug("Airflow did not return the user's name: %s", error)
        name = "unknown"
    return Person(_plain(name), _plain(_system_user()), _plain(socket.gethostname()))


def record_action(
    connection: Connection, place: SweepLocation, person: Person, action: str
) -> None:
    """Record an action on a sweep in Airflow's audit log and in the sweep's MLflow run.

    Setting the plan task's note is the request that Airflow's audit log records with its own user.
    The action has been taken already: a record that fails is logged, not raised.
    """
    from hermes_ops.tracking.tracker import require_sweep

    stamp = utc_text(time.time())
    line = f"{stamp}: {action} by {person}"
    try:
        connection.airflow.note(place.plan, line)
        ref = require_sweep(connection.tracker, place.sweep)
        lines = [*recorded_actions(connection, place), line][-MOST_ACTIONS:]
        connection.tracker.set_tags(ref.parent_run_id, {ACTIONS_TAG: "\n".join(lines)})
    except HermesError as error:
        log.warning("It is not recorded who did this: %s", error)


def recorded_actions(connection: Connection, place: SweepLocation) -> list[str]:
    """Return a line for each command that was given to a sweep, newest last."""
    from hermes_ops.tracking.tracker import require_sweep

    ref = require_sweep(connection.tracker, place.sweep)
    return connection.tracker.sweep(ref).tags.get(ACTIONS_TAG, "").splitlines()


def _system_user() -> str:
    """Return the name of the process's user: not that of a variable, which anyone may set."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _plain(text: str) -> str:
    """Return a name that can stand in a line, whatever characters it has."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown[:_MOST_CHARACTERS] or "unknown"

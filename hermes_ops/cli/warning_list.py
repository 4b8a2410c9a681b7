"""The warnings of a sweep file: found before it starts, listed, refused where that is asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import typer

from hermes_ops.cli.workspace_warning import workspace_warnings
from hermes_ops.config import SweepConfig, SweepWarning, warnings_of
from hermes_ops.errors import HermesError

if TYPE_CHECKING:
    from hermes_ops.airflow.client import AirflowClient
    from hermes_ops.cli.connection import Connection

REFUSED = 2
"""The exit code of `--strict` where there are warnings."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class WarningList:
    """The warnings of one sweep file."""

    file: Path
    warnings: tuple[SweepWarning, ...]

    def render(self) -> str:
        """Return them as a numbered list for a terminal; nothing where there are none."""
        from hermes_ops.config.files import places

        if not self.warnings:
            return ""
        count = len(self.warnings)
        shown = zip(self.warnings, places(self.file, [w.path for w in self.warnings]), strict=True)
        lines = [f"  {n}. {warning.at(line)}" for n, (warning, line) in enumerate(shown, start=1)]
        return "\n".join([f"{count} warning{'s' if count > 1 else ''}:", *lines])

    def document(self) -> list[dict[str, str]]:
        """Return them as a JSON list."""
        return [warning.document() for warning in self.warnings]

    def refuse(self) -> None:
        """End the command where there are warnings: they are the last that it says."""
        if self.warnings:
            typer.echo(
                f"{self.render()}\nNothing was started: --strict refuses warnings.", err=True
            )
            raise typer.Exit(REFUSED)


def found_warnings(
    config: SweepConfig, file: Path, connection: Connection | None, dag_id: str | None = None
) -> WarningList:
    """Return the warnings of a file; what only Airflow knows is among them where it answers.

    The script is looked for where its trials train: on this machine, unless Airflow is on another
    one. `dag_id`: the DAG that is to run the sweep.
    """
    if connection is None:
        found = warnings_of(config, pool_slots=None, environ=os.environ)
        return WarningList(file, (*found, *workspace_warnings(config, os.environ)))
    slots, paused = None, False
    try:
        slots = slots_of(connection.airflow, config.pool)
        paused = dag_id is not None and is_paused(connection.airflow, dag_id)
    except HermesError:  # it does not answer: what it knows is not known
        pass
    environ = os.environ if is_here(connection.airflow_url) else None
    found = warnings_of(config, pool_slots=slots, environ=environ)
    found = (*found, *workspace_warnings(config, environ))
    return WarningList(file, (*found, *([_paused(dag_id)] if paused and dag_id else ())))


def slots_of(airflow: AirflowClient, pool: str) -> int | None:
    """Return the slots of a pool; None where it has no limit or is not there."""
    found = airflow.pool(pool)
    slots = -1 if found is None else int(found["slots"])
    return None if slots < 0 else slots


def is_paused(airflow: AirflowClient, dag_id: str) -> bool:
    """Return True if Airflow starts no task of the DAG."""
    return bool((airflow.dag(dag_id) or {}).get("is_paused"))


def is_here(url: str) -> bool:
    """Return True if the address is one of this machine."""
    return urlsplit(url).hostname in LOOPBACK


def reached(home: Path | None) -> Connection | None:
    """Return the services of the stack of `home`, or of the environment; None without any.

    They are asked with little patience: a command that needs none of them must not wait.
    """
    from hermes_ops.airflow.client import AirflowClient
    from hermes_ops.cli.connection import connect

    try:
        found = connect(home)
    except HermesError:
        return None
    return replace(found, airflow=AirflowClient(found.airflow.credentials, timeout_s=ANSWER_S))


def _paused(dag_id: str) -> SweepWarning:
    found = f"the DAG {dag_id} is paused"
    fix = "unpause it: the switch on its page in Airflow"
    return SweepWarning(("Airflow",), found, "the sweep waits until it no longer is", fix)

"""`hermes up`, `hermes down`, `hermes status`."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from hermes_ops.stack.lifecycle import StackStatus
    from hermes_ops.stack.record import StackRecord
    from hermes_ops.stack.settings import Settings

NOT_RUNNING_STATUS = 3
INTERRUPTED_STATUS = 130

Home = Annotated[
    Path | None, typer.Option(help="State folder; $HERMES_HOME, else ~/.hermes.", metavar="FOLDER")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the application."""
    app.command("up")(up)
    app.command("down")(down)
    app.command("status")(status)


# Longer than 40 lines: one line an option, so that --help needs no second table of them.
def up(
    *,
    home: Home = None,
    slots: Annotated[
        int | None, typer.Option(help="Trials that may run at once; default: the number of GPUs.")
    ] = None,
    pool: Annotated[str | None, typer.Option(help="Airflow pool; default gpus.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="Scheduling policy; default frontrunner.")
    ] = None,
    policy_option: Annotated[
        list[str] | None, typer.Option(help="A parameter of the policy.", metavar="NAME=VALUE")
    ] = None,
    airflow_port: Annotated[
        int | None, typer.Option(help="Default 8080; 0 takes a free one.")
    ] = None,
    mlflow_port: Annotated[
        int | None, typer.Option(help="Default 5000; 0 takes a free one.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="The controller's, for Prometheus; default: any free one.")
    ] = None,
    airflow_db: Annotated[
        str | None, typer.Option(help="postgresql://…; default: SQLite.", metavar="URL")
    ] = None,
    mlflow_db: Annotated[
        str | None, typer.Option(help="postgresql://…; default: SQLite.", metavar="URL")
    ] = None,
    mlflow_auth: Annotated[
        bool | None, typer.Option("--mlflow-auth/--no-mlflow-auth", help="MLflow asks to log in.")
    ] = None,
    standby: Annotated[
        int | None, typer.Option(help="Interpreters kept ready; default: one a slot, 0: none.")
    ] = None,
    dags: Annotated[
        list[Path] | None, typer.Option(help="A further folder of DAGs.", metavar="FOLDER")
    ] = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay until Ctrl-C, then stop everything.")
    ] = False,
) -> None:
    """Start Airflow, MLflow and the controller; return when all of them are healthy."""
    from hermes_ops.core.options import parse_options

    given = {
        "slots": slots,
        "pool": pool,
        "policy": policy,
        "policy_options": parse_options(policy_option) if policy_option else None,
        "airflow_port": airflow_port,
        "mlflow_port": mlflow_port,
        "metrics_port": metrics_port,
        "airflow_db": airflow_db,
        "mlflow_db": mlflow_db,
        "mlflow_auth": mlflow_auth,
        "standby": standby,
        "dags": tuple(dags) if dags else None,
    }
    _up(_settings(home, given), foreground)


def _settings(home: Path | None, given: Mapping[str, object]) -> Settings:
    from hermes_ops.stack.layout import absolute, default_home
    from hermes_ops.stack.settings import resolve

    return resolve(absolute(home) if home else default_home(), given)


def _up(settings: Settings, foreground: bool) -> None:
    from hermes_ops.stack import lifecycle

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        started = lifecycle.up(settings, typer.echo)
    except KeyboardInterrupt:
        typer.echo("Interrupted: everything that was started has been stopped.", err=True)
        raise typer.Exit(INTERRUPTED_STATUS) from None
    _welcome(settings, started)
    if foreground:
        lifecycle.wait_for_signal(lambda: typer.echo("Ctrl-C stops everything."))
        _down(settings)


def _welcome(settings: Settings, started: StackRecord) -> None:
    from hermes_ops.stack import credentials

    layout = settings.layout
    login = _login(credentials.ADMIN_USER, credentials.admin_password_file(layout))
    typer.echo(f"Airflow   {started.airflow_url}   {login}")
    mlflow_login = ""
    if started.mlflow_auth:
        mlflow_login = f"   {_login('admin', credentials.mlflow_password_file(layout))}"
    typer.echo(f"MLflow    {started.mlflow_url}{mlflow_login}")
    typer.echo(
        f"Pool      {started.pool}: {started.slots} slots, policy {started.policy}"
        f"   (passwords in {layout.secrets}, logs in {layout.logs})"
    )


def _login(user: str, file: Path) -> str:
    """Say how to log in; the password itself to a terminal alone, as a log is read by others."""
    if sys.stdout.isatty():
        return f"log in as {user} / {file.read_text().strip()}"
    return f"log in as {user}, password in {file}"


def down(home: Home = None) -> None:
    """Stop the trials with their checkpoints, then everything else."""
    _down(_settings(home, {}))


def _down(settings: Settings) -> None:
    from hermes_ops.stack import lifecycle

    stopped = lifecycle.down(settings.layout, settings.drain_timeout_s, typer.echo)
    if stopped:
        typer.echo("Everything is stopped; no process is left.")
    else:
        typer.echo(f"Hermes is not running in {settings.home}.")


def status(
    home: Home = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the programs, addresses, pool and policy; exit code 3 if Hermes is not running."""
    from hermes_ops.stack import lifecycle

    settings = _settings(home, {})
    seen = lifecycle.status(settings.layout)
    if as_json:
        typer.echo(json.dumps(_document(settings, seen), indent=2))
    elif not seen.programs or seen.record is None:
        typer.echo(f"Hermes is not running in {settings.home}.")
    else:
        _table(seen)
        for line in _troubles(settings.home, seen):
            typer.secho(line, fg="red")
    raise typer.Exit(0 if seen.running else NOT_RUNNING_STATUS)


def _document(settings: Settings, seen: StackStatus) -> dict[str, object]:
    return {
        "home": str(settings.home),
        "running": seen.running,
        "stack": asdict(seen.record) if seen.record else None,
        "programs": [asdict(program) for program in seen.programs],
        "problems": _troubles(settings.home, seen),
    }


def _troubles(home: Path, seen: StackStatus) -> list[str]:
    """Say what fails in the pool: the controller's rounds, and steps of single sweeps."""
    import time

    from hermes_ops.airflow.control.publish import read_view
    from hermes_ops.airflow.problems import problem_lines, silence_line, trouble_line

    if seen.record is None or not seen.running:
        return []
    view = read_view(seen.record.pool, home)
    lines = [trouble_line(view), silence_line(view, time.time()), *problem_lines(view)]
    return [line for line in lines if line]


def _table(seen: StackStatus) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("program", "state", "pid", "up for")
    for program in seen.programs:
        up_for = f"{program.uptime_s:.0f} s" if program.pid else ""
        table.add_row(program.name, program.state.lower(), str(program.pid or ""), up_for)
    console = Console()
    console.print(table)
    stack = seen.record
    if stack:
        options = " ".join(f"{k}={v}" for k, v in stack.policy_options.items())
        console.print(f"Airflow  {stack.airflow_url}", highlight=False)
        console.print(f"MLflow   {stack.mlflow_url}", highlight=False)
        console.print(f"Metrics  {stack.metrics_url}", highlight=False)
        console.print(
            f"Pool     {stack.pool}: {stack.slots} slots, policy {stack.policy} {options}".rstrip(),
            highlight=False,
        )

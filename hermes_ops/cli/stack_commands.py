"""`hermes up`, `hermes down`, `hermes status`."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from hermes_ops.cli import INTERRUPTED
from hermes_ops.cli.connection import Home
from hermes_ops.core.amounts import counted, duration

if TYPE_CHECKING:
    from rich.console import Console

    from hermes_ops.stack.lifecycle import StackStatus
    from hermes_ops.stack.record import StackRecord
    from hermes_ops.stack.settings import Settings
    from hermes_ops.stack.supervisor_client import ProgramState

NOT_RUNNING_STATUS = 3
UNSUPERVISED_STATUS = 4


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
    airflow_port: Annotated[int | None, typer.Option(help="Default 8080; 0: a free one.")] = None,
    mlflow_port: Annotated[int | None, typer.Option(help="Default 5000; 0: a free one.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="The controller's for Prometheus; default: a free one.")
    ] = None,
    airflow_db: Annotated[
        str | None, typer.Option(help="postgresql://…; default: SQLite.", metavar="URL")
    ] = None,
    mlflow_db: Annotated[
        str | None, typer.Option(help="postgresql://…; default: SQLite.", metavar="URL")
    ] = None,
    mlflow_auth: Annotated[
        bool | None, typer.Option("--mlflow-auth/--no-mlflow-auth", help="MLflow requires a login.")
    ] = None,
    standby: Annotated[
        int | None, typer.Option(help="Standby interpreters; default: one a slot, 0: none.")
    ] = None,
    dags: Annotated[
        list[Path] | None, typer.Option(help="A further folder of DAGs.", metavar="FOLDER")
    ] = None,
    trial_environment: Annotated[
        list[str] | None,
        typer.Option(help="A variable that trials inherit; AWS_* for several.", metavar="NAME"),
    ] = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay until Ctrl-C, then stop everything.")
    ] = False,
) -> None:
    """Start Airflow, MLflow and the controller; return when all of them are healthy."""
    given = {
        "slots": slots,
        "pool": pool,
        "policy": policy,
        "policy_options": _options(policy_option),
        "airflow_port": airflow_port,
        "mlflow_port": mlflow_port,
        "metrics_port": metrics_port,
        "airflow_db": airflow_db,
        "mlflow_db": mlflow_db,
        "mlflow_auth": mlflow_auth,
        "standby": standby,
        "dags": tuple(dags) if dags else None,
        "trial_environment": tuple(trial_environment) if trial_environment else None,
    }
    _up(_settings(home, given), foreground)


def _options(written: list[str] | None) -> Mapping[str, object] | None:
    from hermes_ops.core.options import parse_options

    return parse_options(written) if written else None


def _settings(home: Path | None, given: Mapping[str, object]) -> Settings:
    from hermes_ops.stack.layout import absolute, default_home
    from hermes_ops.stack.settings import resolve

    return resolve(absolute(home) if home else default_home(), given)


def _up(settings: Settings, foreground: bool) -> None:
    from hermes_ops.stack import lifecycle
    from hermes_ops.stack.supervisor_client import SupervisorClient

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        started = lifecycle.up(settings, typer.echo)
    except KeyboardInterrupt:
        typer.echo("Interrupted: everything that was started has been stopped.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    _welcome(settings, started)
    if foreground:
        is_alive = SupervisorClient(settings.layout).is_alive
        is_interrupted = lifecycle.wait_for_signal(
            lambda: typer.echo("Ctrl-C stops everything."), is_alive
        )
        if not is_interrupted:
            typer.echo("The process supervisor has ended: everything else is stopped.", err=True)
        _down(settings)
        raise typer.Exit(0 if is_interrupted else 1)


def _welcome(settings: Settings, started: StackRecord) -> None:
    from hermes_ops.stack import credentials

    layout = settings.layout
    login = _login(credentials.ADMIN_USER, layout.admin_password)
    typer.echo(f"Airflow   {started.airflow_url}   {login}")
    mlflow_login = ""
    if started.mlflow_auth:
        mlflow_login = f"   {_login('admin', layout.mlflow_password)}"
    typer.echo(f"MLflow    {started.mlflow_url}{mlflow_login}")
    typer.echo(
        f"Pool      {started.pool}: {counted(started.slots, 'slot')}, policy {started.policy}"
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
        typer.echo(_not_running_line(settings.home))


def _not_running_line(home: Path) -> str:
    """Say that nothing runs, and whether that is because the folder's name is wrong."""
    return f"Hermes is not running in {home}{'' if home.exists() else ', which does not exist'}."


def status(
    home: Home = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    disk: Annotated[
        bool, typer.Option("--disk", help="Also show the disk usage of each sweep.")
    ] = False,
) -> None:
    """Show the programs, addresses, pool and policy; exit code 3 if Hermes is not running.

    Exit code 4: its programs run on, but the process supervisor that restarts them has ended.
    """
    from hermes_ops.airflow.explanation import (
        deadline_lines,
        notice_lines,
        queue_lines,
        quota_lines,
    )
    from hermes_ops.cli.storage_commands import disk_document, print_disk
    from hermes_ops.cli.tables import output_console
    from hermes_ops.stack import lifecycle

    settings = _settings(home, {})
    stack_status = lifecycle.status(settings.layout)
    disk_usage = disk_document(settings.home) if disk else None
    if as_json:
        extra = {} if disk_usage is None else {"disk": disk_usage}
        typer.echo(json.dumps({**_document(settings, stack_status), **extra}, indent=2))
        raise typer.Exit(_status_code(stack_status))
    if stack_status.programs:
        view = _view(settings.home, stack_status)
        _print_status(output_console(), stack_status, view)
        quota = (*quota_lines(view), *notice_lines(view), *queue_lines(view))
        for line in (*quota, *deadline_lines(view, time.time())):
            typer.echo(line)
    elif stack_status.is_unsupervised:
        _print_programs(output_console(), stack_status.orphans)
    else:
        typer.echo(_not_running_line(settings.home))
    if disk_usage is not None:
        print_disk(disk_usage)
    for line in _problem_lines(settings.home, stack_status):
        typer.secho(line, fg="red")
    raise typer.Exit(_status_code(stack_status))


def _status_code(stack_status: StackStatus) -> int:
    if stack_status.is_running:
        return 0
    return UNSUPERVISED_STATUS if stack_status.is_unsupervised else NOT_RUNNING_STATUS


def _document(settings: Settings, stack_status: StackStatus) -> dict[str, object]:
    from hermes_ops.airflow.explanation import queue_document

    view = _view(settings.home, stack_status)
    return {
        "home": str(settings.home),
        "running": stack_status.is_running,
        "stack": asdict(stack_status.record) if stack_status.record else None,
        "programs": [asdict(program) for program in stack_status.programs],
        "orphans": [asdict(program) for program in stack_status.orphans],
        "disks": [{**disk._asdict(), "folder": str(disk.folder)} for disk in stack_status.disks],
        "problems": _problem_lines(settings.home, stack_status),
        **({"quota": quota} if (quota := (view or {}).get("quota")) else {}),
        **({"queue": queue} if (queue := queue_document(view)) else {}),
    }


def _problem_lines(home: Path, stack_status: StackStatus) -> list[str]:
    """Say what fails: the disk, the supervisor, the controller's rounds, steps of sweeps."""
    from hermes_ops.stack.preflight import disk_lines

    lines = [*disk_lines(stack_status.disks), *filter(None, [stack_status.trouble])]
    if stack_status.is_unsupervised:
        lines.append(_orphan_line(home, stack_status))
    return lines + _pool_problem_lines(home, stack_status)


def _orphan_line(home: Path, stack_status: StackStatus) -> str:
    trials = "1 trial trains" if stack_status.trials == 1 else f"{stack_status.trials} trials train"
    count = (
        "1 program runs"
        if len(stack_status.orphans) == 1
        else f"{len(stack_status.orphans)} programs run"
    )
    return (
        f"The process supervisor of {home} has ended; {count} on without it, and "
        f"{trials}. What ends now is not started again. `hermes up --home {home}`, with the "
        f"options of the last time, ends them with the trials' checkpoints and restarts them, "
        f"also on the same ports; `hermes down --home {home}` stops everything"
    )


def _pool_problem_lines(home: Path, stack_status: StackStatus) -> list[str]:
    """Say what fails in the pool: the controller's rounds, its quota, steps of single sweeps."""
    from hermes_ops.airflow.explanation import (
        problem_lines,
        scaling_line,
        silence_line,
        stuck_lines,
        trouble_line,
    )

    view = _view(home, stack_status)
    lines = [trouble_line(view), silence_line(view, time.time()), scaling_line(view)]
    return [line for line in (*lines, *problem_lines(view), *stuck_lines(view)) if line]


def _view(home: Path, stack_status: StackStatus) -> dict[str, Any] | None:
    """Return the newest view of the pool; None unless its programs run."""
    from hermes_ops.airflow.control.pool_file import read_view

    if stack_status.record is None or not (stack_status.is_running or stack_status.orphans):
        return None
    return read_view(stack_status.record.pool, home)


def _print_programs(console: Console, programs: tuple[ProgramState, ...]) -> None:
    from hermes_ops.cli.tables import TableColumn, TableRow, fit_table, print_whole

    columns = [TableColumn(head) for head in ("program", "state", "pid", "up for")]
    rows = [
        TableRow((p.name, p.state.lower(), str(p.pid or ""), duration(p.uptime_s) if p.pid else ""))
        for p in programs
    ]
    print_whole(console, fit_table("", columns, rows, console.width))


def _print_status(
    console: Console, stack_status: StackStatus, view: Mapping[str, Any] | None
) -> None:
    _print_programs(console, stack_status.programs)
    stack = stack_status.record
    if stack:
        options = " ".join(f"{k}={v}" for k, v in stack.policy_options.items())
        slots = f"{counted(stack.slots, 'slot')}{_usable(view, stack)}"
        pool = f"{stack.pool}: {slots}, policy {stack.policy} {options}".rstrip()
        typer.echo(f"Airflow  {stack.airflow_url}")
        typer.echo(f"MLflow   {stack.mlflow_url}")
        typer.echo(f"Metrics  {stack.metrics_url}")
        typer.echo(f"Pool     {pool}")


def _usable(view: Mapping[str, Any] | None, stack: StackRecord) -> str:
    """Return how many GPUs trials may use now, if that is not the number that `hermes up` set."""
    if view is None or view["time_s"] < stack.started_s:  # of an earlier start
        return ""
    usable = len(view["gpus"])
    return "" if usable == stack.slots else f" at its start, {usable} for trials now"

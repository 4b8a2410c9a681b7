"""`hermes sweep …`, `hermes explain`, `hermes controller`."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hermes_ops.cli import clearing_command, continuing_commands, listing
from hermes_ops.cli.completing import policies, sweeps, trials
from hermes_ops.cli.locating import ENDED, Place, full_id, locate, state_of
from hermes_ops.cli.stack_commands import Home
from hermes_ops.errors import HermesError

if TYPE_CHECKING:
    from hermes_ops.cli.connection import Connection

SweepId = Annotated[
    str,
    typer.Argument(
        help="The sweep's id, or the beginning of it alone; see `hermes sweep list`.",
        autocompletion=sweeps,
    ),
]
SweepFile = Annotated[Path, typer.Argument(help="The sweep file (YAML or JSON).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document at the end.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse a sweep with warnings: exit code 2.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the application."""
    sweep = typer.Typer(help="Run sweeps and look at them.", no_args_is_help=True)
    sweep.command("run")(run)
    listing.register(sweep)
    sweep.command("watch")(watch)
    sweep.command("stop")(stop)
    sweep.command("check")(check)
    sweep.command("report")(report)
    sweep.command("schema")(schema)
    continuing_commands.register(sweep)
    sweep.command("clear")(clearing_command.clear)
    app.add_typer(sweep, name="sweep")
    app.command("explain")(explain)
    app.command("policy")(policy)
    app.command("controller")(controller)


def new_sweep_id(name: str) -> str:
    """A sweep id that sorts by time and cannot be taken."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{name}-{stamp}-{secrets.token_hex(2)}"


def run(
    file: SweepFile,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show the trials until the sweep has ended.")
    ] = False,
    strict: Strict = False,
    as_json: Json = False,
    home: Home = None,
) -> None:
    """Start a sweep; a file that is not valid starts nothing."""
    from hermes_ops.cli.connection import connect
    from hermes_ops.cli.warning_list import found_warnings
    from hermes_ops.config import load_file

    config = load_file(file)
    connection = connect(home)
    if config.pool != connection.pool:
        raise HermesError(
            f"{file}: pool is {config.pool!r}, but this stack serves {connection.pool!r}: "
            f"write `pool: {connection.pool}`, or start the stack with --pool {config.pool}."
        )
    sweep = new_sweep_id(config.name)
    place = Place.main(sweep)
    warnings = found_warnings(config, file, connection, place.dag_id)
    if strict:
        warnings.refuse()
    connection.airflow.trigger(place.dag_id, sweep, json.loads(config.to_json()))
    typer.echo(f"Sweep {sweep} has started: {config.trial_count} trials.", err=as_json)
    typer.echo(f"Airflow  {connection.airflow_url}/dags/{place.dag_id}/runs/{sweep}", err=as_json)
    if text := warnings.render():
        typer.echo(text, err=True)
    if follow or as_json:
        _follow(connection, place, as_json=as_json, warnings=warnings.document())
    else:
        typer.echo(f"Watch it with `hermes sweep watch {sweep}`.")


def watch(sweep: SweepId, *, as_json: Json = False, home: Home = None) -> None:
    """Show the trials of a sweep until it has ended."""
    from hermes_ops.cli.connection import connect

    connection = connect(home)
    _follow(connection, locate(connection.airflow, sweep), as_json=as_json)


def stop(
    sweep: SweepId,
    *,
    reason: Annotated[str, typer.Option(help="What users will read.")] = "stopped by its user",
    home: Home = None,
) -> None:
    """End a sweep: its trials stop with their checkpoints, what has not begun is skipped."""
    from hermes_ops.airflow.records import CLOSE_KEY, CloseRecord, encode
    from hermes_ops.cli.connection import connect

    connection = connect(home)
    place = locate(connection.airflow, sweep)
    state = state_of(connection.airflow, place)
    if state is not None and state in ENDED:
        ended_as = listing.ended_as(connection, place, state)
        typer.echo(f"Sweep {place.sweep} has already ended ({ended_as}).")
        return
    close = CloseRecord(reason=reason, at_s=time.time())
    connection.airflow.put_state(place.plan, CLOSE_KEY, encode(close))
    typer.echo(f"Sweep {place.sweep} ends: {reason}.")


def check(
    file: SweepFile, *, strict: Strict = False, as_json: Json = False, home: Home = None
) -> None:
    """Print what a sweep file means: the resolved config, the first trials, what it may cost."""
    from hermes_ops.cli.estimating import estimate_or_reason
    from hermes_ops.cli.warning_list import found_warnings, reached
    from hermes_ops.config import check_preview, load_file

    config = load_file(file)
    warnings = found_warnings(config, file, reached(home))
    preview = check_preview(config)
    if as_json:
        document = {"config": json.loads(config.to_json()), **preview.document()}
        typer.echo(json.dumps({**document, "warnings": warnings.document()}))
    else:
        typer.echo(preview.render(), nl=False)
        if (estimate := estimate_or_reason(config, home)) is not None:
            typer.echo(f"\n{estimate}")
    if strict:
        warnings.refuse()
    elif not as_json and (text := warnings.render()):
        typer.echo(f"\n{text}")


def schema() -> None:
    """Print the JSON Schema of sweep files, for editors."""
    from hermes_ops.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


def report(
    sweep: SweepId,
    *,
    out: Annotated[Path, typer.Option(help="Folder to write into.")] = Path("report"),
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser.")
    ] = False,
    home: Home = None,
) -> None:
    """Write a sweep's report (page, pictures, tables) from what MLflow holds now."""
    from hermes_ops.cli.connection import connect
    from hermes_ops.cli.reporting import open_in_browser, write

    if out.exists() and not out.is_dir():
        raise HermesError(f"{out} is a file: name a folder with --out.")
    connection = connect(home)
    files = write(connection, locate(connection.airflow, sweep), out)
    for file in files:
        typer.echo(str(file))
    if open_page:
        open_in_browser(files)


def explain(
    trial: Annotated[
        str,
        typer.Argument(help="SWEEP/NUMBER, for example digits-…/3.", autocompletion=trials),
    ],
    *,
    last: Annotated[int, typer.Option(help="How many past decisions to show.")] = 5,
    home: Home = None,
) -> None:
    """Say why a trial runs or waits, and which decisions led there."""
    from hermes_ops.airflow.explaining import parts
    from hermes_ops.cli.connection import connect
    from hermes_ops.cli.explaining import explanation

    sweep, number = parts(trial)
    connection = connect(home)
    trial = f"{full_id(connection.airflow, sweep)}/{number}"
    typer.echo(explanation(connection, trial, last))


def policy(
    name: Annotated[
        str | None,
        typer.Argument(help="The policy; without it, show it.", autocompletion=policies),
    ] = None,
    *,
    option: Annotated[
        list[str] | None, typer.Option(help="A parameter of the policy.", metavar="NAME=VALUE")
    ] = None,
    home: Home = None,
) -> None:
    """Show or change the pool's policy while it runs."""
    from hermes_ops.airflow.control.controller import Choice
    from hermes_ops.cli.connection import connect
    from hermes_ops.core.options import parse_options
    from hermes_ops.policies import live_policies

    connection = connect(home)
    path = Choice.file()
    if name is None:
        choice = Choice.read(path)
        typer.echo(f"{choice.name} {json.dumps(choice.options) if choice.options else ''}".strip())
        typer.echo(f"There are: {', '.join(live_policies())}.")
        return
    choice = Choice(name, dict(parse_options(option)))
    choice.build()
    choice.write(path)
    typer.echo(f"The pool {connection.pool} is scheduled by {name} from now on.")


def controller(
    *,
    pool: Annotated[str, typer.Option(help="The Airflow pool whose slots are the GPUs.")] = "gpus",
    home: Home = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="For Prometheus, on loopback; default: any free one.")
    ] = None,
) -> None:
    """Run the pool-slot scheduler beside an Airflow that is already there."""
    from hermes_ops.airflow.control.controller import main

    arguments = ["--pool", pool, *(["--home", str(home)] if home else [])]
    if metrics_port is not None:
        arguments += ["--metrics-port", str(metrics_port)]
    raise typer.Exit(main(arguments))


def _follow(
    connection: Connection,
    place: Place,
    *,
    as_json: bool,
    warnings: list[dict[str, str]] | None = None,
) -> None:
    from hermes_ops.cli.following import follow

    sweep = place.sweep
    try:
        document = follow(connection, place, quiet=as_json, warnings=warnings)
    except KeyboardInterrupt:
        typer.echo(f"\nSweep {sweep} goes on. `hermes sweep watch {sweep}` shows it again, "
                   f"`hermes sweep stop {sweep}` ends it.", err=True)  # fmt: skip
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(document))
    if document["best"] is None:
        raise typer.Exit(1)

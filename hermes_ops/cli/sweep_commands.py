"""`hermes sweep …`: run, watch, stop, check, report, schema, import, extend, resume, clear."""

from __future__ import annotations

import json
import os
import secrets
import time
import webbrowser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes_ops.airflow.identity import MAIN_DAG
from hermes_ops.cli import INTERRUPTED, inspection_commands
from hermes_ops.cli.completion import complete_sweeps, complete_trials
from hermes_ops.cli.connection import Connection, Home, current_person, record_action
from hermes_ops.cli.sweep_location import (
    ENDED_AIRFLOW_STATES,
    SweepLocation,
    airflow_state,
    locate,
    locate_or_explain,
)
from hermes_ops.core.amounts import counted
from hermes_ops.errors import HermesError

if TYPE_CHECKING:
    from hermes_ops.airflow.sweep.ended_sweep import EndedSweep
    from hermes_ops.config import SweepConfig
    from hermes_ops.sweep_import import SourceFormat


SweepId = Annotated[
    str,
    typer.Argument(
        help="The sweep's id, or a unique beginning of it; see `hermes sweep list`.",
        autocompletion=complete_sweeps,
    ),
]
SweepFile = Annotated[Path, typer.Argument(help="The sweep file (YAML or JSON).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set a key of the file, as search.max_trials=8."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document at the end.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse a sweep with warnings: exit code 2.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the application."""
    sweep = typer.Typer(help="Run and inspect sweeps.", no_args_is_help=True)
    sweep.command("run")(run)
    sweep.command("list")(inspection_commands.list_sweeps)
    sweep.command("show")(inspection_commands.show)
    sweep.command("watch")(watch)
    sweep.command("stop")(stop)
    sweep.command("check")(check)
    sweep.command("report")(report)
    sweep.command("schema")(schema)
    sweep.command("import")(import_)
    sweep.command("extend")(extend)
    sweep.command("resume")(resume)
    sweep.command("clear")(clear)
    app.add_typer(sweep, name="sweep")
    app.command("explain")(inspection_commands.explain)


def new_sweep_id(name: str) -> str:
    """Return a new sweep id: it sorts by time and has not been used."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{name}-{stamp}-{secrets.token_hex(2)}"


def run(
    file: SweepFile,
    *,
    overrides: Overrides = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show the trials until the sweep has ended.")
    ] = False,
    strict: Strict = False,
    dag: Annotated[
        str,
        typer.Option(
            "--dag",
            envvar="HERMES_DAG",
            metavar="ID",
            help="The DAG of the sweep, one that `sweep_dag` has made.",
        ),
    ] = MAIN_DAG,
    as_json: Json = False,
    home: Home = None,
) -> None:
    """Start a sweep; a file that is not valid starts nothing."""
    from hermes_ops.airflow.folders import pod_file
    from hermes_ops.cli.sweep_check import collect_warnings, refuse_class
    from hermes_ops.config import check_installation, refuse_passed_deadline

    config, source = _load(file, overrides)
    check_installation(config, pod_file())
    refuse_passed_deadline(config, time.time(), source)
    connection = Connection.from_home(home)
    if config.pool != connection.pool:
        raise HermesError(
            f"{source}: pool is {config.pool!r}, but this stack serves {connection.pool!r}: "
            f"write `pool: {connection.pool}`, or start the stack with --pool {config.pool}."
        )
    refuse_class(config, source, connection)
    _refuse_other_dag(connection, dag)
    place = SweepLocation.of_run(dag, new_sweep_id(config.name))
    sweep = place.sweep
    warnings = collect_warnings(config, file, connection, place.dag_id)
    warnings = replace(warnings, overrides=tuple(overrides or ()))
    if strict:
        warnings.refuse()
    note = f"started by {current_person(connection.airflow)}"
    connection.airflow.trigger(place.dag_id, place.run_id, _as_run_configuration(config), note)
    typer.echo(f"Sweep {sweep} has started: {counted(config.trial_count, 'trial')}.", err=as_json)
    page = f"{connection.airflow_url}/dags/{place.dag_id}/runs/{place.run_id}"
    typer.echo(f"Airflow  {page}", err=as_json)
    if text := warnings.render():
        typer.echo(text, err=True)
    if follow or as_json:
        _follow(connection, place, as_json=as_json, warnings=warnings.document())
    else:
        typer.echo(f"Watch it with `hermes sweep watch {sweep}`.")


def _refuse_other_dag(connection: Connection, dag: str) -> None:
    """Raise HermesError for a DAG that would not run the sweep of its run's configuration."""
    from hermes_ops.airflow.sweep.source import REQUIRED

    if dag == MAIN_DAG:
        return
    fields = connection.airflow.dag_fields(dag)
    if fields is None:
        raise HermesError(
            f"Airflow has no DAG {dag!r}: correct --dag (HERMES_DAG), or make it with `sweep_dag`."
        )
    if fields.isdisjoint(REQUIRED):  # `params` of sweep_dag may replace some of its form
        raise HermesError(
            f"the DAG {dag!r} runs no sweep that is sent to it, so nothing was started: correct "
            "--dag (HERMES_DAG) to one that `sweep_dag` has made."
        )


def _as_run_configuration(config: SweepConfig) -> dict[str, Any]:
    """Return the resolved sweep for the DAG run, without a seed that its file does not set."""
    document: dict[str, Any] = json.loads(config.to_json())
    if "seed" not in config.search.model_fields_set:
        del document["search"]["seed"]
    return document


def _load(file: Path, overrides: Sequence[str] | None) -> tuple[SweepConfig, str]:
    """Return the sweep of a file with the overrides, and its name in messages.

    ConfigError for one that is not valid or holds a secret.
    """
    from hermes_ops.airflow import open_secrets
    from hermes_ops.config import load_file
    from hermes_ops.config.overrides import source_name

    config, source = load_file(file, overrides or ()), source_name(file, overrides or ())
    open_secrets.refuse(json.loads(config.to_json()), source)
    return config, source


def watch(sweep: SweepId, *, as_json: Json = False, home: Home = None) -> None:
    """Show the trials of a sweep until it has ended."""
    connection = Connection.from_home(home)
    _follow(connection, locate_or_explain(connection, sweep), as_json=as_json)


def stop(
    sweep: SweepId,
    *,
    reason: Annotated[
        str | None, typer.Option(help="Reason shown to users; your name is added.")
    ] = None,
    home: Home = None,
) -> None:
    """Stop a sweep: its trials stop at a checkpoint, those that have not begun are skipped."""
    from hermes_ops.airflow.records import CLOSE_KEY, CloseRecord, decode, encode

    connection = Connection.from_home(home)
    place = locate_or_explain(connection, sweep)
    state = airflow_state(connection.airflow, place)
    before = decode(CloseRecord, connection.airflow.get_state(place.plan, CLOSE_KEY))
    if state is not None and state in ENDED_AIRFLOW_STATES:
        final_state = inspection_commands.final_state(connection, place, state)
        typer.echo(f"Sweep {place.sweep} has already ended ({final_state}).")
        return
    if before is not None:
        typer.echo(f"Sweep {place.sweep} ends already: {before.reason}.")
        return
    person = current_person(connection.airflow)
    by = f"stopped by {person}"
    why = by if reason is None else f"{reason} ({by})"
    close = CloseRecord(reason=why, at_s=time.time())
    connection.airflow.put_state(place.plan, CLOSE_KEY, encode(close))
    record_action(connection, place, person, "stop")
    typer.echo(f"Sweep {place.sweep} ends: {why}.")


def check(
    file: SweepFile,
    *,
    overrides: Overrides = None,
    strict: Strict = False,
    as_json: Json = False,
    home: Home = None,
) -> None:
    """Check a sweep file: print the resolved config, the first trials, the greatest cost."""
    from hermes_ops.airflow.folders import pod_file
    from hermes_ops.cli.deadline_outlook import current_outlook
    from hermes_ops.cli.sweep_check import (
        collect_warnings,
        connect_if_possible,
        estimate_or_reason,
        refuse_class,
    )
    from hermes_ops.config import check_installation, check_preview, refuse_passed_deadline

    config, source = _load(file, overrides)
    check_installation(config, pod_file())
    refuse_passed_deadline(config, time.time(), source)
    connection = connect_if_possible(home)
    refuse_class(config, source, connection)
    warnings = collect_warnings(config, file, connection)
    warnings = replace(warnings, overrides=tuple(overrides or ()))
    outlook = current_outlook(config, home, connection)
    preview = check_preview(config)
    if as_json:
        document = {"config": json.loads(config.to_json()), **preview.document()}
        document |= {} if outlook is None else {"deadline": outlook.document()}
        typer.echo(json.dumps({**document, "warnings": warnings.document()}))
    else:
        typer.echo(preview.render(), nl=False)
        if (estimate := estimate_or_reason(config, home)) is not None:
            typer.echo(f"\n{estimate}")
        if outlook is not None:
            typer.echo(f"\n{outlook.render()}")
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
    if out.exists() and not out.is_dir():
        raise HermesError(f"{out} is a file: name a folder with --out.")
    connection = Connection.from_home(home)
    files = write(connection, locate_or_explain(connection, sweep), out)
    for file in files:
        typer.echo(str(file))
    if open_page:
        open_in_browser(files)


def _follow(
    connection: Connection,
    place: SweepLocation,
    *,
    as_json: bool,
    warnings: list[dict[str, str]] | None = None,
) -> None:
    from hermes_ops.cli.live_view import follow

    sweep = place.sweep
    try:
        document = follow(connection, place, quiet=as_json, warnings=warnings)
    except KeyboardInterrupt:
        typer.echo(f"\nSweep {sweep} goes on. `hermes sweep watch {sweep}` shows it again, "
                   f"`hermes sweep stop {sweep}` ends it.", err=True)  # fmt: skip
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(document))
    if document["best"] is None:
        raise typer.Exit(1)


def clear(
    trial: Annotated[
        str,
        typer.Argument(
            help="SWEEP/NUMBER, for example digits-…/3.", autocompletion=complete_trials
        ),
    ],
    *,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Discard its checkpoints and values.")
    ] = False,
    home: Home = None,
) -> None:
    """Continue a trial that has ended from its checkpoint, or restart it from scratch."""
    from hermes_ops.airflow.control.cleanup.user_clear import clear_trial
    from hermes_ops.airflow.explanation import parse_trial_name

    sweep, number = parse_trial_name(trial)
    connection = Connection.from_home(home)
    airflow = connection.airflow
    place = locate(airflow, sweep)
    clear_trial(airflow, place.plan, number, from_scratch=from_scratch)
    action = f"clear {number}" + (" from scratch" if from_scratch else "")
    record_action(connection, place, current_person(airflow), action)
    how = "begins from scratch" if from_scratch else "goes on"
    typer.echo(f"Trial {number} of {place.sweep} {how}, and so does its sweep.")
    typer.echo(f"Watch it with `hermes sweep watch {place.sweep}`.")


EndedId = Annotated[
    str,
    typer.Argument(
        metavar="SWEEP", help="The id of a sweep that has ended.", autocompletion=complete_sweeps
    ),
]
GpuSeconds = Annotated[
    float | None,
    typer.Option("--gpu-seconds", metavar="S", help="New budget.gpu_seconds, in total."),
]
WallClock = Annotated[
    float | None,
    typer.Option(
        "--wall-clock-seconds", metavar="S", help="New budget.wall_clock_seconds, counted from now."
    ),
]
NewDeadline = Annotated[
    str | None,
    typer.Option(
        "--deadline", metavar="WHEN", help="New deadline: a time, or a duration from now."
    ),
]
FailedTrials = Annotated[
    int | None,
    typer.Option("--failed-trials", metavar="N", help="New budget.failed_trials, in total."),
]


def extend(
    sweep: EndedId,
    *,
    trials: Annotated[int, typer.Option(metavar="N", min=1, help="Number of trials to add.")],
    gpu_seconds: GpuSeconds = None,
    wall_clock_seconds: WallClock = None,
    failed_trials: FailedTrials = None,
    deadline: NewDeadline = None,
    home: Home = None,
) -> None:
    """Add trials to a sweep that has ended; its search uses all results so far."""
    from hermes_ops.airflow.sweep.ended_sweep import BudgetChanges

    more = BudgetChanges(gpu_seconds, wall_clock_seconds, failed_trials, deadline)
    connection, place, ended = _find_ended(sweep, home)
    total = ended.extend(trials, more)
    record_action(connection, place, current_person(connection.airflow), f"extend by {trials}")
    _print_continuation(place, f": {counted(trials, 'more trial')}, {total} in all.")


def resume(
    sweep: EndedId,
    *,
    failed: Annotated[
        bool, typer.Option("--failed", help="Also retry the trials that failed.")
    ] = False,
    gpu_seconds: GpuSeconds = None,
    wall_clock_seconds: WallClock = None,
    failed_trials: FailedTrials = None,
    deadline: NewDeadline = None,
    home: Home = None,
) -> None:
    """Resume a sweep that was stopped: its open trials continue from their checkpoints."""
    from hermes_ops.airflow.sweep.ended_sweep import BudgetChanges

    more = BudgetChanges(gpu_seconds, wall_clock_seconds, failed_trials, deadline)
    connection, place, ended = _find_ended(sweep, home)
    numbers = ended.resume(more, failed=failed)
    record_action(connection, place, current_person(connection.airflow), "resume")
    _print_continuation(place, f" with {counted(len(numbers), 'trial')}: {_join_numbers(numbers)}.")


def _find_ended(sweep: str, home: Path | None) -> tuple[Connection, SweepLocation, EndedSweep]:
    from hermes_ops.airflow.sweep.ended_sweep import EndedSweep

    connection = Connection.from_home(home)
    place = locate_or_explain(connection, sweep)
    return connection, place, EndedSweep.find(connection.airflow, connection.tracker, place.plan)


def _print_continuation(place: SweepLocation, how: str) -> None:
    typer.echo(f"Sweep {place.sweep} goes on{how}")
    if place.group:
        typer.echo(
            f"What is behind {place.group} in the DAG {place.dag_id} does not run again by "
            "itself: clear it in Airflow if it is to have the new best."
        )
    typer.echo(f"Watch it with `hermes sweep watch {place.sweep}`.")


def _join_numbers(numbers: tuple[int, ...], most: int = 20) -> str:
    rest = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + rest


def write(connection: Connection, place: SweepLocation, folder: Path) -> tuple[Path, ...]:
    """Write the report of a sweep from what MLflow holds now; return its files."""
    from hermes_ops import report
    from hermes_ops.cli.outcome import fetch_collection, fetch_config
    from hermes_ops.simulator.report_background import background

    collection = fetch_collection(connection, place)
    history = background(connection.tracker, fetch_config(connection, place), collection)
    return report.write(folder, collection.summary, collection.curves, collection.segments, history)


def open_in_browser(files: Sequence[Path]) -> None:
    """Open the report's page; HermesError when there is no page or no browser."""
    from hermes_ops.report import PAGE

    page = next((file for file in files if file.name == PAGE), None)
    if page is None:
        raise HermesError(f"{PAGE} could not be made; the warning above says why.")
    if not webbrowser.open(page.absolute().as_uri()):
        raise HermesError(f"there is no browser here: open {page.absolute()} in one.")


def import_(
    source: Annotated[
        str,
        typer.Argument(
            help="A Katib experiment or a W&B sweep (YAML or JSON), or an Optuna study: "
            "a SQLite file, a journal file or the URL of its database.",
            metavar="SOURCE",
        ),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write this file, which must not exist; else print it."),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--from", help="katib, wandb or optuna; default: told by the content."),
    ] = None,
    study: Annotated[
        str | None, typer.Option(help="The Optuna study, where the storage has several.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the sweep.")] = None,
    metric: Annotated[str | None, typer.Option(help="Name of the objective.")] = None,
    script: Annotated[
        str | None, typer.Option(help="Training script, where the source names none.")
    ] = None,
    max_epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of a trial, which few sources state.")
    ] = None,
    max_trials: Annotated[int | None, typer.Option(min=1, help="Trials of the sweep.")] = None,
    points: Annotated[
        int, typer.Option(min=0, help="How many of the best known configurations to try first.")
    ] = 10,
) -> None:
    """Convert a Katib experiment, a W&B sweep or an Optuna study to a sweep file."""
    from hermes_ops.sweep_import import DraftOptions, import_sweep

    if out is not None and os.path.lexists(out):
        raise HermesError(f"{out} is there already: name another file with --out.")
    options = DraftOptions(name, metric, script, max_epochs, max_trials, study, points)
    draft = import_sweep(source, options, _format(form))
    if out is None:
        typer.echo(draft.to_yaml(), nl=False)
    else:
        with out.open("x", encoding="utf-8") as file:
            file.write(draft.to_yaml())
        typer.echo(f"{out} is {draft.kind} as a sweep file. Try `hermes sweep check {out}`.")
    for note in draft.notes if out is not None else ():
        typer.echo(f"  {note}", err=True)


def _format(name: str | None) -> SourceFormat | None:
    from hermes_ops.sweep_import import SourceFormat

    if name is None or name in set(SourceFormat):
        return None if name is None else SourceFormat(name)
    raise HermesError(f"--from {name}: allowed are {', '.join(SourceFormat)}.")

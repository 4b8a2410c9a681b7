"""`hermes replay`: a finished sweep under another policy."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes_ops.cli import simulating
from hermes_ops.cli.simulating import Json, Out
from hermes_ops.cli.stack_commands import Home
from hermes_ops.core.options import parse_options

if TYPE_CHECKING:
    from hermes_ops.simulator.recorded import Recorded
    from hermes_ops.simulator.replay import Bounds, Choice, Replay


def register(app: typer.Typer) -> None:
    """Add the command of this module to the application."""
    app.command("replay")(replay)


def replay(
    sweep: Annotated[str, typer.Argument(help="The sweep's id; see `hermes sweep list`.")],
    *,
    policy: Annotated[str, typer.Option(help="The policy to replay it under.")],
    policy_option: Annotated[
        list[str] | None, typer.Option(help="A parameter of it.", metavar="NAME=VALUE")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Default: as many as it had.", metavar="N", min=1)
    ] = None,
    guards: Annotated[
        bool, typer.Option("--guards/--no-guards", help="Within the guards of a live pool.")
    ] = True,
    switch_seconds: Annotated[
        float | None,
        typer.Option(help="Start-up of every segment; default: as measured.", metavar="S", min=0),
    ] = None,
    out: Out = None,
    as_json: Json = False,
    home: Home = None,
) -> None:
    """Say what the trials of a finished sweep would have done under another policy."""
    from hermes_ops.cli.connection import connect_tracker
    from hermes_ops.simulator.recorded import read
    from hermes_ops.simulator.replay import Choice

    options = parse_options(policy_option)
    folder = simulating.folder_of(out)
    recorded = read(connect_tracker(home), sweep)
    found = _replayed(recorded, Choice(policy, options, guards, gpus, switch_seconds), folder)
    told = json.dumps(document(recorded, found), indent=2)
    if folder is not None:
        (folder / "replay.json").write_text(told + "\n")
    if as_json:
        typer.echo(told)
    else:
        _print(recorded, found)


def _replayed(recorded: Recorded, choice: Choice, folder: Path | None) -> Replay:
    """The replay; with a folder, also the files of each of its simulations there."""
    from hermes_ops.simulator import pictures
    from hermes_ops.simulator.event_log import EventLog
    from hermes_ops.simulator.replay import replay as replayed
    from hermes_ops.simulator.tables import jobs_csv

    if folder is None:
        return replayed(recorded, choice)
    with ExitStack() as files:

        def log_of(name: str) -> EventLog:
            file = files.enter_context((folder / f"{name}-events.jsonl").open("w"))
            return EventLog(file.write)

        found = replayed(recorded, choice, log_of=log_of)
    for name, run in found.runs:
        (folder / f"{name}-jobs.csv").write_text(jobs_csv(run))
        (folder / f"{name}-gpus.png").write_bytes(pictures.gpu_timeline(run))
    return found


def document(recorded: Recorded, found: Replay) -> dict[str, Any]:
    """The JSON of a replay. Every figure of it has its least and its most."""
    measured, costs = recorded.measured, found.costs
    return {
        "sweep": recorded.workload.name,
        "policy": found.choice.policy,
        "options": dict(found.choice.options),
        "guards": found.choice.guards,
        "gpus": found.gpus,
        "trials": len(recorded.workload.jobs),
        "cut_short": list(found.cut_short),
        "needed": list(found.needed),
        "switch": {
            "measured": found.choice.switch_s is None,
            "startup_seconds": costs.startup_s,
            "restore_seconds": costs.restore_s,
            "checkpoint_seconds": costs.checkpoint_s,
            "handover_seconds": costs.handover_s,
            "warm_up_seconds": costs.warm_s,
            "leave_seconds": costs.leave_s,
        },
        "measured": {
            "policy": measured.policy,
            "best_trial": measured.best,
            "time_to_best_seconds": measured.time_to_best_s,
            "gpu_hours": measured.gpu_hours,
            "preemptions": measured.preemptions,
        },
        "replayed": {
            "time_to_best_seconds": found.time_to_best_s.document(),
            "gpu_hours": found.gpu_hours.document(),
            "preemptions": found.preemptions.document(),
            "makespan_seconds": found.makespan_s.document(),
        },
    }


def _print(recorded: Recorded, found: Replay) -> None:
    from rich.console import Console

    from hermes_ops.cli.tables import TableColumn, TableRow, fitted, print_whole
    from hermes_ops.report.words import number_range

    measured, console = recorded.measured, Console()
    guards = "" if found.choice.guards else ", without guards"
    title = f"{recorded.workload.name} on {found.gpus} GPUs{guards}"
    columns = (
        TableColumn("figure"),
        TableColumn(f"measured ({measured.policy or 'unknown policy'})", right=True),
        TableColumn(f"replayed ({found.choice.policy})", right=True),
    )
    hours = measured.gpu_hours
    rows: tuple[tuple[str, float | None, Bounds], ...] = (
        ("time to best, s", measured.time_to_best_s, found.time_to_best_s),
        ("GPU time, s", 3_600 * hours, found.gpu_hours.times(3_600)),
        ("preemptions", measured.preemptions, found.preemptions),
    )
    cells = []
    for name, value, bounds in rows:
        known = None if value is None else (value, value)
        cells.append(TableRow((name, number_range(known), number_range(bounds.range))))
    print_whole(console, fitted(title, columns, cells, console.width))
    if found.cut_short:
        console.print(_missing(found), highlight=False)


def _missing(found: Replay) -> str:
    """What the curves that were cut short mean for the figures."""
    cut = f"Cut short: {len(found.cut_short)} trials ({', '.join(map(str, found.cut_short))})."
    if not found.needed:
        return f"{cut} None of what is missing was needed."
    needed = ", ".join(map(str, found.needed))
    return f"{cut} Their missing parts were needed of {needed}: the figures are bounds."

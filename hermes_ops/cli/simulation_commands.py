"""`hermes simulate`, `compare` and `replay`: policies in virtual time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes_ops.cli import simulation_options
from hermes_ops.cli.completion import complete_sweeps
from hermes_ops.cli.connection import Home
from hermes_ops.cli.simulation_options import Json, Out, SimulationOptions
from hermes_ops.core.amounts import counted
from hermes_ops.core.options import parse_options

if TYPE_CHECKING:
    from rich.console import Console

    from hermes_ops.core.model import Gpu
    from hermes_ops.simulator.comparison import Comparison, Contender, PolicyResult
    from hermes_ops.simulator.replay import Bounds, Replay, ReplaySettings
    from hermes_ops.simulator.sweep_history import RecordedSweep
    from hermes_ops.simulator.workload import SimulationRun


WIDTH = 200  # as wide as the table of policies may become where there is no terminal

Gpus = Annotated[int | None, typer.Option(help="Number of GPUs.", metavar="N")]
Nodes = Annotated[str | None, typer.Option(help="Nodes x GPUs, as 16x4.", metavar="NODESxGPUS")]
Guards = Annotated[bool, typer.Option("--guards", help="Apply the guards of a live pool.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the application."""
    app.command("simulate")(simulation_options.with_simulation_options(simulate))
    app.command("compare")(simulation_options.with_simulation_options(compare))
    app.command("replay")(replay)


def simulate(
    *,
    simulation: SimulationOptions,
    gpus: Gpus = None,
    nodes: Nodes = None,
    policy: Annotated[str, typer.Option(help="Scheduling policy.")] = "frontrunner",
    policy_option: Annotated[
        list[str] | None, typer.Option(help="A parameter of it.", metavar="NAME=VALUE")
    ] = None,
    guards: Guards = False,
    seed: Annotated[int, typer.Option(help="Random seed.", min=0)] = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Simulate one policy on a trace, on recorded learning curves, or on random jobs."""
    from hermes_ops.simulator.comparison import Contender

    published = simulation.parameters.get(policy, {})
    options = tuple({**published, **parse_options(policy_option)}.items())
    pool = simulation_options.gpus_of(gpus, nodes, simulation.layout)
    quota = None if simulation.teams is None else simulation.pool_quota(len(pool)).quota()
    contender = Contender(policy, options, guards, quota=quota)
    run, result = _simulate(simulation, pool, contender, seed, out)
    if as_json:
        typer.echo(json.dumps(_run_document(run, result), indent=2))
    else:
        _print_run(run, result)


def compare(
    *,
    simulation: SimulationOptions,
    gpus: Gpus = None,
    nodes: Nodes = None,
    policies: Annotated[str, typer.Option(help="Separated by commas.", metavar="A,B,…")],
    policy_option: Annotated[
        list[str] | None, typer.Option(help="A parameter of one.", metavar="POLICY.NAME=VALUE")
    ] = None,
    guards: Guards = False,
    seeds: Annotated[
        int, typer.Option(help="Number of seeds: a workload each.", metavar="N", min=1)
    ] = 1,
    first_seed: Annotated[int, typer.Option(help="The first seed.", metavar="N", min=0)] = 0,
    numbers: Annotated[
        str | None,
        typer.Option(help="The workloads of a --workload, by number.", metavar="1,2,…"),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Number of processes; default: the cores.", metavar="N", min=1),
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare policies on the same workloads, one for each seed, with confidence intervals."""
    from hermes_ops.simulator.comparison import compare as compared

    pool = simulation_options.gpus_of(gpus, nodes, simulation.layout)
    quota = None if simulation.teams is None else simulation.pool_quota(len(pool)).quota()
    chosen = simulation_options.contenders(
        policies, policy_option, guards=guards, published=simulation.parameters, quota=quota
    )
    folder = simulation_options.folder_of(out)
    drawn = range(first_seed, first_seed + seeds)
    given = simulation_options.numbers_of(numbers, simulation.numbers)
    comparison = compared(simulation.source(), pool, chosen, given or drawn, jobs=jobs)
    _report(comparison, folder, numbered=bool(given), as_json=as_json)


def _simulate(
    simulation: SimulationOptions,
    pool: tuple[Gpu, ...],
    contender: Contender,
    seed: int,
    out: Path | None,
) -> tuple[SimulationRun, PolicyResult]:
    """Return the run and its figures; with a folder, write its files there."""
    from time import process_time

    from hermes_ops.simulator.comparison import PolicyResult, check_fits
    from hermes_ops.simulator.engine import simulate as simulated
    from hermes_ops.simulator.event_log import EventLog

    draw = simulation.source().draw(seed)
    check_fits(draw.workload, pool)
    chosen = contender.make(draw)
    folder = simulation_options.folder_of(out)
    with ExitStack() as files:
        log = None
        if folder is not None:
            log = EventLog(files.enter_context((folder / "events.jsonl").open("w")).write)
        run = simulated(draw.workload, pool, chosen, clock=process_time, log=log)
    result = PolicyResult.from_run(run, contender.name, seed)
    if folder is not None:
        _write_run(run, result, folder)
    return run, result


def _write_run(run: SimulationRun, result: PolicyResult, folder: Path) -> None:
    from hermes_ops.simulator import pictures
    from hermes_ops.simulator.tables import jobs_csv

    (folder / "jobs.csv").write_text(jobs_csv(run))
    (folder / "metrics.json").write_text(json.dumps(_run_document(run, result), indent=2) + "\n")
    (folder / "gpus.png").write_bytes(pictures.gpu_timeline(run))
    _write_pictures({result.policy: (result,)}, folder)


def _run_document(run: SimulationRun, result: PolicyResult) -> dict[str, object]:
    return {
        "policy": run.policy,
        "workload": run.workload.name,
        "gpus": len(run.gpus),
        "metrics": result.metrics.document(),
    }


def _print_run(run: SimulationRun, result: PolicyResult) -> None:
    from hermes_ops.cli.tables import TableColumn, TableRow, fit_table, output_console, print_whole
    from hermes_ops.simulator.tables import metric_rows

    title = f"{run.workload.name} on {counted(len(run.gpus), 'GPU')} under {run.policy}"
    columns = [TableColumn("figure"), TableColumn("value")]
    rows = (TableRow((name, value)) for name, value in metric_rows(result.metrics))
    console = output_console()
    print_whole(console, fit_table(title, columns, rows, console.width))


def _report(comparison: Comparison, folder: Path | None, *, numbered: bool, as_json: bool) -> None:
    from hermes_ops.cli.tables import TableColumn, TableRow, fit_table, output_console, print_whole
    from hermes_ops.simulator.tables import comparison_rows, completions_csv, document

    text = json.dumps(document(comparison, numbered=numbered), indent=2)
    if folder is not None:
        (folder / "comparison.json").write_text(text + "\n")
        (folder / "completions.csv").write_text(completions_csv(comparison, numbered=numbered))
        _write_pictures(
            {policy: comparison.results_of(policy) for policy in comparison.policies}, folder
        )
    if as_json:
        typer.echo(text)
        return
    header, rows = comparison_rows(comparison)
    seeds = (
        counted(len(comparison.seeds), "seed")
        if len(comparison.seeds) > 1
        else f"seed {comparison.seeds[0]}"
    )
    title = f"{comparison.workload} on {counted(comparison.gpus, 'GPU')}, {seeds}"
    columns = [TableColumn(head, right=place > 0) for place, head in enumerate(header)]
    cells = (TableRow(tuple(cell.replace(" (", "\n(") for cell in row)) for row in rows)
    console = output_console()
    width = console.width if console.is_terminal else max(console.width, WIDTH)
    print_whole(console, fit_table(title, columns, cells, width))
    _print_teams(console, comparison, width)
    if len(comparison.seeds) > 1:
        typer.echo("Means over seeds with 95 % bootstrap intervals; speed-ups are geometric means.")


def _print_teams(console: Console, comparison: Comparison, width: int) -> None:
    """Print how long each team's jobs waited under each policy, where there are teams."""
    from hermes_ops.cli.tables import TableColumn, TableRow, fit_table, print_whole
    from hermes_ops.simulator.tables import team_rows

    header, rows = team_rows(comparison)
    if rows:
        columns = [TableColumn(head, right=place > 0) for place, head in enumerate(header)]
        print_whole(console, fit_table("Teams", columns, map(TableRow, rows), width))


def _write_pictures(every: Mapping[str, Sequence[PolicyResult]], folder: Path) -> None:
    from hermes_ops.simulator import pictures

    completions = {p: [c for r in results for c in r.completions_s] for p, results in every.items()}
    (folder / "completion.png").write_bytes(pictures.completion_cdf(completions))
    regrets = {policy: [r.regret for r in results] for policy, results in every.items()}
    if any(steps for found_steps in regrets.values() for steps in found_steps):
        (folder / "regret.png").write_bytes(pictures.regret_curves(regrets))


def replay(
    sweep: Annotated[
        str,
        typer.Argument(
            help="The sweep's id, or a unique beginning of it; see `hermes sweep list`.",
            autocompletion=complete_sweeps,
        ),
    ],
    *,
    policy: Annotated[str, typer.Option(help="Scheduling policy of the replay.")],
    policy_option: Annotated[
        list[str] | None, typer.Option(help="A parameter of it.", metavar="NAME=VALUE")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(help="Number of GPUs; default: what the sweep could use.", metavar="N", min=1),
    ] = None,
    guards: Annotated[
        bool, typer.Option("--guards/--no-guards", help="Apply the guards of a live pool.")
    ] = True,
    switch_seconds: Annotated[
        float | None,
        typer.Option(
            help="Start-up seconds of a segment; default: as measured.", metavar="S", min=0
        ),
    ] = None,
    out: Out = None,
    as_json: Json = False,
    home: Home = None,
) -> None:
    """Replay a finished sweep under another policy."""
    from hermes_ops.cli.connection import connect_tracker
    from hermes_ops.cli.sweep_location import recorded_id
    from hermes_ops.simulator.replay import ReplaySettings
    from hermes_ops.simulator.sweep_history import fetch_recorded_sweep

    options = parse_options(policy_option)
    folder = simulation_options.folder_of(out)
    tracker = connect_tracker(home)
    recorded = fetch_recorded_sweep(tracker, recorded_id(tracker, sweep))
    result = _replay(
        recorded, ReplaySettings(policy, options, guards, gpus, switch_seconds), folder
    )
    text = json.dumps(document(recorded, result), indent=2)
    if folder is not None:
        (folder / "replay.json").write_text(text + "\n")
    if as_json:
        typer.echo(text)
    else:
        _print(recorded, result)


def _replay(recorded: RecordedSweep, settings: ReplaySettings, folder: Path | None) -> Replay:
    """Return the replay; with a folder, write the files of each of its simulations there."""
    from hermes_ops.simulator import pictures
    from hermes_ops.simulator.event_log import EventLog
    from hermes_ops.simulator.replay import replay as replayed
    from hermes_ops.simulator.tables import jobs_csv

    if folder is None:
        return replayed(recorded, settings)
    with ExitStack() as files:

        def log_of(name: str) -> EventLog:
            file = files.enter_context((folder / f"{name}-events.jsonl").open("w"))
            return EventLog(file.write)

        result = replayed(recorded, settings, log_of=log_of)
    for name, run in result.runs:
        (folder / f"{name}-jobs.csv").write_text(jobs_csv(run))
        (folder / f"{name}-gpus.png").write_bytes(pictures.gpu_timeline(run))
    return result


def document(recorded: RecordedSweep, result: Replay) -> dict[str, Any]:
    """Return the JSON of a replay; each of its figures has a least and a greatest value."""
    measured, costs = recorded.measured, result.costs
    return {
        "sweep": recorded.workload.name,
        "policy": result.settings.policy,
        "options": dict(result.settings.options),
        "guards": result.settings.guards,
        "gpus": result.gpus,
        "trials": len(recorded.workload.jobs),
        "cut_short": list(result.cut_short),
        "needed": list(result.needed),
        "switch": {
            "measured": result.settings.switch_s is None,
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
            "time_to_best_seconds": result.time_to_best_s.document(),
            "gpu_hours": result.gpu_hours.document(),
            "preemptions": result.preemptions.document(),
            "makespan_seconds": result.makespan_s.document(),
        },
    }


def _print(recorded: RecordedSweep, result: Replay) -> None:
    from hermes_ops.cli.tables import TableColumn, TableRow, fit_table, output_console, print_whole
    from hermes_ops.report.story import number_range

    measured, console = recorded.measured, output_console()
    guards = "" if result.settings.guards else ", without guards"
    title = f"{recorded.workload.name} on {counted(result.gpus, 'GPU')}{guards}"
    columns = (
        TableColumn("figure"),
        TableColumn(f"measured ({measured.policy or 'unknown policy'})", right=True),
        TableColumn(f"replayed ({result.settings.policy})", right=True),
    )
    hours = measured.gpu_hours
    rows: tuple[tuple[str, float | None, Bounds], ...] = (
        ("time to best, s", measured.time_to_best_s, result.time_to_best_s),
        ("GPU time, s", 3_600 * hours, result.gpu_hours.times(3_600)),
        ("preemptions", measured.preemptions, result.preemptions),
    )
    cells = []
    for name, value, bounds in rows:
        measured_range = None if value is None else (value, value)
        cells.append(TableRow((name, number_range(measured_range), number_range(bounds.range))))
    print_whole(console, fit_table(title, columns, cells, console.width))
    if result.cut_short:
        console.print(_missing_note(result), highlight=False)


def _missing_note(result: Replay) -> str:
    """Say what the curves that were cut short mean for the figures."""
    numbers = ", ".join(map(str, result.cut_short))
    cut = f"Cut short: {counted(len(result.cut_short), 'trial')} ({numbers})."
    if not result.needed:
        return f"{cut} None of what is missing was needed."
    needed = ", ".join(map(str, result.needed))
    return f"{cut} Their missing parts were needed of {needed}: the figures are bounds."

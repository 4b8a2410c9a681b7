"""`hermes simulate` and `hermes compare`: policies in virtual time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hermes_ops.cli import simulating
from hermes_ops.cli.simulating import Asked, Json, Out
from hermes_ops.core.options import parse_options

if TYPE_CHECKING:
    from hermes_ops.core.model import Gpu
    from hermes_ops.simulator.compare import Comparison, Contender, Result
    from hermes_ops.simulator.workload import Run

WIDTH = 200  # as wide as the table of policies may become where there is no terminal

Gpus = Annotated[int | None, typer.Option(help="Number of GPUs.", metavar="N")]
Nodes = Annotated[str | None, typer.Option(help="Nodes x GPUs, as 16x4.", metavar="NODESxGPUS")]
Guards = Annotated[bool, typer.Option("--guards", help="Within the guards of a live pool.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the application."""
    app.command("simulate")(simulating.asks(simulate))
    app.command("compare")(simulating.asks(compare))


def simulate(
    *,
    asked: Asked,
    gpus: Gpus = None,
    nodes: Nodes = None,
    policy: Annotated[str, typer.Option(help="Scheduling policy.")] = "frontrunner",
    policy_option: Annotated[
        list[str] | None, typer.Option(help="A parameter of it.", metavar="NAME=VALUE")
    ] = None,
    guards: Guards = False,
    seed: Annotated[int, typer.Option(help="Of what is drawn.", min=0)] = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Simulate one policy on a trace, on recorded learning curves, or on random jobs."""
    from hermes_ops.simulator.compare import Contender

    options = tuple(parse_options(policy_option).items())
    pool = simulating.gpus_of(gpus, nodes)
    run, result = _simulated(asked, pool, Contender(policy, options, guards), seed, out)
    if as_json:
        typer.echo(json.dumps(_facts(run, result), indent=2))
    else:
        _print_run(run, result)


def compare(
    *,
    asked: Asked,
    gpus: Gpus = None,
    nodes: Nodes = None,
    policies: Annotated[str, typer.Option(help="Parted by commas.", metavar="A,B,…")],
    policy_option: Annotated[
        list[str] | None, typer.Option(help="A parameter of one.", metavar="POLICY.NAME=VALUE")
    ] = None,
    guards: Guards = False,
    seeds: Annotated[int, typer.Option(help="How many workloads.", metavar="N", min=1)] = 1,
    first_seed: Annotated[int, typer.Option(help="The first seed.", metavar="N", min=0)] = 0,
    jobs: Annotated[
        int | None, typer.Option(help="Processes; the cores.", metavar="N", min=1)
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare policies on the same workloads, one for each seed, with confidence intervals."""
    from hermes_ops.simulator.compare import compare as compared

    pool = simulating.gpus_of(gpus, nodes)
    chosen = simulating.contenders(policies, policy_option, guards=guards)
    folder = simulating.folder_of(out)
    numbers = range(first_seed, first_seed + seeds)
    found = compared(asked.task(), pool, chosen, numbers, jobs=jobs)
    _report(found, folder, as_json=as_json)


def _simulated(
    asked: Asked, pool: tuple[Gpu, ...], contender: Contender, seed: int, out: Path | None
) -> tuple[Run, Result]:
    """The run and its figures; with a folder, also its files there."""
    from time import process_time

    from hermes_ops.simulator.compare import Result, check_fits
    from hermes_ops.simulator.engine import simulate as simulated
    from hermes_ops.simulator.event_log import EventLog

    draw = asked.task().draw(seed)
    check_fits(draw.workload, pool)
    chosen = contender.make(draw)
    folder = simulating.folder_of(out)
    with ExitStack() as files:
        log = None
        if folder is not None:
            log = EventLog(files.enter_context((folder / "events.jsonl").open("w")).write)
        run = simulated(draw.workload, pool, chosen, clock=process_time, log=log)
    result = Result.of(run, contender.name, seed)
    if folder is not None:
        _write_run(run, result, folder)
    return run, result


def _write_run(run: Run, result: Result, folder: Path) -> None:
    from hermes_ops.simulator import pictures
    from hermes_ops.simulator.tables import jobs_csv

    (folder / "jobs.csv").write_text(jobs_csv(run))
    (folder / "metrics.json").write_text(json.dumps(_facts(run, result), indent=2) + "\n")
    (folder / "gpus.png").write_bytes(pictures.gpu_timeline(run))
    _write_pictures({result.policy: (result,)}, folder)


def _facts(run: Run, result: Result) -> dict[str, object]:
    return {
        "policy": run.policy,
        "workload": run.workload.name,
        "gpus": len(run.gpus),
        "metrics": result.metrics.document(),
    }


def _print_run(run: Run, result: Result) -> None:
    from rich.console import Console

    from hermes_ops.cli.tables import TableColumn, TableRow, fitted, print_whole
    from hermes_ops.simulator.tables import metric_rows

    title = f"{run.workload.name} on {len(run.gpus)} GPUs under {run.policy}"
    columns = [TableColumn("figure"), TableColumn("value")]
    rows = (TableRow((name, value)) for name, value in metric_rows(result.metrics))
    console = Console()
    print_whole(console, fitted(title, columns, rows, console.width))


def _report(found: Comparison, folder: Path | None, *, as_json: bool) -> None:
    from rich.console import Console

    from hermes_ops.cli.tables import TableColumn, TableRow, fitted, print_whole
    from hermes_ops.simulator.tables import comparison_rows, document

    told = json.dumps(document(found), indent=2)
    if folder is not None:
        (folder / "comparison.json").write_text(told + "\n")
        _write_pictures({policy: found.of(policy) for policy in found.policies}, folder)
    if as_json:
        typer.echo(told)
        return
    header, rows = comparison_rows(found)
    seeds = f"{len(found.seeds)} seeds" if len(found.seeds) > 1 else f"seed {found.seeds[0]}"
    title = f"{found.workload} on {found.gpus} GPUs, {seeds}"
    columns = [TableColumn(head, right=place > 0) for place, head in enumerate(header)]
    cells = (TableRow(tuple(cell.replace(" (", "\n(") for cell in row)) for row in rows)
    console = Console()
    width = console.width if console.is_terminal else max(console.width, WIDTH)
    print_whole(console, fitted(title, columns, cells, width))
    if len(found.seeds) > 1:
        typer.echo("Means over seeds with 95 % bootstrap intervals; speed-ups are geometric means.")


def _write_pictures(every: Mapping[str, Sequence[Result]], folder: Path) -> None:
    from hermes_ops.simulator import pictures

    completions = {p: [c for r in results for c in r.completions_s] for p, results in every.items()}
    (folder / "completion.png").write_bytes(pictures.completion_cdf(completions))
    regrets = {policy: [r.regret for r in results] for policy, results in every.items()}
    if any(steps for found_steps in regrets.values() for steps in found_steps):
        (folder / "regret.png").write_bytes(pictures.regret_curves(regrets))

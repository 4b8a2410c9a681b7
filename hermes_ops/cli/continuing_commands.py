"""`hermes sweep extend` and `hermes sweep resume`: a sweep that has ended goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hermes_ops.cli.completing import sweeps
from hermes_ops.cli.stack_commands import Home

if TYPE_CHECKING:
    from pathlib import Path

    from hermes_ops.airflow.continuing import EndedSweep

EndedId = Annotated[
    str,
    typer.Argument(
        metavar="SWEEP", help="The id of a sweep that has ended.", autocompletion=sweeps
    ),
]
GpuSeconds = Annotated[
    float | None,
    typer.Option("--gpu-seconds", metavar="S", help="budget.gpu_seconds from now on, in all."),
]
WallClock = Annotated[
    float | None,
    typer.Option(
        "--wall-clock-seconds", metavar="S", help="budget.wall_clock_seconds, counted from now."
    ),
]
FailedTrials = Annotated[
    int | None,
    typer.Option("--failed-trials", metavar="N", help="budget.failed_trials from now on, in all."),
]


def register(sweep: typer.Typer) -> None:
    """Add the commands of this module to `hermes sweep`."""
    sweep.command("extend")(extend)
    sweep.command("resume")(resume)


def extend(
    sweep: EndedId,
    *,
    trials: Annotated[int, typer.Option(metavar="N", min=1, help="How many trials to add.")],
    gpu_seconds: GpuSeconds = None,
    wall_clock_seconds: WallClock = None,
    failed_trials: FailedTrials = None,
    home: Home = None,
) -> None:
    """Add trials to a sweep that has ended; its search knows all results so far."""
    from hermes_ops.airflow.continuing import More

    more = More(gpu_seconds, wall_clock_seconds, failed_trials)
    total = _ended(sweep, home).extend(trials, more)
    _tell(sweep, f": {trials} more trials, {total} in all.")


def resume(
    sweep: EndedId,
    *,
    failed: Annotated[
        bool, typer.Option("--failed", help="Try the trials that failed again, too.")
    ] = False,
    gpu_seconds: GpuSeconds = None,
    wall_clock_seconds: WallClock = None,
    failed_trials: FailedTrials = None,
    home: Home = None,
) -> None:
    """Go on with a sweep that was stopped: its open trials resume from their checkpoints."""
    from hermes_ops.airflow.continuing import More

    more = More(gpu_seconds, wall_clock_seconds, failed_trials)
    numbers = _ended(sweep, home).resume(more, failed=failed)
    _tell(sweep, f" with {len(numbers)} trials: {_listed(numbers)}.")


def _ended(sweep: str, home: Path | None) -> EndedSweep:
    from hermes_ops.airflow.continuing import EndedSweep
    from hermes_ops.cli.connection import DAG_ID, connect

    connection = connect(home)
    return EndedSweep.find(connection.airflow, connection.tracker, DAG_ID, sweep)


def _tell(sweep: str, how: str) -> None:
    typer.echo(f"Sweep {sweep} goes on{how}")
    typer.echo(f"Watch it with `hermes sweep watch {sweep}`.")


def _listed(numbers: tuple[int, ...], most: int = 20) -> str:
    rest = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + rest

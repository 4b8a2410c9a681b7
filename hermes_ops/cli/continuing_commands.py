"""`hermes sweep extend` and `hermes sweep resume`: a sweep that has ended goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hermes_ops.cli.completing import sweeps
from hermes_ops.cli.stack_commands import Home

if TYPE_CHECKING:
    from pathlib import Path

    from hermes_ops.airflow.sweep.continuing import EndedSweep
    from hermes_ops.cli.locating import Place

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
    from hermes_ops.airflow.sweep.continuing import More

    more = More(gpu_seconds, wall_clock_seconds, failed_trials)
    place, ended = _ended(sweep, home)
    total = ended.extend(trials, more)
    _tell(place, f": {trials} more trials, {total} in all.")


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
    from hermes_ops.airflow.sweep.continuing import More

    more = More(gpu_seconds, wall_clock_seconds, failed_trials)
    place, ended = _ended(sweep, home)
    numbers = ended.resume(more, failed=failed)
    _tell(place, f" with {len(numbers)} trials: {_listed(numbers)}.")


def _ended(sweep: str, home: Path | None) -> tuple[Place, EndedSweep]:
    from hermes_ops.airflow.sweep.continuing import EndedSweep
    from hermes_ops.cli.connection import connect
    from hermes_ops.cli.locating import locate

    connection = connect(home)
    place = locate(connection.airflow, sweep)
    return place, EndedSweep.find(connection.airflow, connection.tracker, place.plan)


def _tell(place: Place, how: str) -> None:
    typer.echo(f"Sweep {place.sweep} goes on{how}")
    if place.group:
        typer.echo(
            f"What is behind {place.group} in the DAG {place.dag_id} does not run again by "
            "itself: clear it in Airflow if it is to have the new best."
        )
    typer.echo(f"Watch it with `hermes sweep watch {place.sweep}`.")


def _listed(numbers: tuple[int, ...], most: int = 20) -> str:
    rest = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + rest

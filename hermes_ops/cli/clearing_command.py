"""`hermes sweep clear`: one trial goes on after its end, or begins from scratch."""

from __future__ import annotations

from typing import Annotated

import typer

from hermes_ops.cli.completing import trials
from hermes_ops.cli.stack_commands import Home


def clear(
    trial: Annotated[
        str,
        typer.Argument(help="SWEEP/NUMBER, for example digits-…/3.", autocompletion=trials),
    ],
    *,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Throw away what it has learnt.")
    ] = False,
    home: Home = None,
) -> None:
    """Let a trial that has ended go on from its checkpoint, or begin from scratch."""
    from hermes_ops.airflow.control.clearing import clear_trial
    from hermes_ops.airflow.explaining import parts
    from hermes_ops.cli.connection import connect
    from hermes_ops.cli.locating import locate

    sweep, number = parts(trial)
    airflow = connect(home).airflow
    place = locate(airflow, sweep)
    clear_trial(airflow, place.plan, number, from_scratch=from_scratch)
    how = "begins from scratch" if from_scratch else "goes on"
    typer.echo(f"Trial {number} of {place.sweep} {how}, and so does its sweep.")
    typer.echo(f"Watch it with `hermes sweep watch {place.sweep}`.")

"""`hermes sweep list` and `hermes sweep show`: sweeps with their one state, and why."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes_ops.cli.completing import sweeps
from hermes_ops.cli.locating import Listed, Place, locate, newest, state_of
from hermes_ops.cli.stack_commands import Home
from hermes_ops.core.sweep_state import ENDED_STATES, sweep_state
from hermes_ops.errors import HermesError

if TYPE_CHECKING:
    from rich.console import Console

    from hermes_ops.cli.connection import Connection
    from hermes_ops.tracking import Tracker
    from hermes_ops.tracking.runs import SweepRun

log = logging.getLogger(__name__)

MOST_REASON = 400  # characters of a reason in the list


def register(sweep: typer.Typer) -> None:
    """Add the commands of this module to `hermes sweep`."""
    sweep.command("list")(list_sweeps)
    sweep.command("show")(show)


def list_sweeps(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False,
    home: Home = None,
) -> None:
    """List the newest sweeps of all DAGs."""
    from rich.console import Console

    from hermes_ops.airflow.control.publish import read_view
    from hermes_ops.cli.connection import connect

    connection = connect(home)
    runs = _recorded(connection)
    rows = with_states(newest(connection.airflow), runs, read_view(connection.pool))
    if as_json:
        found = (with_address(row, runs, connection.tracker) for row in rows)
        typer.echo(json.dumps([row.document() for row in found]))
    elif rows:
        print_list(Console(), rows)
    else:
        typer.echo("No sweep has been run yet.")


def show(
    sweep: Annotated[
        str,
        typer.Argument(help="The sweep's id, or the beginning of it alone.", autocompletion=sweeps),
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    home: Home = None,
) -> None:
    """Show a sweep as it stands: its state and why, its trials, its best one, where to look."""
    from hermes_ops.cli.connection import connect

    connection = connect(home)
    place = locate(connection.airflow, sweep)
    found = standing(connection, place)
    if as_json:
        typer.echo(json.dumps(found))
        return
    from hermes_ops.cli.following import print_standing

    print_standing(connection, place.sweep, found)
    typer.echo(f"Airflow  {connection.airflow_url}/dags/{place.dag_id}/runs/{place.run_id}")


def standing(connection: Connection, place: Place) -> dict[str, Any]:
    """Return the document of a sweep as it stands now, with its one state."""
    from hermes_ops.cli.outcome import document

    airflow = state_of(connection.airflow, place)
    found = document(connection, place, 0)
    found["state"] = sweep_state(airflow, found["state"])
    return found


def ended_as(connection: Connection, place: Place, airflow: str) -> str:
    """Return the state of a sweep that has ended; Airflow's part of it where MLflow is away."""
    from hermes_ops.tracking.summary import find

    recorded = None
    try:
        ref = find(connection.tracker, place.sweep)
        recorded = connection.tracker.sweep(ref).state
    except HermesError as error:
        log.debug("MLflow does not say what became of %s: %s", place.sweep, error)
    return sweep_state(airflow, recorded)


def with_states(
    rows: Iterable[Listed], runs: Mapping[str, SweepRun], view: Mapping[str, Any] | None
) -> list[Listed]:
    """Return the rows with the sweeps' one state, and with why, from MLflow and the pool's view."""
    from hermes_ops.airflow.records import FAILURES_TAG
    from hermes_ops.tracking.summary import WHY_TAGS

    live = (view or {}).get("sweeps", {})
    found = []
    for row in rows:
        run = runs.get(row.sweep)
        state = sweep_state(row.state, None if run is None else run.state)
        reason = None
        if state in ENDED_STATES and run is not None:
            reason = next((run.tags[t] for t in (*WHY_TAGS, FAILURES_TAG) if t in run.tags), None)
        elif state not in ENDED_STATES and row.sweep in live:
            facts = live[row.sweep]
            reason = facts.get("closing") or "\n".join(facts.get("failures", ())) or None
        found.append(replace(row, state=state, reason=reason))
    return found


def with_address(row: Listed, runs: Mapping[str, SweepRun], tracker: Tracker) -> Listed:
    """Return the row with the address at which MLflow compares the sweep's trials."""
    run = runs.get(row.sweep)
    return row if run is None else replace(row, compare=tracker.comparison_url(run.ref))


def print_list(console: Console, rows: Iterable[Listed]) -> None:
    """Print a line a sweep, and below it why; where that is too wide its id on its own line."""
    from rich.padding import Padding
    from rich.text import Text

    from hermes_ops.cli.tables import TableColumn, TableRow, fitted, is_wide, print_whole

    rows = list(rows)
    columns = [TableColumn(head) for head in ("sweep", "state", "started", "ended")]
    cells = [(r.sweep, r.state, _minute(r.start_date), _minute(r.end_date)) for r in rows]
    if not any(r.reason for r in rows) and not is_wide(columns, cells, console.width):
        print_whole(console, fitted("", columns, map(TableRow, cells), console.width))
        return
    for row, (sweep, state, began, ended) in zip(rows, cells, strict=True):
        line = f"{sweep}  {state}  {began}" + (f" to {ended}" if ended else "")
        if len(line) > console.width:
            line = f"{sweep}\n  {line[len(sweep) + 2 :]}"
        console.print(Text(line), soft_wrap=True)
        if row.reason:
            console.print(Padding(Text(_shortened(row.reason)), (0, 0, 0, 4), expand=False))


def _shortened(reason: str) -> str:
    return reason if len(reason) <= MOST_REASON else f"{reason[:MOST_REASON]}…"


def _minute(moment: str | None) -> str:
    return (moment or "")[:19].replace("T", " ")


def _recorded(connection: Connection) -> Mapping[str, SweepRun]:
    """Return what MLflow has of the newest sweeps, by id; none while it is away."""
    try:
        return connection.tracker.newest_sweeps()
    except HermesError:
        return {}

"""`hermes sweep list`, `hermes sweep show` and `hermes explain`: states of sweeps, and reasons."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes_ops.cli.completion import complete_sweeps, complete_trials
from hermes_ops.cli.connection import Connection, Home, recorded_actions
from hermes_ops.cli.sweep_location import (
    ListedSweep,
    SweepLocation,
    airflow_state,
    full_id,
    locate,
    locate_or_explain,
    newest,
)
from hermes_ops.core.amounts import on_gpus, shortened, utc_text
from hermes_ops.core.summary import ENDED_STATES, sweep_state
from hermes_ops.errors import HermesError

if TYPE_CHECKING:
    from rich.console import Console

    from hermes_ops.airflow.explanation import Explanation
    from hermes_ops.tracking import Tracker
    from hermes_ops.tracking.runs import SweepRun


log = logging.getLogger(__name__)

MOST_REASON = 400  # characters of a reason in the list


def list_sweeps(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False,
    home: Home = None,
) -> None:
    """List the newest sweeps of all DAGs."""
    from hermes_ops.airflow.control.pool_file import read_view
    from hermes_ops.cli.tables import output_console

    connection = Connection.from_home(home)
    runs = _fetch_runs(connection)
    rows = with_states(newest(connection.airflow), runs, read_view(connection.pool))
    if as_json:
        listed = (with_address(row, runs, connection.tracker) for row in rows)
        typer.echo(json.dumps([row.document() for row in listed]))
    elif rows:
        print_list(output_console(), rows)
    else:
        typer.echo("No sweep has been run yet.")


def show(
    sweep: Annotated[
        str,
        typer.Argument(
            help="The sweep's id, or a unique beginning of it.", autocompletion=complete_sweeps
        ),
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    home: Home = None,
) -> None:
    """Show a sweep: its state and the reason, its trials, the best one, its pages."""
    connection = Connection.from_home(home)
    place = locate_or_explain(connection, sweep)
    details = current_document(connection, place) | origin(connection, place)
    if as_json:
        typer.echo(json.dumps(details))
        return
    from hermes_ops.cli.outcome import print_outcome
    from hermes_ops.cli.tables import without_controls

    print_outcome(connection, place.sweep, details)
    if details["started_by"]:
        typer.echo(f"Started by the Airflow user {details['started_by']}")
    for line in details["actions"]:
        typer.echo(without_controls(line))
    typer.echo(f"Airflow  {connection.airflow_url}/dags/{place.dag_id}/runs/{place.run_id}")


def current_document(connection: Connection, place: SweepLocation) -> dict[str, Any]:
    """Return the document of a sweep as of now, with its one state."""
    from hermes_ops.cli.outcome import document

    airflow = airflow_state(connection.airflow, place)
    result = document(connection, place)
    result["state"] = sweep_state(airflow, result["state"])
    return result


def origin(connection: Connection, place: SweepLocation) -> dict[str, Any]:
    """Return the Airflow user that started a sweep, and the commands that were given to it."""
    run = connection.airflow.dag_run(place.dag_id, place.run_id) or {}
    return {
        "started_by": run.get("triggering_user_name") or "",
        "actions": recorded_actions(connection, place),
    }


def final_state(connection: Connection, place: SweepLocation, airflow: str) -> str:
    """Return the state of a sweep that has ended; from Airflow alone if MLflow does not answer."""
    from hermes_ops.tracking.tracker import require_sweep

    recorded = None
    try:
        ref = require_sweep(connection.tracker, place.sweep)
        recorded = connection.tracker.sweep(ref).state
    except HermesError as error:
        log.debug("MLflow does not say what became of %s: %s", place.sweep, error)
    return sweep_state(airflow, recorded)


def with_states(
    rows: Iterable[ListedSweep], runs: Mapping[str, SweepRun], view: Mapping[str, Any] | None
) -> list[ListedSweep]:
    """Return the rows with each sweep's state and its reason, from MLflow and the pool's view."""
    from hermes_ops.airflow.records import FAILURES_TAG
    from hermes_ops.tracking.runs import WHY_TAGS

    live = (view or {}).get("sweeps", {})
    completed = []
    for row in rows:
        run = runs.get(row.sweep)
        state = sweep_state(row.state, None if run is None else run.state)
        reason = None
        if state in ENDED_STATES and run is not None:
            reason = next((run.tags[t] for t in (*WHY_TAGS, FAILURES_TAG) if t in run.tags), None)
        elif state not in ENDED_STATES and row.sweep in live:
            facts = live[row.sweep]
            reason = facts.get("closing") or "\n".join(facts.get("failures", ())) or None
        began = row.start_date if run is None else _first_start(row.start_date, run.started_ms)
        completed.append(replace(row, state=state, reason=reason, start_date=began))
    return completed


def _first_start(start_date: str | None, recorded_ms: int) -> str | None:
    """Return when a sweep began: Airflow's date is the last time that its run was started."""
    recorded = datetime.fromtimestamp(recorded_ms / 1_000, UTC)
    if not recorded_ms or not start_date or datetime.fromisoformat(start_date) <= recorded:
        return start_date
    return recorded.isoformat().replace("+00:00", "Z")


def with_address(row: ListedSweep, runs: Mapping[str, SweepRun], tracker: Tracker) -> ListedSweep:
    """Return the row with the address at which MLflow compares the sweep's trials."""
    run = runs.get(row.sweep)
    return row if run is None else replace(row, compare=tracker.comparison_url(run.ref))


def print_list(console: Console, rows: Iterable[ListedSweep]) -> None:
    """Print a line for each sweep, and below it the reason.

    The id gets a line of its own where the terminal is too narrow.
    """
    from rich.padding import Padding
    from rich.text import Text

    from hermes_ops.cli.tables import TableColumn, TableRow, fit_table, is_wide, print_whole

    rows = list(rows)
    columns = [TableColumn(head) for head in ("sweep", "state", "started, UTC", "ended, UTC")]
    cells = [(r.sweep, r.state, _minute(r.start_date), _minute(r.end_date)) for r in rows]
    if not any(r.reason for r in rows) and not is_wide(columns, cells, console.width):
        print_whole(console, fit_table("", columns, map(TableRow, cells), console.width))
        return
    for row, (sweep, state, began, ended) in zip(rows, cells, strict=True):
        line = f"{sweep}  {state}  {began}" + (f" to {ended}" if ended else "")
        line += " UTC" if began else ""
        if len(line) > console.width:
            line = f"{sweep}\n  {line[len(sweep) + 2 :]}"
        console.print(Text(line), soft_wrap=True)
        if row.reason:
            reason = Text(shortened(row.reason, MOST_REASON))
            console.print(Padding(reason, (0, 0, 0, 4), expand=False))


def _minute(moment: str | None) -> str:
    return (moment or "")[:19].replace("T", " ")


def _fetch_runs(connection: Connection) -> Mapping[str, SweepRun]:
    """Return MLflow's runs of the newest sweeps, by id; none while it does not answer."""
    try:
        return connection.tracker.newest_sweeps()
    except HermesError:
        return {}


def explain(
    trial: Annotated[
        str,
        typer.Argument(
            help="SWEEP/NUMBER, for example digits-…/3.", autocompletion=complete_trials
        ),
    ],
    *,
    last: Annotated[int, typer.Option(min=0, help="Number of past decisions to show.")] = 5,
    home: Home = None,
) -> None:
    """Explain why a trial runs or waits, with its last decisions."""
    from hermes_ops.airflow.explanation import parse_trial_name

    sweep, number = parse_trial_name(trial)
    connection = Connection.from_home(home)
    trial = f"{full_id(connection.airflow, sweep)}/{number}"
    typer.echo(explanation(connection, trial, last))
    for line in place_lines(connection, trial):
        typer.echo(line)


def place_lines(connection: Connection, trial: str) -> list[str]:
    """Return where the trial's output is in Airflow, and its folder if that is on this machine."""
    from hermes_ops.airflow.client import task_page
    from hermes_ops.airflow.explanation import parse_trial_name
    from hermes_ops.airflow.folders import TrialFolder

    sweep, number = parse_trial_name(trial)
    lines = []
    with suppress(HermesError):  # Airflow has lost the run
        page = task_page(locate(connection.airflow, sweep).trial(number))
        lines.append(f"Log      {connection.airflow_url}/{page}")
    folder = TrialFolder.from_sweep(sweep, number).path
    return [*lines, f"Files    {folder}"] if folder.is_dir() else lines


def explanation(connection: Connection, trial: str, last: int) -> str:
    """Return the trial's present state as text, then its last decisions, newest first."""
    from hermes_ops.airflow.explanation import explain
    from hermes_ops.cli.tables import without_controls

    explained = explain(connection.pool, connection.tracker, trial)
    lines = [
        explained.now,
        *_why(explained),
        *([f"  {explained.deadline}"] if explained.deadline else []),
        *(f"  {line}" for line in explained.problems),
        "",
        f"Last decisions (of {len(explained.decisions)}):",
    ]
    lines += [_line(d) for d in explained.decisions[:last]]
    lines += [] if explained.decisions else ["  none yet"]
    return without_controls("\n".join(lines))


def _why(explained: Explanation) -> list[str]:
    from hermes_ops.airflow.explanation import UNDECIDED, ownership, short

    job = explained.standing
    if job is None or explained.ended is not None:
        return []
    lines = [f"  of {owner}"] if (owner := ownership(job)) else []
    lines += [f"  because: {job['reason'] or UNDECIDED}"]
    lines += [f"    {name} = {short(value)}" for name, value in job["terms"].items()]
    if job["runner_up"]:
        lines.append(f"  runner-up: {job['runner_up']}")
    if job["would_change"]:
        lines.append(f"  it would change with: {job['would_change']}")
    if explained.not_preemptible:
        lines.append(f"  it cannot be preempted now: {explained.not_preemptible}")
    if explained.limited:
        lines.append(f"  it gets at most {explained.limited}")
    return lines


def _line(decision: Mapping[str, Any]) -> str:
    from hermes_ops.airflow.explanation import short

    when = utc_text(float(decision["time_s"]))
    terms = ", ".join(f"{k}={short(v)}" for k, v in decision["terms"].items())
    return f"  {when} {decision['action']}{on_gpus(decision['gpus'])}: {decision['reason']}" + (
        f" [{terms}]" if terms else ""
    )

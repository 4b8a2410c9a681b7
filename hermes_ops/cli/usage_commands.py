"""`hermes usage`: who used how much of the GPUs, from the records of MLflow and Airflow."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from typing import TYPE_CHECKING, Annotated

import typer

from hermes_ops.cli.connection import Connection, Home
from hermes_ops.core.usage import COLUMNS, PRICE, csv_text, key_text, number_text

if TYPE_CHECKING:
    from hermes_ops.cli.sweep_location import SweepLocation
    from hermes_ops.config.pool_quota import PoolQuota
    from hermes_ops.core.usage import Figures, TrialUse
    from hermes_ops.tracking.runs import SweepRun

MOST_SWEEPS = 1_000
AIRFLOW_TEAMS_NOTE = (
    "Here sweeps count for the team of their owner: only Airflow's database knows the team of a "
    "DAG. The page Usage in Airflow counts the sweeps of {} by their DAGs."
)
"""A note for quotas whose teams are those of Airflow's multi-team mode."""
NO_QUOTA_NOTE = (
    "No controller of the pool {} has worked in this state folder (HERMES_HOME): its quota is not "
    "known here, so no sweep has a team and nothing counts as borrowed. The page Usage in Airflow "
    "knows it."
)


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the application."""
    app.command("usage")(usage)


def usage(
    *,
    since: Annotated[str, typer.Option(help="A date, as 2026-11-01 (UTC).", metavar="DATE")],
    by: Annotated[str, typer.Option(help="user, team, sweep or day.")] = "user",
    rate: Annotated[
        float | None, typer.Option(min=0.0, help="Price of a GPU-hour; the quota file's `rate`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    home: Home = None,
) -> None:
    """Show who used how much of the GPUs since a date."""
    from hermes_ops.core.usage import BY
    from hermes_ops.core.usage import usage as used

    if by not in BY:
        raise typer.BadParameter(f"--by is {by!r}; allowed: {', '.join(BY)}")
    if as_json and as_csv:
        raise typer.BadParameter("name --json or --csv, not both")
    if rate is not None and not isfinite(rate):
        raise typer.BadParameter(f"--rate is {rate}; write the price of a GPU-hour, such as 2.5")
    since_s, now_s, connection = _date_s(since), time.time(), Connection.from_home(home)
    quota = _pool_quota(connection)
    if quota is not None and quota.team_of_airflow_team:
        named = ", ".join(sorted(quota.team_of_airflow_team.values()))
        typer.echo(AIRFLOW_TEAMS_NOTE.format(named), err=True)
    uses = _trial_uses(connection, since_s, {} if quota is None else quota.team_of_user)
    usages = used(uses, by, since_s, now_s, None if quota is None else quota.quota())
    rate = quota.rate if rate is None and quota is not None else rate
    rows = [row.document(rate) for row in usages]
    if as_json:
        typer.echo(json.dumps({"by": by, "since": since, "usage": rows}))
    elif as_csv:
        typer.echo(csv_text(by, rows, COLUMNS if rate is None else COLUMNS | PRICE), nl=False)
    else:
        _print(by, rows, COLUMNS if rate is None else COLUMNS | PRICE)


def _pool_quota(connection: Connection) -> PoolQuota | None:
    """Return the quota of the pool, None without one; say so where it cannot be known."""
    from hermes_ops.airflow.control.pool_file import view_path
    from hermes_ops.airflow.control.quota_settings import QuotaSettings

    settings = QuotaSettings.of_pool(connection.pool)
    if settings is None and not view_path(connection.pool).exists():
        typer.echo(NO_QUOTA_NOTE.format(connection.pool), err=True)
    return None if settings is None else settings.quota


def _date_s(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"--since is {text!r}; write a date as 2026-11-01") from None


def _trial_uses(
    connection: Connection, since_s: float, teams: Mapping[str, str]
) -> Iterator[TrialUse]:
    """Yield the trials that may have been there since then, of all pools."""
    from hermes_ops.tracking.trial_timelines import fetch_trial_timelines

    sweeps = _sweeps(connection, since_s)
    users = owners(connection, sweeps)
    for sweep_id, run in sweeps.items():
        user = users.get(sweep_id, "")
        team, pool = teams.get(user, ""), run.tags.get("hermes.pool", connection.pool)
        for timeline in fetch_trial_timelines(connection.tracker, run.ref):
            yield timeline.to_use(sweep_id, user, team, pool)


def _sweeps(connection: Connection, since_s: float) -> dict[str, SweepRun]:
    """Return the sweeps that ran since then; say so where some may be missing."""
    from hermes_ops.tracking.runs import RUN_STATUS

    runs = connection.tracker.newest_sweeps(MOST_SWEEPS)
    oldest_s = min((run.started_ms / 1000 for run in runs.values()), default=since_s)
    if len(runs) >= MOST_SWEEPS and oldest_s > since_s:
        typer.echo(f"Only the newest {MOST_SWEEPS} sweeps are counted.", err=True)
    return {
        sweep_id: run
        for sweep_id, run in runs.items()
        # A sweep that was continued keeps its first end while it runs.
        if run.state not in RUN_STATUS or run.ended_ms is None or run.ended_ms / 1000 >= since_s
    }


def owners(connection: Connection, sweeps: Collection[str]) -> dict[str, str]:
    """Return the owner of each sweep that Airflow still has: as the controller sees it."""
    from hermes_ops.cli.sweep_location import possible_locations

    places = {sweep: tuple(possible_locations(sweep)) for sweep in sweeps}
    dags = sorted({place.dag_id for several in places.values() for place in several})
    runs = {
        (run["dag_id"], run["dag_run_id"]): run.get("triggering_user_name") or ""
        for run in connection.airflow.all_dag_runs(dags)
    }
    owner_of: dict[str, str] = {}
    for sweep, several in places.items():
        place = next((p for p in several if (p.dag_id, p.run_id) in runs), None)
        if place is not None:
            owner_of[sweep] = runs[place.dag_id, place.run_id] or _owner_of_untriggered(
                connection, place
            )
    return owner_of


def _owner_of_untriggered(connection: Connection, place: SweepLocation) -> str:
    """Return the owner that the file of a scheduled sweep names, else that of its DAG."""
    from hermes_ops.airflow.records import SWEEP_KEY, SweepRecord, decode

    record = decode(SweepRecord, connection.airflow.get_state(place.plan, SWEEP_KEY))
    if record is not None and record.config.get("owner"):
        return str(record.config["owner"])
    names = (connection.airflow.dag(place.dag_id) or {}).get("owners") or [""]
    return str(sorted(names)[0])


def _print(by: str, rows: Sequence[Figures], heads: Mapping[str, str]) -> None:
    from hermes_ops.cli.tables import TableColumn, TableRow, fit_table, output_console, print_whole

    if not rows:
        typer.echo("No trial held GPUs or waited since then.")
        return
    columns = (TableColumn(by), *(TableColumn(head, right=True) for head in heads.values()))
    cells = [
        TableRow((key_text(by, row), *(number_text(name, row[name]) for name in heads)))
        for row in rows
    ]
    console = output_console()
    print_whole(console, fit_table("", columns, cells, console.width))

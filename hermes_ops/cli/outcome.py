"""A sweep's outcome: its document from MLflow, and how it is printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.text import Text

from hermes_ops.cli.sweep_location import SweepLocation
from hermes_ops.cli.tables import TableColumn, TableRow, fit_table, output_console, print_whole
from hermes_ops.config import SweepConfig, parse
from hermes_ops.core.amounts import first_lines
from hermes_ops.core.deadline import DeadlineResult
from hermes_ops.core.secondary_metrics import why_no_best
from hermes_ops.core.summary import ENDED_STATES, alike, course, failure_lines
from hermes_ops.errors import HermesError
from hermes_ops.report.table import format_cell, settings_line

if TYPE_CHECKING:
    from hermes_ops.cli.connection import Connection
    from hermes_ops.tracking.summary import CollectedSweep


def fetch_config(connection: Connection, place: SweepLocation) -> SweepConfig:
    """Return the resolved config of a sweep; raise HermesError where Airflow has no record."""
    from hermes_ops.airflow.records import SWEEP_KEY, SweepRecord, decode

    record = decode(SweepRecord, connection.airflow.get_state(place.plan, SWEEP_KEY))
    if record is None:
        raise HermesError(_without_record(connection, place))
    return parse(record.config, source=place.sweep, base=None)


def _without_record(connection: Connection, place: SweepLocation) -> str:
    """Say why Airflow has no record: the plan task has not run well, or it was deleted since."""
    from hermes_ops.airflow.client import task_page

    task = connection.airflow.task_instance(place.plan)
    if task is None or task["state"] != "success":
        log = f"{connection.airflow_url}/{task_page(place.plan)}"
        return f"the sweep {place.sweep!r} has not been planned: see its plan task's log, {log}"
    ref = connection.tracker.find_sweep(place.sweep)
    left = "MLflow has nothing of it either"
    if ref is not None:
        page = connection.tracker.run_url(ref.experiment_id, ref.parent_run_id)
        left = f"its results are in MLflow: {page}"
    return (
        f"the record of the sweep {place.sweep!r} has been deleted from Airflow, by `hermes prune` "
        f"for instance; {left}"
    )


def fetch_collection(connection: Connection, place: SweepLocation) -> CollectedSweep:
    """Return everything that MLflow holds of a sweep."""
    from hermes_ops.tracking.summary import collect
    from hermes_ops.tracking.tracker import require_sweep

    config = fetch_config(connection, place)
    return collect(
        connection.tracker,
        require_sweep(connection.tracker, place.sweep, config.name),
        metric=config.objective.metric,
        direction=config.objective.direction.value,
        max_trials=config.trial_count,
        others=config.secondary,
    )


def document(connection: Connection, place: SweepLocation) -> dict[str, Any]:
    """Return the JSON document of a sweep."""
    summary = fetch_collection(connection, place).summary
    return dict(json.loads(json.dumps(summary.to_document())))


def deadline_line(deadline: Mapping[str, Any]) -> str:
    """Return the deadline of a sweep's document, and once it has ended whether it was kept."""
    at = datetime.fromisoformat(deadline["at"]).timestamp()
    return f"Deadline {DeadlineResult(at, deadline['kept']).words}"


MOST_MISSED_BOUNDS = 10


def print_outcome(connection: Connection, sweep: str, details: Mapping[str, Any]) -> None:
    """Print a sweep's document: its trials, why they failed, the best one, its page in MLflow."""
    console = output_console()
    best = details["best"]
    print_whole(console, outcome_table(sweep, details, console.width))
    for line in (*end_reason_lines(details), *missed_bound_lines(details)):
        console.print(Text(line))
    if best is not None:
        value, settings = format_cell(best["best"]), settings_line(best["config"])
        console.print(Text(f"Best: trial {best['number']} ({value}) {settings}"))
    elif details["state"] in ENDED_STATES:
        console.print(Text(why_no_best(details)))
    if (deadline := details.get("deadline")) is not None:
        console.print(Text(deadline_line(deadline)))
    console.print(Text(usage_line(details)))
    console.print(Text(f"MLflow   {_page(connection, sweep)}"), soft_wrap=True)
    print_comparison(console, connection, sweep)


def usage_line(details: Mapping[str, Any]) -> str:
    """Return how long a sweep has taken, and how many GPUs it has used at once."""
    slots = details["pool_slots"]  # unknown before the first decision
    of_pool = "" if slots is None else f" of {slots}"
    used = f"at most {details['max_slots_used']}{of_pool} GPUs in use at once"
    ended_s = details.get("ended_seconds", 0.0)
    gap = f" without the {ended_s:.0f} s after an end" if ended_s else ""
    return f"{details['wall_seconds'] - ended_s:.0f} s{gap}, {used}"


def end_reason_lines(details: Mapping[str, Any]) -> list[str]:
    """Return the reason of the sweep's end, and a line for each way in which trials failed."""
    failed = [(t["number"], t.get("reason") or "") for t in details["trials"]
              if t["state"] == "failed"]  # fmt: skip
    reason, lines = details.get("reason") or "", failure_lines(failed)
    groups = alike(failed)
    if len(groups) == 1 and groups[0].reason in reason:
        lines = []  # the sweep's reason says it already
    return [f"{details['state'].capitalize()}: {reason}", *lines] if reason else lines


def outcome_table(sweep: str, details: Mapping[str, Any], width: int = 160) -> RenderableType:
    """Return the table of a sweep's trials, with the last values of the metrics that it names.

    The parameters come last: a narrow terminal does without them.
    """
    names = [*(details["trials"][0].get("metrics") or ())] if details["trials"] else []
    sized = any(size > 1 for trial in details["trials"] for size in trial.get("sizes") or ())
    heads = ("trial", "state", "epochs", "final", "best", *names, "segments", "preemptions",
             *(["GPUs"] if sized else []), "GPU-seconds")  # fmt: skip
    best = details["best"]
    rows = []
    for trial in details["trials"]:
        seen = (format_cell(trial["metrics"][name]["last"]) for name in names)
        cells = (trial["number"], trial["state"], trial["steps"], format_cell(trial["final"]),
                 format_cell(trial["best"]), *seen, trial["segments"], trial["preemptions"],
                 *([course(trial["sizes"])] if sized else []),
                 f"{trial['gpu_seconds']:.1f}")  # fmt: skip
        is_best = best is not None and trial["number"] == best["number"]
        settings = settings_line(trial["config"] or {})
        rows.append(TableRow((*map(str, cells), settings), "bold green" if is_best else ""))
    columns = [*map(TableColumn, heads), TableColumn("parameters", wraps=True, spare=True)]
    return fit_table(f"{sweep}: {details['state']}", columns, rows, width)


def missed_bound_lines(details: Mapping[str, Any]) -> list[str]:
    """Return a line for each of the first trials that miss a bound; count the others."""
    lines = [
        f"Trial {t['number']} misses a bound: {'; '.join(t['violates'])}"
        for t in details["trials"]
        if t.get("violates")
    ]
    return first_lines(lines, MOST_MISSED_BOUNDS, "{} more trials miss a bound")


def print_comparison(console: Console, connection: Connection, sweep: str) -> bool:
    """Print where MLflow shows the trials side by side; False while it does not know the sweep."""
    from hermes_ops.tracking.tracker import require_sweep

    try:
        ref = require_sweep(connection.tracker, sweep)
    except HermesError:
        return False
    address = connection.tracker.comparison_url(ref)
    console.print(Text(f"Compare  {address}"), soft_wrap=True)
    return True


def _page(connection: Connection, sweep: str) -> str:
    from hermes_ops.tracking.tracker import require_sweep

    ref = require_sweep(connection.tracker, sweep)
    return connection.tracker.run_url(ref.experiment_id, ref.parent_run_id)

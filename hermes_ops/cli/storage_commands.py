"""`hermes backup`, `restore` and `prune`, and the table of `hermes status --disk`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes_ops.cli.connection import Connection, Home
from hermes_ops.core.amounts import counted, first_lines, utc_text
from hermes_ops.errors import ConfigError, HermesError, Problem, StackError
from hermes_ops.trial.disk_space import disks_of, format_bytes

if TYPE_CHECKING:
    from hermes_ops.airflow.prune.candidates import DeletionRights, PruneRules
    from hermes_ops.airflow.prune.removal import PruneEntry, Removal
    from hermes_ops.stack.layout import Layout


MOST_KEPT_SHOWN = 20

Folder = Annotated[Path, typer.Argument(help="The backup's folder.", metavar="FOLDER")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the application."""
    app.command("backup")(backup)
    app.command("restore")(restore)
    app.command("prune")(prune)


def backup(folder: Folder, home: Home = None) -> None:
    """Write a backup of the state folder and its databases, running or stopped."""
    from hermes_ops.stack import backup as backups
    from hermes_ops.stack.layout import Layout, absolute, default_home

    place = absolute(home) if home else default_home()
    target = absolute(folder)
    manifest = backups.write_backup(Layout(place), target, typer.echo)
    size = f"{counted(manifest.files, 'file')}, {format_bytes(manifest.bytes)}"
    typer.echo(f"Backup of {place}: {size} in {target}. It holds passwords and keys.")


def restore(
    folder: Folder,
    *,
    home: Home = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Move the present state folder aside.")
    ] = False,
    move: Annotated[
        list[str] | None,
        typer.Option(help="A folder of scripts or data that has moved.", metavar="OLD=NEW"),
    ] = None,
    airflow_db: Annotated[
        str | None, typer.Option(help="An empty postgresql://… database.", metavar="URL")
    ] = None,
    mlflow_db: Annotated[
        str | None, typer.Option(help="An empty postgresql://… database.", metavar="URL")
    ] = None,
) -> None:
    """Restore a backup into a state folder, which must be new, empty or stopped."""
    from hermes_ops.stack import restore as restores
    from hermes_ops.stack.layout import absolute, default_home

    place = absolute(home) if home else default_home()
    target = restores.RestoreTarget(
        home=place,
        options={"airflow_db": airflow_db, "mlflow_db": mlflow_db},
        moves=tuple(_parse_move(text) for text in move or ()),
        replace=replace,
    )
    done = restores.restore(absolute(folder), target, typer.echo)
    created = utc_text(done.manifest.created_s)
    typer.echo(f"Restored to {place}: {done.manifest.host}:{done.manifest.home} as of {created}.")
    if done.before is not None:
        typer.echo(f"What was there before is in {done.before}.")
    typer.echo(f"Start it with `hermes up --home {place}`, and never where the old one still runs.")


def _parse_move(text: str) -> tuple[str, str]:
    old, _, new = text.partition("=")
    pair = old.rstrip("/"), new.rstrip("/")
    if not all(part.startswith("/") and len(part) > 1 for part in pair):
        problem = Problem(
            "--move", repr(text), "OLD=NEW, both absolute paths", "--move /data/ann/work=/srv/work"
        )
        raise ConfigError("the command line", (problem,))
    return pair


@dataclass(slots=True)
class _Candidates:
    """The sweeps to remove with their sizes in bytes, and the reasons why others stay."""

    unfinished: list[PruneEntry] = field(default_factory=list)
    going: list[PruneEntry] = field(default_factory=list)
    bytes_of: dict[str, int] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def entries(self) -> list[PruneEntry]:
        return [*self.unfinished, *self.going]


def prune(
    *,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="An age such as 90d, 12h or 8w.")
    ],
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep", metavar="NAME", help="Only sweeps with this name or id; * for any text."
        ),
    ] = None,
    keep_best: Annotated[
        bool,
        typer.Option("--keep-best", help="Keep the best trial's run in MLflow, and the sweep's."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    home: Home = None,
) -> None:
    """Remove old ended sweeps: files, checkpoints, MLflow runs, Airflow's rows."""
    from hermes_ops.airflow.folders import home as state_folder
    from hermes_ops.airflow.prune.removal import PruneJournal

    rules = _rules(older_than, sweep)
    if not (dry_run or yes or sys.stdin.isatty()):
        raise HermesError("there is no terminal to ask on: add --yes, or --dry-run to look first.")
    connection = Connection.from_home(home)
    journal = PruneJournal.from_home(state_folder())
    with nullcontext() if dry_run else journal.locked():
        stack = _own_stack(home)
        removal = _removal(connection, stack)
        candidates = _find(connection, removal, rules, keep_best=keep_best)
        if not as_json:
            _print_candidates(candidates, dry_run=dry_run)
        if dry_run:
            _report_removal(candidates, {}, as_json=as_json, dry_run=True)
            return
        if candidates.entries and not yes:
            typer.confirm(f"Remove {counted(len(candidates.entries), 'sweep')}?", abort=True)
        left = _remove(removal, candidates, as_json=as_json)
        _clean_airflow(stack, rules)
    _report_removal(candidates, left, as_json=as_json, dry_run=False)
    if not as_json:
        _print_admin_advice(removal, candidates)
    raise typer.Exit(1 if left else 0)


def _rules(older_than: str, only: list[str] | None) -> PruneRules:
    from hermes_ops.airflow.prune.candidates import PruneRules, parse_age_s

    try:
        return PruneRules(time.time(), parse_age_s(older_than), tuple(only or ()))
    except ValueError as error:
        raise HermesError(f"--older-than: {error}.") from None


def _own_stack(home: Path | None) -> Layout | None:
    """Return the folders of this machine's stack; None if Airflow is not run by `hermes up`."""
    from hermes_ops.stack import client_environment
    from hermes_ops.stack.layout import Layout, absolute, default_home

    folder = absolute(home) if home else default_home()
    try:
        client_environment(folder)
    except StackError:
        return None
    return Layout(folder)


def _removal(connection: Connection, stack: Layout | None) -> Removal:
    from hermes_ops.airflow.folders import home as state_folder
    from hermes_ops.airflow.prune.removal import Removal
    from hermes_ops.stack import databases

    logs, collect = None, None
    if stack is not None:
        environment = databases.database_environment(stack)
        collect = partial(databases.collect_garbage, environment, stack.run)
        logs = stack.airflow / "logs"
    elif databases.BACKEND in os.environ:
        collect = partial(databases.collect_garbage, os.environ, None)
    return Removal(connection.airflow, connection.tracker, state_folder(), logs, collect)


def _find(
    connection: Connection, removal: Removal, rules: PruneRules, *, keep_best: bool
) -> _Candidates:
    from hermes_ops.airflow.disk_usage import artifact_folders, sum_bytes
    from hermes_ops.airflow.prune.candidates import (
        DeletionRights,
        candidates,
        entry_of,
        is_gone,
        judge,
        spared_runs,
    )
    from hermes_ops.airflow.prune.removal import log_folder

    airflow, tracker, home = connection.airflow, connection.tracker, removal.home
    rights = DeletionRights(airflow)
    result = _find_unfinished(removal, rights)
    begun = {*result.kept, *(entry.sweep for entry in result.unfinished)}
    registered = tracker.deletion.registered()
    before_s = rules.now_s - rules.older_than_s
    artifacts = artifact_folders(home)
    for candidate in candidates(airflow, tracker, home, before_s):
        if candidate.sweep in begun:
            continue
        verdict = judge(candidate.age, rules)
        dag_id = "" if candidate.plan is None else candidate.plan.dag_id
        if reason := verdict.reason or rights.refusal(candidate.sweep, dag_id):
            result.kept[candidate.sweep] = reason
            continue
        runs = tracker.deletion.runs_of(candidate.sweep)
        spared = spared_runs(runs, candidate, registered, best=keep_best)
        entry = entry_of(airflow, tracker, candidate, runs, spared)
        if is_gone(entry, candidate.folder):
            continue
        result.going.append(entry)
        places = [candidate.folder, *(artifacts[run] for run in entry.runs if run in artifacts)]
        if removal.logs is not None and entry.run_id:
            places.append(log_folder(removal.logs, entry.dag_id, entry.run_id))
        result.bytes_of[entry.sweep] = sum_bytes(places)
        if spared:
            result.notes[entry.sweep] = _note(spared, registered)
    return result


def _find_unfinished(removal: Removal, rights: DeletionRights) -> _Candidates:
    """Return the removals that were interrupted, without those that this user may not complete."""
    result = _Candidates()
    for entry in removal.journal.entries():
        if refusal := rights.refusal(entry.sweep, entry.dag_id):
            result.kept[entry.sweep] = refusal
        else:
            result.unfinished.append(entry)
    return result


def _note(spared: set[str], registered: Mapping[str, str]) -> str:
    """Say which runs of a sweep stay in MLflow."""
    if models := sorted(registered[run] for run in spared if run in registered):
        return f"the run of {', '.join(models)} stays in MLflow"
    return "the run of its best trial stays in MLflow"


def _remove(removal: Removal, candidates: _Candidates, *, as_json: bool) -> dict[str, str]:
    """Remove the candidates; return why some of a sweep is left, by sweep."""
    from hermes_ops.airflow.prune.removal import RESUMED

    left: dict[str, str] = {}
    gone: list[PruneEntry] = []
    for entry in candidates.entries:
        try:
            reason = removal.remove(entry)
        except (HermesError, OSError) as error:
            reason = str(error)
        if reason is None:
            gone.append(entry)
        elif reason == RESUMED:
            candidates.kept[entry.sweep] = reason
        else:
            left[entry.sweep] = reason
        if not as_json and reason is not None:
            typer.echo(f"{entry.sweep}: {reason}.", err=True)
    removal.finish(gone)
    return left


def _clean_airflow(stack: Layout | None, rules: PruneRules) -> None:
    """Clean Airflow's tables that belong to no sweep, unless only some sweeps were named."""
    from hermes_ops.stack import databases

    if stack is not None and not rules.only:
        environment = databases.database_environment(stack)
        before_s = rules.now_s - rules.older_than_s
        databases.clean_airflow(environment, stack.run, before_s)


def _print_candidates(candidates: _Candidates, *, dry_run: bool) -> None:
    from hermes_ops.cli.tables import TableColumn, TableRow, fit_table, output_console, print_whole

    console = output_console()
    for entry in candidates.unfinished:
        what = "would be completed" if dry_run else "is completed"
        typer.echo(f"{entry.sweep}: its removal was interrupted, and {what}.")
    if candidates.going:
        columns = [
            TableColumn("sweep"),
            TableColumn("size", right=True),
            TableColumn("what stays", wraps=True),
        ]
        rows = [
            TableRow(
                (
                    e.sweep,
                    format_bytes(candidates.bytes_of[e.sweep]),
                    candidates.notes.get(e.sweep, "nothing"),
                )
            )
            for e in candidates.going
        ]
        print_whole(console, fit_table("", columns, rows, console.width))
    elif not candidates.unfinished:
        typer.echo("Nothing is to be removed.")
    for line in _kept_lines(candidates.kept.items()):
        typer.echo(line)


def _kept_lines(kept: Iterable[tuple[str, str]]) -> list[str]:
    from hermes_ops.airflow.prune.candidates import OTHER_NAME

    lines = [f"Kept: {sweep}: {reason}." for sweep, reason in kept if reason != OTHER_NAME]
    return first_lines(lines, MOST_KEPT_SHOWN, "Kept: {} more; --json shows all.")


def _report_removal(
    candidates: _Candidates, left: dict[str, str], *, as_json: bool, dry_run: bool
) -> None:

    entries = [
        e for e in candidates.entries if e.sweep not in left and e.sweep not in candidates.kept
    ]
    total = sum(candidates.bytes_of.get(e.sweep, 0) for e in entries)
    if as_json:
        document: dict[str, Any] = {
            "dry_run": dry_run,
            "removed": [
                {"sweep": e.sweep, "bytes": candidates.bytes_of.get(e.sweep)} for e in entries
            ],
            "left": left,
            "kept": candidates.kept,
        }
        typer.echo(json.dumps(document))
    elif entries:
        verb = "Would remove" if dry_run else "Removed"
        typer.echo(f"{verb} {counted(len(entries), 'sweep')}, {format_bytes(total)}.")


def _print_admin_advice(removal: Removal, candidates: _Candidates) -> None:
    """Name the commands for the administrators of an Airflow and an MLflow that are not ours."""
    if removal.collect is None and any(entry.runs for entry in candidates.entries):
        typer.echo(
            "The runs are in MLflow's trash. The administrator of its database frees the space: "
            "`mlflow gc --backend-store-uri URI --tracking-uri URL`."
        )
    if removal.logs is None and candidates.entries:
        typer.echo(
            "Task logs and the rows of Airflow's own log are removed by Airflow's means: "
            "`airflow db clean`, and the cleaning of your log folder."
        )


def disk_document(home: Path) -> dict[str, Any]:
    """Return the disk usage of the sweeps, of the rest of the state folder and in total.

    A folder that does not exist uses nothing, and has the free space of where it would be made.
    """
    from hermes_ops.airflow.disk_usage import sum_bytes, sweep_usages
    from hermes_ops.stack.layout import Layout

    usages = sweep_usages(home, _sweeps_own_runs(home))
    folders = Layout(home).folders
    elsewhere = [folder for folder in folders if folder != home and folder.is_symlink()]
    total = sum_bytes([home, *elsewhere])
    if not home.exists():
        folders = (next(folder for folder in home.absolute().parents if folder.exists()),)
    rows = [{**asdict(usage), "total_bytes": usage.total_bytes} for usage in usages]
    return {
        "sweeps": rows,
        "other_bytes": max(0, total - sum(usage.total_bytes for usage in usages)),
        "total_bytes": total,
        "free_bytes": sum(disk.free_bytes for disk in disks_of(folders)),
    }


def _sweeps_own_runs(home: Path) -> dict[str, str]:
    """Return the sweep of each sweep's own run in MLflow; none while MLflow is away."""
    from hermes_ops.cli.connection import connect_tracker

    try:
        runs = connect_tracker(home).deletion.sweeps()
    except HermesError:
        return {}
    return {run.ref.parent_run_id: run.ref.sweep_id for run in runs}


def print_disk(document: dict[str, Any]) -> None:
    """Print a line a sweep, the greatest first, and the sums."""
    from hermes_ops.cli.tables import (
        TableColumn,
        TableRow,
        fit_table,
        output_console,
        print_whole,
    )

    console = output_console()
    parts = ("checkpoints", "files", "artifacts", "logs", "total")
    columns = [TableColumn("sweep"), *(TableColumn(part, right=True) for part in parts)]
    rows = [
        TableRow((usage["sweep"], *(format_bytes(usage[f"{part}_bytes"]) for part in parts)))
        for usage in document["sweeps"]
    ]
    if rows:
        print_whole(console, fit_table("", columns, rows, console.width))
    console.print(
        f"Disk     {format_bytes(document['total_bytes'])} in all, of which "
        f"{format_bytes(document['other_bytes'])} belong to no sweep; "
        f"{format_bytes(document['free_bytes'])} free",
        highlight=False,
    )

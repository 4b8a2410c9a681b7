"""Restore a backup: into the same folder or another, on this host or another.

Everything is copied and verified in a folder beside the home and then takes its name, so a restore
that is cut leaves the home as it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import make_url

from hermes_ops.database_address import with_driver
from hermes_ops.errors import StackError
from hermes_ops.moved_paths import FILE as MOVED_FILE
from hermes_ops.moved_paths import MovedPaths
from hermes_ops.stack import databases, lifecycle, migrations
from hermes_ops.stack.backup import AUTH_DATABASE
from hermes_ops.stack.backup_format import (
    DATABASES,
    HOME,
    Checksums,
    Manifest,
    TreeCopy,
    read_manifest,
    refuse_differences,
)
from hermes_ops.stack.layout import Layout, write_private
from hermes_ops.stack.settings import Settings, resolve

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """The result of a restore: `before` is where the previous home lies now."""

    manifest: Manifest
    settings: Settings
    before: Path | None


@dataclass(frozen=True, slots=True)
class RestoreTarget:
    """The target of a restore.

    `options` are settings of the stack given by option; None is not given. `moves` are folders
    that the scripts use: the old and the new path of each. `replace` allows a home that is not
    empty; that is moved aside.
    """

    home: Path
    options: Mapping[str, object]
    moves: tuple[tuple[str, str], ...] = ()
    replace: bool = False


def restore(backup: Path, target: RestoreTarget, say: Say) -> RestoreResult:
    """Restore `backup`; raises `StackError` with the remedy, and the home is as it was then."""
    manifest, sums = read_manifest(backup)
    migrations.refuse_newer(manifest.versions, f"The backup {backup}")
    if target.home.is_relative_to(backup):
        raise StackError(f"{target.home} lies in the backup: give another folder with --home")
    with _staging(target.home) as staging, _unused_home(target):
        home = staging / HOME
        moved = _moves(backup, manifest, target)
        say("Copying and verifying …")
        copied = Checksums()
        TreeCopy(backup / HOME, home, copied, f"{HOME}/", moved.apply).tree()
        TreeCopy(backup / DATABASES, staging / DATABASES, copied, f"{DATABASES}/").tree()
        refuse_differences(backup, sums, copied)
        settings = _settings(home, target)
        write_private(home / MOVED_FILE, moved.text())
        layout = Layout(home)
        layout.create()
        _load_databases(manifest, settings, staging, say)
        auth = staging / DATABASES / f"{AUTH_DATABASE}.sqlite"
        if auth.exists():
            auth.rename(layout.mlflow / "auth.db")
        before = _take_place(home, target.home)
    return RestoreResult(manifest, settings.model_copy(update={"home": target.home}), before)


@contextlib.contextmanager
def _staging(home: Path) -> Iterator[Path]:
    """Lock the folder in which a home is assembled, without what an interrupted restore left."""
    place = home.with_name(f"{home.name}.restoring")
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise StackError(f"{place} cannot be made ({error.strerror}): correct --home") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # what is in the folder is the other one's
        os.close(handle)
        raise StackError(f"Another restore works in {place}: wait for it") from None
    try:
        for name in (HOME, DATABASES):
            shutil.rmtree(place / name, ignore_errors=True)
        yield place
    except OSError as error:
        raise StackError(
            f"The restore could not be written in {place} ({error.strerror or error}); {home} is "
            "as it was. Free some space, or give a folder on another disk with --home"
        ) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(handle)


@contextlib.contextmanager
def _unused_home(target: RestoreTarget) -> Iterator[None]:
    """Lock a home that is to be replaced against a start; raises `StackError` if it is in use."""
    home = target.home
    if not home.exists() or (home.is_dir() and not any(home.iterdir())):
        yield
        return
    if not home.is_dir():
        raise StackError(f"{home} is not a folder: give another with --home")
    if not target.replace:
        raise StackError(
            f"{home} is not empty: give another folder with --home, or --replace, which moves "
            f"what is there to {home}.before-TIME"
        )
    with lifecycle.hold_stopped(Layout(home)):
        yield


def _moves(backup: Path, manifest: Manifest, target: RestoreTarget) -> MovedPaths:
    """Return the present paths of folders that sweeps have recorded, earlier moves included."""
    pairs = [(manifest.home, str(target.home)), (manifest.environment, sys.prefix), *target.moves]
    return MovedPaths.load(backup / HOME).then(pairs)


def _settings(home: Path, target: RestoreTarget) -> Settings:
    """Return the restored home's settings; a database that an option names goes into its file."""
    settings = resolve(home, target.options)
    file = Layout(home).settings_file
    text = file.read_text() if file.exists() else ""
    for key in ("airflow_db", "mlflow_db"):
        url = getattr(settings, key)
        if url is not None and tomllib.loads(text).get(key) != url:
            text = with_setting(text, key, url)
            write_private(file, text)
    return settings


def with_setting(text: str, key: str, value: str) -> str:
    """Return the TOML text with its top-level `key` set to `value`."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    line = f'{key} = "{escaped}"'
    kept = [old for old in text.splitlines() if not re.match(rf"""\s*(["']?){key}\1\s*=""", old)]
    return "\n".join([line, *kept]) + "\n"


def _load_databases(manifest: Manifest, settings: Settings, staging: Path, say: Say) -> None:
    layout = Layout(staging / HOME)
    chosen = {
        databases.AIRFLOW: (settings.airflow_db, layout.airflow / "airflow.db"),
        databases.MLFLOW: (settings.mlflow_db, layout.mlflow / "mlflow.db"),
    }
    steps = []
    for name, (url, default) in chosen.items():
        address = make_url(with_driver(url)) if url else databases.sqlite_address(default)
        database = databases.Database(name, address)
        databases.refuse_unless_empty(database)
        steps.append((database, staging / DATABASES / _copy_name(manifest, database)))
    for database, copy in steps:
        say(f"Restoring {database.name}'s database …")
        if database.kind == databases.SQLITE:
            shutil.move(copy, database.file)
        elif copy.suffix == ".dump":
            databases.load_dump(copy, database)
        else:
            migrations.to_postgresql(copy, database)


def _copy_name(manifest: Manifest, database: databases.Database) -> str:
    kind = manifest.databases[database.name]
    if kind == databases.POSTGRESQL and database.kind == databases.SQLITE:
        raise StackError(
            f"The backup of {database.name} is one of PostgreSQL and goes into PostgreSQL only: "
            f"give an empty database with --{database.name}-db postgresql://…"
        )
    return databases.copy_name(database.name, kind)


def _take_place(fresh: Path, home: Path) -> Path | None:
    """Rename the restored folder to the home; return where the previous one lies now."""
    before = None
    if home.exists() and any(home.iterdir()):
        stamp = time.strftime("%Y%m%d-%H%M%S")
        before = home.with_name(f"{home.name}.before-{stamp}")
        home.rename(before)
    try:
        fresh.rename(home)
    except OSError:
        if before is not None:
            before.rename(home)
        raise
    return before

"""The databases of a home: which there are, a copy of each, such a copy put back, and clean-up.

SQLite files are copied by SQLite's own online backup, PostgreSQL databases by `pg_dump` and
`pg_restore`. Both are cleaned by MLflow's and Airflow's own commands.
"""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy.engine import URL, make_url

from hermes_ops.errors import StackError
from hermes_ops.stack.layout import Layout
from hermes_ops.stack.record import client_environment

SQLITE, POSTGRESQL = "sqlite", "postgresql"
AIRFLOW, MLFLOW = "airflow", "mlflow"
SQLITE_COMPANIONS = ("-wal", "-shm", "-journal")
CLIENT_PACKAGE = "postgresql-client"


@dataclass(frozen=True, slots=True)
class Database:
    """One database: its name in a backup and its SQLAlchemy address."""

    name: str
    url: URL

    @property
    def kind(self) -> str:
        """SQLITE or POSTGRESQL."""
        return self.url.get_backend_name()

    @property
    def copy_name(self) -> str:
        """The file of its copy in a backup."""
        return copy_name(self.name, self.kind)

    @property
    def file(self) -> Path:
        """The file of an SQLite database."""
        return Path(self.url.database or "")


def sqlite_address(file: Path) -> URL:
    """Return the address of an SQLite file."""
    return URL.create(SQLITE, database=str(file))


def copy_name(name: str, kind: str) -> str:
    """Return the file of a database's copy in a backup."""
    return f"{name}.sqlite" if kind == SQLITE else f"{name}.dump"


def in_use(layout: Layout) -> tuple[Database, Database]:
    """Return Airflow's and MLflow's database as the last `hermes up` set them.

    Raises `StackError` if there was none.
    """
    config = configparser.ConfigParser()
    try:
        config.read_string(layout.airflow_config.read_text())
        airflow = config["database"]["sql_alchemy_conn"]
        programs = json.loads(layout.programs.read_text())
        mlflow = programs["mlflow"]["environment"]["MLFLOW_BACKEND_STORE_URI"]
    except (OSError, ValueError, KeyError, configparser.Error) as error:
        raise StackError(
            f"{layout.home} has no databases: `hermes up` has never started there. "
            "Name the right folder with --home"
        ) from error
    return Database(AIRFLOW, _resolve_url(airflow, layout)), Database(
        MLFLOW, _resolve_url(mlflow, layout)
    )


def _resolve_url(text: str, layout: Layout) -> URL:
    """Return the address; the path of an SQLite file is taken from the programs' folder."""
    url = make_url(text)
    if url.get_backend_name() != SQLITE:
        return url
    return url.set(database=os.path.normpath(layout.run / (url.database or "")), query={})


def copy_sqlite(source: Path, target: Path) -> None:
    """Copy a database that may be in use, as of one moment; raises `StackError`."""
    try:
        with (
            contextlib.closing(_connect(source, "rw")) as reader,
            contextlib.closing(_connect(target, "rwc")) as writer,
        ):
            reader.backup(writer)
            writer.execute("PRAGMA journal_mode = DELETE")  # one file, without companions
            (verdict,) = writer.execute("PRAGMA quick_check").fetchone()
    except sqlite3.Error as error:
        raise StackError(f"{source} could not be copied to {target}: {error}") from error
    target.chmod(0o600)
    if verdict != "ok":
        raise StackError(
            f"The database {source} is damaged ({verdict}): restore an earlier backup, or repair "
            "it with `sqlite3 FILE .recover`"
        )


def _connect(file: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(f"{file.absolute().as_uri()}?mode={mode}", uri=True, timeout=60.0)


def copy_database(database: Database, folder: Path) -> None:
    """Write the copy of a database into the folder of a backup; raises `StackError`."""
    target = folder / database.copy_name
    if database.kind == SQLITE:
        copy_sqlite(database.file, target)
        return
    options = ["--format=custom", "--no-owner", "--no-privileges", f"--file={target}"]
    _run("pg_dump", options, database)
    target.chmod(0o600)


def load_dump(dump: Path, database: Database) -> None:
    """Put a dump into an empty PostgreSQL database, wholly or not at all; raises `StackError`."""
    options = ["--no-owner", "--no-privileges", "--exit-on-error", "--single-transaction"]
    _run("pg_restore", [*options, str(dump)], database)


def _run(program: str, options: list[str], database: Database) -> None:
    """Run a program of PostgreSQL; it gets the password where others cannot read it."""
    executable = shutil.which(program)
    if executable is None:
        raise StackError(
            f"{program} is not installed: install PostgreSQL's client programs "
            f"({CLIENT_PACKAGE}), of the server's version or a newer one"
        )
    address = database.url.set(drivername="postgresql", password=None)
    environment = {**os.environ, "PGPASSWORD": str(database.url.password or "")}
    done = subprocess.run(
        [executable, f"--dbname={address.render_as_string(hide_password=False)}", *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise StackError(
            f"{program} of {address.render_as_string()} failed: {done.stderr.strip()[-2000:]}"
        )


def refuse_unless_empty(database: Database) -> None:
    """Raise `StackError` if there is something where a database is to be restored."""
    if database.kind == SQLITE:
        if database.file.exists():
            raise StackError(f"{database.file} exists: move it away first; it is not overwritten")
        return
    from sqlalchemy import create_engine, inspect
    from sqlalchemy.exc import SQLAlchemyError

    engine = create_engine(database.url)
    try:
        tables = inspect(engine).get_table_names()
    except SQLAlchemyError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise StackError(
            f"The database for {database.name} cannot be reached ({reason}): correct the address, "
            "or start PostgreSQL and create the database"
        ) from error
    finally:
        engine.dispose()
    if tables:
        raise StackError(
            f"The database {database.url.database} for {database.name} has {len(tables)} tables: "
            f"nothing is overwritten. Give an empty one (`dropdb {database.url.database} && "
            f"createdb {database.url.database}`, once no stack uses it)"
        )


CLEANUP_TIMEOUT_S = 3_600
BACKEND = "MLFLOW_BACKEND_STORE_URI"
RUNS_AT_ONCE = 500

AGED_TABLES = ("log", "job", "import_error", "callback")
"""Airflow's tables that belong to no DAG run and that no sweep needs: they are cleaned by age."""


def collect_garbage(
    environment: Mapping[str, str], folder: Path | None, runs: list[str], models: list[str]
) -> None:
    """Remove deleted runs and models of MLflow for good, with the database of the environment."""
    command = [sys.executable, "-P", "-m", "hermes_ops.tracking.database", "collect-garbage"]
    for start in range(0, max(len(runs), len(models)), RUNS_AT_ONCE):
        end = start + RUNS_AT_ONCE
        request = json.dumps({"runs": runs[start:end], "models": models[start:end]})
        _clean(command, environment, folder, request, "MLflow's trash could not be emptied")


def clean_airflow(environment: Mapping[str, str], folder: Path, before_s: float) -> None:
    """Delete rows of Airflow's log and the like that are older, by `airflow db clean`."""
    before = datetime.fromtimestamp(before_s, UTC).isoformat()
    command = [sys.executable, "-P", "-m", "airflow", "db", "clean", "--yes", "--skip-archive"]
    command += ["--clean-before-timestamp", before, "--tables", ",".join(AGED_TABLES)]
    command.append("--error-on-cleanup-failure")
    _clean(command, environment, folder, "", "`airflow db clean` failed")


def database_environment(layout: Layout) -> dict[str, str]:
    """Return the variables with which both commands reach the databases of a stack."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW_", "MLFLOW_"))}
    _, mlflow = in_use(layout)
    backend = mlflow.url.render_as_string(hide_password=False)
    return {**kept, **client_environment(layout.home), BACKEND: backend}


def _clean(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path | None,
    text: str,
    what: str,
) -> None:
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            env=dict(environment),
            cwd=folder,
            timeout=CLEANUP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StackError(
            f"{what}: it took more than an hour; the next `hermes prune` continues from there"
        ) from error
    if done.returncode:
        last = "\n".join(f"    {line}" for line in (done.stdout + done.stderr).splitlines()[-8:])
        raise StackError(f"{what}; the next `hermes prune` tries it again:\n{last}")

"""The data of a home and the versions of its programs: refuse newer data, migrate older.

A newer program upgrades the tables of both databases. Neither Airflow nor MLflow has a tool that
moves an SQLite database into PostgreSQL: each makes its own tables, in both databases of the same
revision; the rows are then read and written as the types of PostgreSQL's columns say.

A migration has no time limit: that of a large database takes long, and a database whose migration
is killed half way has to be restored from a backup.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from packaging.version import InvalidVersion, Version
from sqlalchemy.engine import URL, Connection

from hermes_ops.errors import StackError
from hermes_ops.stack.airflow_service import database_url
from hermes_ops.stack.databases import AIRFLOW, MLFLOW, Database, sqlite_address
from hermes_ops.stack.health import tail
from hermes_ops.stack.layout import Layout, write_private
from hermes_ops.stack.programs import inherited_variables, mlflow_database_url
from hermes_ops.stack.settings import Settings
from hermes_ops.trial.files import read_json

COMMANDS = {
    AIRFLOW: ("airflow", "db", "migrate"),
    MLFLOW: ("hermes_ops.tracking.database", "upgrade"),
}
"""The modules, with their arguments, that make or upgrade the tables of either."""


def migrate_airflow(settings: Settings, environment: dict[str, str]) -> None:
    """Create or upgrade Airflow's tables; raises `StackError` with the end of the output.

    A SQLite file that this Airflow version has migrated already is left as it is: it belongs to
    this home alone, and the command would take longer than the start of everything else.
    """
    marker = settings.layout.airflow / "migrated.json"
    wanted = _done("airflow", "apache-airflow", database_url(settings))
    file = settings.layout.airflow / "airflow.db"
    private = settings.airflow_db is None and file.exists()
    if private and marker.exists() and marker.read_text() == wanted:
        return
    _run(settings, AIRFLOW, environment)
    write_private(marker, wanted)


def upgrade_mlflow(settings: Settings, environment: dict[str, str]) -> None:
    """Make or upgrade MLflow's tables; raises `StackError` with the end of the output.

    The server itself refuses a database of an earlier version. A new SQLite file is left to the
    server, which makes it faster than two processes would.
    """
    layout = settings.layout
    marker, url = layout.mlflow / "upgraded.json", mlflow_database_url(settings)
    wanted = _done("mlflow", "mlflow", url)
    is_new = settings.mlflow_db is None and not (layout.mlflow / "mlflow.db").exists()
    if not is_new and not (marker.exists() and marker.read_text() == wanted):
        _run(settings, MLFLOW, {**environment, "MLFLOW_BACKEND_STORE_URI": url})
    write_private(marker, wanted)


def _done(name: str, distribution: str, url: str) -> str:
    """Return the content of a finished migration's marker; of the address only its digest."""
    digest = hashlib.sha256(url.encode()).hexdigest()
    return json.dumps({name: importlib.metadata.version(distribution), "db": digest})


def _run(settings: Settings, name: str, environment: dict[str, str]) -> None:
    log = settings.layout.log("migrate" if name == AIRFLOW else "mlflow-upgrade")
    with log.open("w") as output:
        status = subprocess.run(
            [sys.executable, "-P", "-m", *COMMANDS[name]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=settings.layout.run,
            check=False,
        ).returncode
    if status:
        last = "\n".join(f"    {line}" for line in tail(log))
        whose = "Airflow" if name == AIRFLOW else "MLflow"
        raise StackError(f"{whose}'s database could not be prepared. The end of {log}:\n{last}")


PACKAGES = ("hermes-ops", "apache-airflow", "mlflow")
"""Packages whose versions decide about the data: records, folders and both databases' tables."""


def installed_versions() -> dict[str, str]:
    """Return the versions of this installation."""
    return {package: importlib.metadata.version(package) for package in PACKAGES}


def recorded_versions(layout: Layout) -> dict[str, str]:
    """Return the versions that the home was last run with; empty if it has no record."""
    return {k: str(v) for k, v in (read_json(layout.versions) or {}).items()}


def record_versions(layout: Layout) -> None:
    """Write this installation's versions into the home."""
    write_private(layout.versions, json.dumps(installed_versions(), indent=2) + "\n")


def refuse_newer(versions: Mapping[str, str], owner: str) -> None:
    """Raise `StackError` if `owner` was written by a newer version than this installation's.

    Databases are upgraded at a start and cannot be downgraded.
    """
    installed = installed_versions()
    newer = [
        f"{package} {version} (installed here: {installed[package]})"
        for package, version in versions.items()
        if package in installed and _is_newer(version, installed[package])
    ]
    if newer:
        raise StackError(
            f"{owner} was last run with {', '.join(newer)}, and an older version cannot open its "
            "data: install that version again, or restore a backup from before the upgrade"
        )


def _is_newer(version: str, than: str) -> bool:
    try:
        return Version(version) > Version(than)
    except InvalidVersion:
        return False


ROWS = 1_000


def to_postgresql(source: Path, target: Database) -> None:
    """Fill an empty PostgreSQL database with the rows of the SQLite file; raises `StackError`.

    The tables of the file, which is a copy, are upgraded to this installation's first.
    """
    origin = sqlite_address(source)
    for url in (origin, target.url):
        prepare(target.name, url, source.parent)
    reader, writer = sa.create_engine(origin), sa.create_engine(target.url)
    try:
        with reader.connect() as old, writer.begin() as new:
            copy_rows(old, new, target.name)
    except sa.exc.SQLAlchemyError as error:
        reason = str(error.__cause__ or error).strip()[:1000]
        raise StackError(
            f"{target.name}'s rows could not be moved to PostgreSQL: {reason}. Recreate the "
            "database (`dropdb`, `createdb`) before you try again, and report this"
        ) from error
    finally:
        reader.dispose()
        writer.dispose()


def prepare(name: str, url: URL, folder: Path) -> None:
    """Have Airflow or MLflow make or upgrade its tables; raises `StackError`.

    The address is in the environment: on a command line others could read its password. Airflow's
    own files go into `folder`.
    """
    address = url.render_as_string(hide_password=False)
    airflow_variables = {
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": address,
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    }
    variables = airflow_variables if name == AIRFLOW else {"MLFLOW_BACKEND_STORE_URI": address}
    done = subprocess.run(
        [sys.executable, "-P", "-m", *COMMANDS[name]],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**inherited_variables(()), "AIRFLOW_HOME": str(folder), **variables},
        check=False,
    )
    if done.returncode:
        output = (done.stderr or done.stdout).strip()[-2000:]
        raise StackError(f"{name}'s tables in {url.render_as_string()} could not be made: {output}")


def copy_rows(old: Connection, new: Connection, name: str) -> None:
    """Copy the rows of all tables; parents come before children. StackError on other tables."""
    tables = sa.MetaData()
    tables.reflect(new)
    _same_revision(old, new, name)
    filled = [t for t in tables.sorted_tables if not t.name.startswith("alembic_version")]
    for table in reversed(filled):  # of rows that the programs make themselves
        new.execute(table.delete())
    for table in filled:
        _copy_table(old, new, table)
        _continue_sequence(new, table)


def _same_revision(old: Connection, new: Connection, name: str) -> None:
    query = sa.text("SELECT version_num FROM alembic_version")
    here, there = (set(c.execute(query).scalars()) for c in (old, new))
    if here != there:
        raise StackError(
            f"{name}'s tables are of revision {here} in SQLite and {there} in PostgreSQL: restore "
            "into SQLite and run `hermes up` once, then make a new backup"
        )


def _copy_table(old: Connection, new: Connection, table: sa.Table) -> None:
    source_columns = {column["name"] for column in sa.inspect(old).get_columns(table.name)}
    columns = [c for c in table.columns if c.name in source_columns and c.computed is None]
    if not columns:
        return
    source = sa.table(table.name, *(sa.column(c.name, _read_type(c.type)) for c in columns))
    target = sa.table(table.name, *(sa.column(c.name, _write_type(c.type)) for c in columns))
    result = old.execution_options(yield_per=ROWS).execute(sa.select(source))
    for rows in result.partitions(ROWS):
        new.execute(sa.insert(target), [_converted_row(row._mapping, columns) for row in rows])


def _converted_row(values: Any, columns: list[Any]) -> dict[str, Any]:  # noqa: ANN401 - any row
    return {c.name: _value(values[c.name], c.type) for c in columns}


def _value(value: Any, kind: Any) -> Any:  # noqa: ANN401 - any value of a database
    if isinstance(value, datetime) and getattr(kind, "timezone", False) and value.tzinfo is None:
        return value.replace(tzinfo=UTC)  # SQLite keeps UTC without saying so
    return value


def _read_type(kind: Any) -> Any:  # noqa: ANN401 - reflected types are dialects' own
    """Return the type as which SQLite's value is to be read; as it is for all others."""
    generic = type(kind.as_generic(allow_nulltype=True))
    return generic() if generic in _CONVERTED else sa.types.NullType()


def _write_type(kind: Any) -> Any:  # noqa: ANN401 - reflected types are dialects' own
    """Return the type as which a value is written: JSON as the text that SQLite has, or NULL."""
    return sa.Text() if isinstance(kind, sa.JSON) else kind


_CONVERTED = (sa.Uuid, sa.Boolean, sa.DateTime, sa.Interval, sa.LargeBinary)


def _continue_sequence(new: Connection, table: sa.Table) -> None:
    """Set a table's sequence to the greatest number that was copied."""
    for column in table.primary_key:
        if not isinstance(column.type, sa.Integer):
            continue
        quoted = new.dialect.identifier_preparer.quote(table.name)
        sequence = new.execute(
            sa.text("SELECT pg_get_serial_sequence(:t, :c)"), {"t": quoted, "c": column.name}
        ).scalar()
        greatest = new.execute(sa.select(sa.func.max(column))).scalar()
        if sequence and greatest is not None:
            new.execute(sa.text("SELECT setval(:s, :v)"), {"s": sequence, "v": greatest})

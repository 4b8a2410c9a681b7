"""The controller's role in Airflow's PostgreSQL: it reads seven tables and re-ranks, no more.

    python -m hermes_ops.airflow.grants give ROLE    # as the owner of Airflow's tables
    python -m hermes_ops.airflow.grants await        # as the role: ends once it may work

Both use the database of Airflow's own configuration. The advisory locks that the controller takes
(the scheduler's critical section, its own leadership) need no privilege in PostgreSQL.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hermes_ops.airflow.dag_teams import TEAM_TABLES
from hermes_ops.airflow.metadata import RANKED_COLUMNS, REQUIRED_COLUMNS
from hermes_ops.errors import HermesError, Unavailable

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

READ_TABLES = tuple(sorted({*REQUIRED_COLUMNS, *TEAM_TABLES}))

WAIT_S = 600.0
PERIOD_S = 2.0


def statements(role: str) -> tuple[str, ...]:
    """Return the SQL that gives `role` exactly the rights that the controller needs."""
    name = '"' + role.replace('"', '""') + '"'
    tables = ", ".join(READ_TABLES)
    return (
        f"REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {name}",
        f"GRANT USAGE ON SCHEMA public TO {name}",
        f"GRANT SELECT ON {tables} TO {name}",
        f"GRANT UPDATE ({', '.join(RANKED_COLUMNS)}) ON task_instance TO {name}",
    )


def give(engine: Engine, role: str) -> None:
    """Grant in one transaction; HermesError where there is no such role or no such table."""
    from sqlalchemy import exc, text

    try:
        with engine.begin() as connection:
            for statement in statements(role):
                connection.execute(text(statement))
    except exc.OperationalError as error:
        raise Unavailable(f"Airflow's database did not answer: {error}") from error
    except exc.ProgrammingError as error:
        raise HermesError(
            f"The role {role} was not granted its rights ({error.orig}): create the role first, "
            "run `airflow db migrate`, and grant as the owner of Airflow's tables."
        ) from error


def is_ready(engine: Engine) -> bool:
    """Return whether the engine's role has all rights that the controller needs."""
    from sqlalchemy import exc, text

    wanted = [("SELECT", table, "") for table in READ_TABLES]
    wanted += [("UPDATE", "task_instance", column) for column in RANKED_COLUMNS]
    try:
        with engine.connect() as connection:
            return all(
                connection.execute(
                    text(
                        "SELECT has_column_privilege(:table, :column, :right)"
                        if column
                        else "SELECT has_table_privilege(:table, :right)"
                    ),
                    {"table": table, "right": right, **({"column": column} if column else {})},
                ).scalar()
                for right, table, column in wanted
            )
    except (exc.OperationalError, exc.ProgrammingError):  # away, or not migrated yet
        return False


def wait(ready: Callable[[], bool], clock: Callable[[], float], pause: Callable[[], None]) -> bool:
    """Wait until `ready`; return False after `WAIT_S`."""
    until_s = clock() + WAIT_S
    while not ready():
        if clock() >= until_s:
            return False
        pause()
    return True


def _engine() -> Engine:
    from airflow.configuration import conf
    from sqlalchemy import create_engine

    url = conf.get("database", "sql_alchemy_conn")
    if not url.startswith("postgresql"):
        raise HermesError("Only PostgreSQL has roles: with SQLite there is nothing to grant.")
    return create_engine(url, pool_pre_ping=True)


def main(arguments: list[str] | None = None) -> int:
    """Grant the rights, or wait for them; return 0 when they are granted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["give", "await"])
    parser.add_argument("role", nargs="?", default="")
    options = parser.parse_args(arguments)
    if options.what == "give" and not options.role:
        parser.error("give: name the role")
    try:
        engine = _engine()
        if options.what == "give":
            give(engine, options.role)
            return 0
    except HermesError as error:
        print(error, file=sys.stderr)  # noqa: T201 - this is the command's own message
        return 2
    if wait(lambda: is_ready(engine), time.monotonic, lambda: time.sleep(PERIOD_S)):
        return 0
    print("The controller's role has no rights in Airflow's database yet", file=sys.stderr)  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main())

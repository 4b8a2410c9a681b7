"""A throw-away PostgreSQL server on loopback, for benchmarks and for integration tests."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from bench.measure import NotMeasuredError, await_, child
from hermes_ops.stack.preflight import free_port


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A running server."""

    port: int
    password: str

    def url(self, database: str) -> str:
        """Create a database and return its URL."""
        import psycopg2

        with contextlib.closing(psycopg2.connect(self.address("postgres"))) as connection:
            connection.autocommit = True
            connection.cursor().execute(f'CREATE DATABASE "{database}"')
        return self.address(database)

    def answers(self) -> bool:
        """Return whether it accepts connections."""
        import psycopg2

        try:
            psycopg2.connect(self.address("postgres")).close()
        except psycopg2.OperationalError:
            return False
        return True

    def address(self, database: str) -> str:
        """Return the URL of a database, which may not exist yet."""
        password = quote(self.password, safe="")
        return f"postgresql://hermes:{password}@127.0.0.1:{self.port}/{database}"


@contextlib.contextmanager
def server(password: str = "", *, durable: bool = True) -> Iterator[PostgresServer]:
    """Start a server, and stop and remove it at the end. Raise NotMeasuredError without PostgreSQL.

    The password is random unless it is given. `durable`: as PostgreSQL is by default; else it
    spares the disk.
    """
    programs = _programs()
    # PostgreSQL refuses to run as root.
    user = "postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
    with tempfile.TemporaryDirectory(prefix="hermes-bench-pg-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        found = PostgresServer(free_port(), password or os.urandom(8).hex())
        (place / "password").write_text(found.password)
        for path in (place, place / "password"):
            shutil.chown(path, user)
        _initialise(programs, place, user, durable)
        command = _as(user, programs / "postgres", "-D", place / "data", "-p", found.port)
        options = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(place),
            "max_connections": "200",
            "fsync": "on" if durable else "off",
        }
        flags = [part for key, value in options.items() for part in ("-c", f"{key}={value}")]
        with child([*command, *flags], dict(os.environ), cwd=place):
            await_(found.answers, 60.0, "PostgreSQL answers", 0.1)
            yield found


def _initialise(programs: Path, place: Path, user: str, durable: bool) -> None:
    options = ["-U", "hermes", "--encoding=UTF8", "--locale=C", "--auth=scram-sha-256"]
    options += [] if durable else ["--no-sync"]
    command = [programs / "initdb", "-D", place / "data", *options]
    subprocess.run(
        [str(part) for part in _as(user, *command, f"--pwfile={place / 'password'}")],
        cwd=place,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _as(user: str, *command: object) -> list[object]:
    """Return the command as that user, without a process in between that would catch signals."""
    if os.getuid() != 0:
        return list(command)
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command]


def _programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if on_path := shutil.which("postgres"):
        found.append(Path(on_path).resolve())
    if not found:
        raise NotMeasuredError("PostgreSQL's server programs are not installed: install them")
    return found[-1].parent

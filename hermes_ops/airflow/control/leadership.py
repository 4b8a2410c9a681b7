"""The lock by which one controller leads a pool."""

from __future__ import annotations

import fcntl
import logging
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from hermes_ops.airflow.folders import home

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

log = logging.getLogger("hermes.controller")


@dataclass(slots=True)
class Leadership:
    """The lock of one pool: PostgreSQL's session advisory lock, or file locks with SQLite.

    These are one beside the database, whatever the state folder is, and one in the state folder.
    It goes with the process, however that ends.
    """

    engine: Engine
    pool: str
    _connection: Connection | None = None
    _files: list[IO[str]] = field(default_factory=list)

    def acquire(self, pause: Callable[[], bool]) -> bool:
        """Wait until this process leads; `pause` waits a little and says False to give up."""
        is_told = False
        while not self._try():
            if not is_told:
                log.warning("%s", self._why_waiting())
            is_told = True
            if not pause():
                return False
        return True

    def holds(self) -> bool:
        """Return whether the lock is certainly ours (a lost database connection loses it)."""
        if self._files:
            return True
        from sqlalchemy import exc, text

        if self._connection is None:
            return False
        try:
            self._connection.execute(text("SELECT 1"))
            self._connection.commit()
        except exc.SQLAlchemyError:
            return False
        return True

    def _try(self) -> bool:
        if self.engine.dialect.name == "postgresql":
            return self._try_postgresql()
        for path in self._paths():
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a")
            self._files.append(file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.release()
                return False
            file.truncate(0)
            file.write(f"{os.getpid()} {home()}")
            file.flush()
        return True

    def release(self) -> None:
        """Let go of the file locks."""
        while self._files:
            self._files.pop().close()

    def _paths(self) -> list[Path]:
        name = f"controller-{self.pool}.lock"
        database = self.engine.url.database
        if database in (None, "", ":memory:"):
            return [home() / name]
        path = Path(str(database)).resolve()
        return [path.with_name(f"{path.name}.{name}"), home() / name]

    def _why_waiting(self) -> str:
        """Return which controller leads, as far as its lock says so."""
        waits = f"Another controller leads the pool {self.pool}; this one waits until it has ended"
        if self.engine.dialect.name == "postgresql":
            return waits
        with suppress(OSError):
            process, _, folder = self._paths()[0].read_text().partition(" ")
            waits += f": process {process}, state folder {folder}" if folder else ""
            if folder and folder != str(home()):
                waits += f". This one has {home()}: stop the one whose folder is not the workers'"
        return waits

    def _try_postgresql(self) -> bool:
        from sqlalchemy import exc, text

        key = zlib.crc32(f"hermes-controller/{self.pool}".encode())
        query = text("SELECT pg_try_advisory_lock(:key)")
        try:
            connection = self._connection or self.engine.connect()
            led = connection.execute(query, {"key": key}).scalar()
            connection.commit()
        except exc.OperationalError:  # the database is away: wait for it with a new connection
            self._connection = None
            return False
        self._connection = connection
        return bool(led)

"""One active controller a pool: the leader holds a lock of the database, a second one waits."""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from hermes_ops.airflow.folders import home

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine


@dataclass(slots=True)
class Leadership:
    """The lock of one pool: PostgreSQL's session advisory lock, or a file lock beside SQLite.

    It goes with the process, however that ends.
    """

    engine: Engine
    pool: str
    _connection: Connection | None = None
    _file: IO[str] | None = None

    def acquire(self, pause: Callable[[], bool]) -> bool:
        """Wait until this process leads; `pause` waits a little and says False to give up."""
        while not self._try():
            if not pause():
                return False
        return True

    def holds(self) -> bool:
        """True while the lock is certainly ours (a lost database connection loses it)."""
        if self._file is not None:
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
        path = home() / f"controller-{self.pool}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file
        return True

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

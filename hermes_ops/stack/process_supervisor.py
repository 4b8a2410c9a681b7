"""supervisord as a stack runs it: `python -m hermes_ops.stack.process_supervisor -c FILE`.

Two things of supervisord end it, or cut a program off from its output, when the disk is full: the
handlers of its log files raise while they report that they could not write, and so does its
standard error. Both are replaced here before it starts. Output that cannot be written is dropped
and counted; the log says how much once it can be written again.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

from supervisor import loggers, supervisord

RAW = "%(message)s"


class LogFile:
    """A handler of supervisord: a rotated log file whose failures are swallowed.

    It replaces `supervisor.loggers.RotatingFileHandler`, with the same methods and constructor.
    """

    def __init__(self, filename: str, _mode: str, limit_bytes: int, backups: int) -> None:
        self.level: int = loggers.LevelsByName.INFO
        self._format = RAW
        self._path = filename
        self._limit_bytes = limit_bytes
        self._backups = backups
        self._lost_bytes = 0
        self._descriptor: int | None = None
        self._open_if_possible()

    def setFormat(self, fmt: str) -> None:  # noqa: N802 - supervisor's name
        """Set how a record becomes text."""
        self._format = fmt

    def setLevel(self, level: int) -> None:  # noqa: N802 - supervisor's name
        """Set the lowest level that is logged."""
        self.level = level

    def emit(self, record: Any) -> None:  # noqa: ANN401 - supervisor has no types
        """Write a record, after a line on what was lost before it; drop it if that fails."""
        data = self._bytes(record)
        try:
            self._write(self._lost_line())
            self._lost_bytes = 0
            self._write(data)
            self._rotate()
        except OSError:
            self._lost_bytes += len(data)
            self.close()

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def close(self) -> None:
        """Close the file; the next record opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def reopen(self) -> None:
        """Reopen the file after it was moved away."""
        self.close()
        self._open_if_possible()

    def remove(self) -> None:
        """Close and remove the file."""
        self.close()
        with contextlib.suppress(OSError):
            os.remove(self._path)

    def _bytes(self, record: Any) -> bytes:  # noqa: ANN401 - supervisor has no types
        if self._format == RAW and isinstance(record.msg, bytes):
            return record.msg
        return str(self._format % record.asdict()).encode("utf-8", "replace")

    def _lost_line(self) -> bytes:
        if not self._lost_bytes:
            return b""
        return f"\n({self._lost_bytes} bytes of output could not be written here)\n".encode()

    def _write(self, data: bytes) -> None:
        descriptor = self._open()
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]

    def _open(self) -> int:
        if self._descriptor is not None and not os.fstat(self._descriptor).st_nlink:
            self.close()  # somebody has removed it to gain space
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o644)
        return self._descriptor

    def _open_if_possible(self) -> None:
        with contextlib.suppress(OSError):
            self._open()

    def _rotate(self) -> None:
        if not self._limit_bytes or os.fstat(self._open()).st_size < self._limit_bytes:
            return
        self.close()
        for number in range(self._backups, 0, -1):
            before = f"{self._path}.{number - 1}" if number > 1 else self._path
            with contextlib.suppress(FileNotFoundError):
                os.replace(before, f"{self._path}.{number}")


class UnfailingOutput(io.RawIOBase):
    """Standard output or error: what cannot be written is dropped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer
        """Write what can be written; return the length of it all."""
        left = memoryview(data)
        with contextlib.suppress(OSError):
            while left:
                left = left[os.write(self._descriptor, left) :]
        return len(data)


def _unfailing_stream(descriptor: int) -> io.TextIOWrapper:
    output: Any = UnfailingOutput(descriptor)
    return io.TextIOWrapper(output, "utf-8", "replace", write_through=True)


def main() -> None:
    """Run supervisord with the arguments of this process."""
    sys.stdout, sys.stderr = _unfailing_stream(1), _unfailing_stream(2)
    loggers.RotatingFileHandler = LogFile
    supervisord.main()


if __name__ == "__main__":
    main()

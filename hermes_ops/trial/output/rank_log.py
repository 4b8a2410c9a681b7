"""The output of the workers of a trial other than the first: into a file, never for metrics."""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path
from typing import Protocol

from hermes_ops.trial.files import replace_file
from hermes_ops.trial.output.line_reader import LineReader
from hermes_ops.trial.redaction import Mask

LIMIT_BYTES = 1_048_576
_BLOCK_BYTES = 65_536
_PIPE_BYTES = 1_048_576  # the most that a pipe holds, for an ordinary user


class WorkerLog(Protocol):
    """The output of one worker."""

    @property
    def source(self) -> int | None:
        """Return the handle to read from; None where nothing more comes."""

    def read(self) -> None:
        """Take in what has come; call it when `source` is readable."""

    def drain(self) -> None:
        """Take in what is in the pipe now."""

    @property
    def tail(self) -> list[str]:
        """The last lines, without secrets and control characters."""


class BoundedFile:
    """A file that is appended to and keeps its end: at most `limit_bytes`, at least half of them.

    What a full disk does not take is lost.
    """

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path = path
        self._limit_bytes = limit_bytes

    def append(self, data: bytes) -> None:
        """Add data at the end; drop the first half when there is no room."""
        with contextlib.suppress(OSError):
            self._append(data[-self._limit_bytes :])

    def _append(self, data: bytes) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(self._path, flags, 0o644)
        try:
            size = os.fstat(handle).st_size
            if size + len(data) <= self._limit_bytes:
                os.write(handle, data)
                return
            kept = max(0, self._limit_bytes // 2 - len(data))
            rest = os.pread(handle, kept, max(0, size - kept))
        finally:
            os.close(handle)
        replace_file(self._path, rest + data)


class RankLog:
    """Take one worker's output in, secrets masked: the file, and the last lines."""

    def __init__(self, source: int, path: Path, mask: Mask | None = None) -> None:
        mask = mask or Mask()
        self.source: int | None = source  # None once nothing more comes
        self._file = BoundedFile(path)
        self._masked = mask.stream()
        self._lines = LineReader(mask)

    def read(self) -> None:
        """Take in what has come; call it when `source` is readable."""
        if self.source is None:
            return
        data = os.read(self.source, _BLOCK_BYTES)
        if data:
            self._lines.feed(data)
            self._file.append(self._masked.feed(data))
            return
        os.close(self.source)
        self.source = None
        self._lines.close()
        self._file.append(self._masked.close())

    def drain(self) -> None:
        """Take in what is in the pipe now."""
        for _ in range(_PIPE_BYTES // _BLOCK_BYTES):
            if self.source is None or not select.select([self.source], [], [], 0)[0]:
                return
            self.read()

    def say(self, line: str) -> None:
        """Add a line of our own."""
        self._file.append(f"hermes-trial: {line}\n".encode())

    @property
    def tail(self) -> list[str]:
        """The last lines, without secrets and control characters."""
        return self._lines.tail

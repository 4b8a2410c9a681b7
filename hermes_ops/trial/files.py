"""The trial's folder: where each file lies, and how to write one that no crash can tear."""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Folder(NamedTuple):
    """The paths inside one trial's folder."""

    root: Path

    @property
    def lock(self) -> Path:
        """Locked by the one supervisor of this trial."""
        return self.root / "lock"

    @property
    def epoch(self) -> Path:
        """The highest lease epoch that was ever accepted."""
        return self.root / "epoch"

    @property
    def checkpoints(self) -> Path:
        """What the script sees as $HERMES_CHECKPOINT_DIR."""
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        """Every value that was reported: one JSON line each."""
        return self.root / "metrics.jsonl"

    @property
    def status(self) -> Path:
        """What the trial is doing now."""
        return self.root / "status.json"

    @property
    def segments(self) -> Path:
        """The stretches of training: a line at each start and each end."""
        return self.root / "segments.jsonl"

    @property
    def events(self) -> Path:
        """What the hook inside the script tells its supervisor."""
        return self.root / "events.jsonl"

    @property
    def logged_values(self) -> Path:
        """What the script has logged to MLflow that is for the trial's curve."""
        return self.root / "mlflow.jsonl"

    @property
    def result(self) -> Path:
        """How the last segment ended; absent while one runs."""
        return self.root / "result.json"

    @property
    def reserve(self) -> Path:
        """A few KiB given back when the disk is full, so that the result can still be written."""
        return self.root / ".reserve"

    @property
    def model(self) -> Path:
        """The best model of the trial."""
        return self.root / "model"


def write_json(path: Path, document: object, durable: bool = False) -> None:
    """Replace `path` in one step; `durable` also flushes it to the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as stream:
            json.dump(document, stream, allow_nan=False)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in `path`; None if there is none or it is not readable."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def append_lines(path: Path, documents: Iterable[dict[str, Any]]) -> None:
    """Append each document as one whole line, after dropping a line that a crash has torn."""
    data = "".join(json.dumps(d, allow_nan=False) + "\n" for d in documents).encode()
    if not data:
        return
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        end = drop_torn_line(handle)
        written = os.write(handle, data)
        if written != len(data):  # the disk is full: leave no half line behind
            os.ftruncate(handle, end)
            raise OSError(28, "No space left on device", str(path))
    finally:
        os.close(handle)


def drop_torn_line(handle: int) -> int:
    """Cut an unfinished last line off and return the file's length; the caller holds its lock."""
    end = os.fstat(handle).st_size
    keep = end
    while keep > 0:
        start = max(0, keep - 4096)
        block = os.pread(handle, keep - start, start)
        newline = block.rfind(b"\n")
        if newline >= 0:
            keep = start + newline + 1
            break
        keep = start
    if keep != end:
        os.ftruncate(handle, keep)
    return keep


class Follower:
    """Reads a growing file of JSON lines from where it stopped; an unfinished line waits."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of the whole lines that have come since the last call."""
        try:
            if os.stat(self.path).st_size <= self.offset:
                return
            with open(self.path, "rb") as stream:
                stream.seek(self.offset)
                while (line := stream.readline()).endswith(b"\n"):
                    self.offset += len(line)
                    document = _parse(line)
                    if document is not None:
                        yield document
        except OSError:
            return

    def skip(self) -> None:
        """Take what is there now as read."""
        for _ in self.new():
            pass


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(line)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def encode_value(value: float) -> float | str:
    """A number as JSON can hold it: NaN and the infinities become words."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def decode_value(value: object) -> float:
    """The inverse of `encode_value`; ValueError for anything else."""
    if isinstance(value, str):
        if value not in _WORDS:
            raise ValueError(f"not a metric value: {value!r}")
        return _WORDS[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"not a metric value: {value!r}")
    return float(value)


def now_ms() -> int:
    """Unix time in milliseconds."""
    return int(time.time() * 1000)

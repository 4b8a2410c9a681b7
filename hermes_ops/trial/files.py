"""The trial's folder: where each file lies, and how to write one that no crash can tear.

Its notices and its random seeds are small files that all its segments share.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class PathBelow:
    """A path below a folder, as an attribute of that folder's class.

    `attribute`: the one of the class that has the folder.
    """

    def __init__(self, name: str, attribute: str = "root") -> None:
        self._name = name
        self._attribute = attribute

    def __get__(self, owner: object, _: type | None = None) -> Path:
        """Return the path for an instance of the class."""
        return Path(getattr(owner, self._attribute), self._name)


class Folder:
    """The paths inside one trial's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    lock = PathBelow("lock")
    """Locked by the one supervisor of this trial."""
    epoch = PathBelow("epoch")
    """The highest lease epoch that was ever accepted."""
    checkpoints = PathBelow("checkpoints")
    """The folder that the script knows as $HERMES_CHECKPOINT_DIR."""
    metrics = PathBelow("metrics.jsonl")
    """Every value that was reported: one JSON line each."""
    status = PathBelow("status.json")
    """The file with the current status of the trial."""
    segments = PathBelow("segments.jsonl")
    """The stretches of training: a line at each start and each end."""
    events = PathBelow("events.jsonl")
    """The file of events that the hook in the script sends to its supervisor."""
    logged_values = PathBelow("mlflow.jsonl")
    """The file of MLflow values that the script logged for the trial's curve."""
    result = PathBelow("result.json")
    """The file with the outcome of the last segment; absent while one runs."""
    reserve = PathBelow(".reserve")
    """A few KiB in which the result is written when the disk is full."""
    group = PathBelow("group")
    """The folder that the workers of a segment share: $HERMES_GROUP_DIR."""

    def rank_log(self, rank: int) -> Path:
        """Return the file with the output of a worker other than the first."""
        return self.root / f"rank-{rank}.log"

    model = PathBelow("model")
    """The best model of the trial."""


def write_json(path: Path, document: object, durable: bool = False) -> None:
    """Replace `path` in one step; `durable` also flushes it to the disk."""
    replace_file(path, json.dumps(document, allow_nan=False).encode(), durable)


def replace_file(path: Path, data: bytes, durable: bool = False, mode: int = 0o666) -> None:
    """Replace a file by `data` atomically; on an error its old content stays.

    An OSError names that file, not the temporary one.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            stream.write(data)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in `path`; None if there is none or it is not readable, as a pipe is."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            return parse_object(stream.read())
    except (OSError, ValueError):
        return None


def parse_object(text: bytes | str) -> dict[str, Any] | None:
    """Return the JSON object that a text is; None for any other text, one nested too deeply too."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
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
    """Read a growing file of JSON lines from where it stopped; an unfinished line waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of the whole lines that have come since the last call."""
        try:
            if os.stat(self.path).st_size <= self.offset:
                return
            with open(self.path, "rb") as stream:
                stream.seek(self.offset)
                while (line := stream.readline()).endswith(b"\n"):
                    self.offset += len(line)
                    document = parse_object(line)
                    if document is not None:
                        yield document
        except OSError:
            return

    def skip(self) -> None:
        """Take what is there now as read."""
        for _ in self.new():
            pass


def encode_value(value: float) -> float | str:
    """Return a number as JSON can hold it: NaN and the infinities become words."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def decode_value(value: object) -> float:
    """Decode what `encode_value` returns; ValueError for anything else."""
    if isinstance(value, str):
        if value not in _WORDS:
            raise ValueError(f"not a metric value: {value!r}")
        return _WORDS[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"not a metric value: {value!r}")
    return float(value)


def now_ms() -> int:
    """Return the Unix time in milliseconds."""
    return int(time.time() * 1000)


_NOTICES = "said.jsonl"
_NOTICE_CHARACTERS = 500  # characters of a text that are compared


def is_first_time(folder: Path, text: str) -> bool:
    """Tell whether the trial has not printed this notice yet, and record it.

    If the folder cannot be written, the text is printed again.
    """
    path, key = folder / _NOTICES, text[:_NOTICE_CHARACTERS]
    if any(document.get("text") == key for document in Follower(path).new()):
        return False
    with contextlib.suppress(OSError):
        append_lines(path, [{"text": key}])
    return True


_SEEDS = ("python", "numpy", "shuffle")


def trial_seeds(folder: Path | None = None) -> dict[str, int]:
    """Return the seeds, each below 2^31, kept in the trial's folder (default $HERMES_TRIAL_DIR)."""
    path = (folder or Path(os.environ["HERMES_TRIAL_DIR"])) / "entropy.json"
    seeds = read_json(path)
    if seeds is None or set(seeds) != set(_SEEDS):
        seeds = {name: int.from_bytes(os.urandom(4), "little") >> 1 for name in _SEEDS}
        write_json(path, seeds, durable=True)
    return seeds

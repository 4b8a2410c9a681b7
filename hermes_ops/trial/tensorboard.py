"""The metrics that a script writes for TensorBoard, read by the standard library alone.

An event file is a row of TFRecords: the data's length (8 bytes), its checksum (4), the data, their
checksum (4). The data are an `Event` of protocol buffers; only its scalars are decoded.
Source: tensorflow/core/lib/io/record_writer.h, tensorflow/core/util/event.proto,
tensorflow/core/framework/summary.proto and tensor.proto.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Union

from hermes_ops.trial.files import read_json, write_json
from hermes_ops.trial.metrics import Metric

PERIOD_S = 1.0
MOST_NAMES = 1000
MOST_STEPS = 1_000_000
_MARK = "tfevents"
_CLOCKS_S = 60.0  # by which the clock of a shared disk may be behind


class ScalarCurve:
    """Put the scalars of one run of the script on the objective's steps.

    The objective's first value is step 1, and so on; a step of the script that comes again keeps
    its number. Other scalars are stored with the objective: the newest value of each.
    Names are relative to the folder in which the objective was found first.
    """

    def __init__(self, objective: str, numbers: dict[int, int]) -> None:
        self._objective = objective
        self._numbers = numbers  # by the script's step
        self._prefix: str | None = None
        self._step: int | None = None  # the script's, of the objective's last value
        self._held: dict[str, float] = {}

    def add(self, name: str, scalar: Scalar) -> list[Metric]:
        """Return what is to be stored now that a scalar has come; `name` begins with its folder."""
        if self._is_objective(name):
            return self._reached(scalar)
        if scalar.step == self._step:
            return [Metric(self._short(name), scalar.value, self._numbers[scalar.step])]
        if name in self._held or len(self._held) < MOST_NAMES:
            self._held[name] = scalar.value
        return []

    def _is_objective(self, name: str) -> bool:
        if self._prefix is not None:
            return name == self._prefix + self._objective
        if name != self._objective and not name.endswith("/" + self._objective):
            return False
        self._prefix = name[: -len(self._objective)]
        return True

    def _reached(self, scalar: Scalar) -> list[Metric]:
        if scalar.step not in self._numbers:
            if len(self._numbers) >= MOST_STEPS:
                return []
            self._numbers[scalar.step] = len(self._numbers) + 1
        self._step = scalar.step
        held, self._held = self._held, {}
        number = self._numbers[scalar.step]
        others = [Metric(self._short(name), value, number) for name, value in held.items()]
        return [Metric(self._objective, scalar.value, number), *others]

    def _short(self, name: str) -> str:
        prefix = self._prefix or ""
        return name[len(prefix) :] if name.startswith(prefix) else name


class TensorBoardReader:
    """Follow the event files below a folder that the trial's own processes write.

    Trials may share the folder: a file counts if its name ends with this host and the number of a
    process of the trial, as TensorFlow and PyTorch name it, or such a process has it open. The
    files of earlier segments are kept in mind in `memory`, and read again from their beginning.
    """

    def __init__(self, root: Path, objective: str, memory: Path) -> None:
        self._root, self._objective, self._memory = root, objective, memory
        self._host = socket.gethostname()
        self._files: dict[str, EventFile] = {}
        self._curves: dict[int, ScalarCurve] = {}
        self._numbers: dict[int, int] = {}
        self._segments: dict[str, int] = {}  # by path, counted from 1
        for path, segment in (read_json(memory) or {}).items():
            self._follow(str(path), int(segment))
        self._segment = max(self._segments.values(), default=0) + 1
        self._pids: set[int] = set()
        self._look_at_s = 0.0
        self._began_s = time.time()

    def read_new(self, pid: int, final: bool = False) -> list[Metric]:
        """Return the metrics that have come; `pid` is the script. It looks once a second."""
        started_s = time.monotonic()
        if not final and started_s < self._look_at_s:
            return []
        self._find(pid)
        metrics = self._read_all()
        before = -1
        while final and before != (at := sum(file.offset for file in self._files.values())):
            before = at
            metrics += self._read_all()
        spent_s = time.monotonic() - started_s
        self._look_at_s = started_s + max(PERIOD_S, 10.0 * spent_s)
        return metrics

    def _read_all(self) -> list[Metric]:
        return [m for segment in sorted(self._curves) for m in self._read(segment)]

    def _find(self, pid: int) -> None:
        self._pids.update(tree(pid))
        marks = tuple(f".{self._host}.{p}." for p in self._pids)
        below = event_files(self._root, self._began_s - _CLOCKS_S)
        named = (path for path in below if any(m in os.path.basename(path) for m in marks))
        new = {*named, *self._open_files()} - self._files.keys()
        for path in sorted(new):
            self._follow(path, self._segment)
        if new:
            with contextlib.suppress(OSError):  # a full disk must not end the watch
                write_json(self._memory, self._segments)

    def _follow(self, path: str, segment: int) -> None:
        self._files[path] = EventFile(Path(path))
        self._segments[path] = segment
        self._curves.setdefault(segment, ScalarCurve(self._objective, self._numbers))

    def _open_files(self) -> Iterator[str]:
        root = os.path.realpath(self._root) + os.sep
        for pid in self._pids:
            for path in open_files(pid):
                if _MARK in os.path.basename(path) and path.startswith(root):
                    yield path

    def _read(self, segment: int) -> Iterator[Metric]:
        """Yield the new metrics of one segment's files, in the order in which they were written."""
        entries: list[tuple[str, Scalar]] = []
        for path, file in self._files.items():
            if self._segments[path] == segment:
                entries += self._valid(path, file)
        for name, scalar in sorted(entries, key=lambda entry: entry[1].time_s):
            yield from self._curves[segment].add(name, scalar)

    def _valid(self, path: str, file: EventFile) -> list[tuple[str, Scalar]]:
        folder = os.path.relpath(os.path.dirname(path), os.path.realpath(self._root))
        prefix = "" if folder == "." else folder + "/"
        entries: list[tuple[str, Scalar]] = []
        for entry in file.new():
            if isinstance(entry, EventRestart):
                entries = [(name, s) for name, s in entries if s.step < entry.step]
            else:
                entries.append((prefix + entry.tag, entry))
        return entries


def event_files(root: Path, since_s: float) -> Iterator[str]:
    """Yield the real paths of the event files below a folder that were written since then."""
    for parent, _, names in os.walk(os.path.realpath(root)):
        for name in names:
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):
                if _MARK in name and os.stat(path).st_mtime >= since_s:
                    yield path


def tree(pid: int) -> Iterable[int]:
    """Return a process and its live descendants."""
    pids, ahead = [], [pid]
    while ahead:
        parent = ahead.pop()
        pids.append(parent)
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text()
                ahead += [int(child) for child in children.split()]
        except OSError:
            continue
    return pids


def open_files(pid: int) -> Iterator[str]:
    """Yield the paths that a process has open; none if it has gone."""
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            try:
                yield os.readlink(os.path.join(folder, name))
            except OSError:
                continue
    except OSError:
        return


MOST_RECORD_BYTES = 1_048_576  # longer ones hold pictures and graphs; they are passed over
_HEADER, _FOOTER = 12, 4
_START = 1  # of SessionLog.status
_FORMATS = {1: "<f", 2: "<d", 3: "<i", 9: "<q", 19: "<e"}  # by DataType; 14 is bfloat16
_BFLOAT16 = 14
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class Scalar:
    """One value of a tag, at the step that the script gave it; Unix seconds."""

    tag: str
    value: float
    step: int
    time_s: float


@dataclass(frozen=True)
class EventRestart:
    """The script has begun again at a step: what was written of it and of later ones is void."""

    step: int
    time_s: float


EventEntry = Union[Scalar, EventRestart]  # noqa: UP007 - Python 3.9


class EventFile:
    """Follow a growing event file; an unfinished record waits, a damaged one is left out.

    `offset`: the bytes that have been read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offset = 0

    def new(self, most_bytes: int = 4_194_304) -> Iterator[EventEntry]:
        """Yield what has come since the last call, a part of it if that is more than so much.

        Nothing comes of a file that cannot be read.
        """
        limit = self.offset + most_bytes
        try:
            size = self._path.stat().st_size
            if size < self.offset + _HEADER + _FOOTER:
                return
            with open(self._path, "rb") as stream:
                while self.offset < limit:
                    stream.seek(self.offset)
                    length = self._length(stream.read(_HEADER), size)
                    if length is None:
                        return
                    yield from self._record(stream, length)
        except OSError:
            return

    def _record(self, stream: BinaryIO, length: int) -> list[EventEntry]:
        """Return the entries of a record, and advance the offset behind it."""
        end = self.offset + _HEADER + length + _FOOTER
        entries: list[EventEntry] | None = []
        if length <= MOST_RECORD_BYTES:
            entries = _checked(stream.read(length), stream.read(_FOOTER))
        self.offset = end
        return entries or []

    def _length(self, header: bytes, size: int) -> int | None:
        """Return the length of the next record's data; None while the record is incomplete."""
        if len(header) < _HEADER:
            return None
        length, checksum = struct.unpack("<QI", header)
        if checksum != masked_crc(header[:8]):
            return None
        return length if self.offset + _HEADER + length + _FOOTER <= size else None


def _checked(data: bytes, footer: bytes) -> list[EventEntry] | None:
    """Return the entries of a record; None if the record is damaged."""
    try:
        entries = list(_entries(data))
    except (ValueError, IndexError, struct.error):
        return None
    if entries and struct.unpack("<I", footer)[0] != masked_crc(data):
        return None
    return entries


def _entries(data: bytes) -> Iterator[EventEntry]:
    event = list(_fields(data))
    times = [_raw(value) for number, value in event if number == 1]
    time_s = float(struct.unpack("<d", times[-1])[0]) if times else 0.0
    step = next((_signed(value) for number, value in event if number == 2), 0)
    for number, value in event:
        if number == 7 and (1, _START) in _fields(_raw(value)):
            yield EventRestart(step, time_s)
        if number == 5:
            scalars = (_scalar(_raw(v)) for n, v in _fields(_raw(value)) if n == 1)
            yield from (Scalar(tag, scalar, step, time_s) for tag, scalar in filter(None, scalars))


def _scalar(summary: bytes) -> tuple[str, float] | None:
    """Return the tag and value of a Summary.Value; None if that is no scalar."""
    tag, result = "", None
    for number, value in _fields(summary):
        if number == 1:
            tag = _raw(value).decode("utf-8", "replace")
        elif number == 2:
            (result,) = struct.unpack("<f", _raw(value))
        elif number == 8:
            result = _tensor(_raw(value))
    return None if result is None or not tag else (tag, float(result))


def _tensor(data: bytes) -> float | None:
    """Return the number in a tensor without dimensions; None for any other."""
    kind, value = 0, None
    for number, content in _fields(data):
        if number == 1:
            kind = _signed(content)
        elif number == 2 and any(n == 2 for n, _ in _fields(_raw(content))):
            return None
        elif number == 4:
            value = _content(kind, _raw(content))
        elif number in (5, 6):
            (value,) = struct.unpack("<f" if number == 5 else "<d", _raw(content))
        elif number in (7, 10):
            value = float(_signed(content if isinstance(content, int) else _varint(content, 0)[0]))
        elif number == 13:
            bits = content if isinstance(content, int) else _varint(content, 0)[0]
            value = _content(kind, struct.pack("<H", bits))
    return value


def _content(kind: int, data: bytes) -> float | None:
    if kind == _BFLOAT16:
        kind, data = 1, b"\0\0" + data
    if kind not in _FORMATS:
        return None
    return float(struct.unpack(_FORMATS[kind], data)[0])


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the numbers and values of a message's fields; ValueError or IndexError if malformed."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
        if kind == _BYTES:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise ValueError("not a message of protocol buffers")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 64 bits")


def _raw(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("found a number where bytes are expected")
    return value


def _signed(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("found bytes where a number is expected")
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _table() -> list[int]:
    rows = list(range(256))
    for _ in range(8):
        rows = [(row >> 1) ^ (0x82F63B78 if row & 1 else 0) for row in rows]
    return rows


_CRC = _table()


def masked_crc(data: bytes) -> int:
    """Return the checksum of a TFRecord: CRC-32C, rotated by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

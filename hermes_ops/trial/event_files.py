"""Reads the scalars in TensorBoard's event files, with the standard library alone.

A file is a row of TFRecords: the data's length (8 bytes), its checksum (4), the data, their
checksum (4). The data are an `Event` of protocol buffers; only its scalars are decoded.
Source: tensorflow/core/lib/io/record_writer.h, tensorflow/core/util/event.proto,
tensorflow/core/framework/summary.proto and tensor.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Union

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
class Restart:
    """The script has begun again at a step: what was written of it and of later ones is void."""

    step: int
    time_s: float


Entry = Union[Scalar, Restart]  # noqa: UP007 - Python 3.9


class EventFile:
    """Follows a growing event file; an unfinished record waits, a damaged one is left out.

    `offset`: so many bytes have been read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offset = 0

    def new(self, most_bytes: int = 4_194_304) -> Iterator[Entry]:
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

    def _record(self, stream: BinaryIO, length: int) -> list[Entry]:
        """The entries of a record, which then lies behind us."""
        end = self.offset + _HEADER + length + _FOOTER
        found: list[Entry] | None = []
        if length <= MOST_RECORD_BYTES:
            found = _checked(stream.read(length), stream.read(_FOOTER))
        self.offset = end
        return found or []

    def _length(self, header: bytes, size: int) -> int | None:
        """The length of the next record's data; None if it is not there as a whole."""
        if len(header) < _HEADER:
            return None
        length, checksum = struct.unpack("<QI", header)
        if checksum != masked_crc(header[:8]):
            return None
        return length if self.offset + _HEADER + length + _FOOTER <= size else None


def _checked(data: bytes, footer: bytes) -> list[Entry] | None:
    """The entries of a record; None if the record is damaged."""
    try:
        found = list(_entries(data))
    except (ValueError, IndexError, struct.error):
        return None
    if found and struct.unpack("<I", footer)[0] != masked_crc(data):
        return None
    return found


def _entries(data: bytes) -> Iterator[Entry]:
    event = list(_fields(data))
    times = [_raw(value) for number, value in event if number == 1]
    time_s = float(struct.unpack("<d", times[-1])[0]) if times else 0.0
    step = next((_signed(value) for number, value in event if number == 2), 0)
    for number, value in event:
        if number == 7 and (1, _START) in _fields(_raw(value)):
            yield Restart(step, time_s)
        if number == 5:
            found = (_scalar(_raw(v)) for n, v in _fields(_raw(value)) if n == 1)
            yield from (Scalar(tag, scalar, step, time_s) for tag, scalar in filter(None, found))


def _scalar(summary: bytes) -> tuple[str, float] | None:
    """The tag and value of a Summary.Value; None if that is no scalar."""
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
    """The number in a tensor without dimensions; None for any other."""
    kind, value = 0, None
    for number, found in _fields(data):
        if number == 1:
            kind = _signed(found)
        elif number == 2 and any(n == 2 for n, _ in _fields(_raw(found))):
            return None
        elif number == 4:
            value = _content(kind, _raw(found))
        elif number in (5, 6):
            (value,) = struct.unpack("<f" if number == 5 else "<d", _raw(found))
        elif number in (7, 10):
            value = float(_signed(found if isinstance(found, int) else _varint(found, 0)[0]))
        elif number == 13:
            bits = found if isinstance(found, int) else _varint(found, 0)[0]
            value = _content(kind, struct.pack("<H", bits))
    return value


def _content(kind: int, data: bytes) -> float | None:
    if kind == _BFLOAT16:
        kind, data = 1, b"\0\0" + data
    if kind not in _FORMATS:
        return None
    return float(struct.unpack(_FORMATS[kind], data)[0])


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The numbers and values of a message's fields; ValueError or IndexError if it is none."""
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
        raise ValueError("a number in the place of bytes")
    return value


def _signed(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes in the place of a number")
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _table() -> list[int]:
    rows = list(range(256))
    for _ in range(8):
        rows = [(row >> 1) ^ (0x82F63B78 if row & 1 else 0) for row in rows]
    return rows


_CRC = _table()


def masked_crc(data: bytes) -> int:
    """The checksum of a TFRecord: CRC-32C, rotated by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

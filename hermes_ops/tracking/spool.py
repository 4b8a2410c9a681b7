"""The metrics file as a spool: whole lines in order, each (name, step) once, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_ops.confined_folder import NotConfinedError, confined

_BLOCK_BYTES = 1 << 20
_TOO_GREAT = 1 << 63
_MAX_RANGES = 100_000  # of all names, about 10 MB
_MAX_RANGES_OF_NAME = 1_000  # each new step is looked for in all of them


@dataclass(frozen=True, slots=True)
class Line:
    """A metric of the file; `end` is the byte offset behind its line. Unix milliseconds."""

    name: str
    value: float
    step: int
    time_ms: int
    end: int


def read_lines(
    path: Path, start: int, stop: int | None = None
) -> Iterator[tuple[Line | None, int]]:
    """Yield (metric, offset behind it) for each whole line from byte `start` to `stop`.

    The metric is None for a line that is not one (torn by a crash, or damaged). A last line
    without its newline is left for later.
    """
    folder, name = confined(path)
    with folder.open(name) as stream:
        stream.seek(start)
        offset = start
        while stop is None or offset < stop:
            line = stream.readline(_BLOCK_BYTES)
            if not line.endswith(b"\n") and len(line) < _BLOCK_BYTES:
                return
            offset += len(line)
            yield _parsed(line, offset), offset


def _parsed(text: bytes, end: int) -> Line | None:
    try:
        entry = json.loads(text)
        name, step, time_ms = entry["name"], entry["step"], entry["time_ms"]
        line = Line(name, float(entry["value"]), int(step), int(time_ms), end)
        # MLflow does not refuse a number too great for it: it would store step 0.
        is_storable = abs(line.step) < _TOO_GREAT and 0 <= line.time_ms < _TOO_GREAT
        return line if is_storable and isinstance(name, str) else None
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


class Seen:
    """The (name, step) pairs met so far.

    Steps that follow one another at equal distance, the usual case, take one range however many
    they are. Past 1,000 ranges of a name, or 100,000 of all, the oldest are forgotten; a pair met
    again after that is sent again, and MLflow keeps equal points once.
    """

    def __init__(self) -> None:
        self._ranges: dict[str, list[range]] = {}
        self._count = 0

    def add(self, name: str, step: int) -> bool:
        """Note a pair; return False if it was noted before."""
        ranges = self._ranges.setdefault(name, [])
        if any(step in r for r in reversed(ranges)):
            return False
        if ranges and (longer := _extended(ranges[-1], step)) is not None:
            ranges[-1] = longer
            return True
        ranges.append(range(step, step + 1))
        self._count += 1
        if len(ranges) > _MAX_RANGES_OF_NAME:
            del ranges[: _MAX_RANGES_OF_NAME // 2]
            self._count -= _MAX_RANGES_OF_NAME // 2
        if self._count > _MAX_RANGES:
            self._forget()
        return True

    def _forget(self) -> None:
        for name, ranges in list(self._ranges.items()):
            self._ranges[name] = ranges[len(ranges) // 2 :]
        self._count = sum(map(len, self._ranges.values()))
        if self._count > _MAX_RANGES // 2:  # that many names: begin anew
            self._ranges, self._count = {}, 0


def _extended(last: range, step: int) -> range | None:
    """Return `last` with `step` as its next member; None when it does not continue it."""
    if len(last) == 1:
        distance = step - last.start
        return range(last.start, step + 1, distance) if distance > 0 else None
    return range(last.start, step + 1, last.step) if step == last[-1] + last.step else None


def load_offset(path: Path) -> int:
    """Return the offset that `save_offset` stored; 0 when there is none that can be read."""
    try:
        folder, name = confined(path)
        return max(0, int(json.loads(folder.read(name))["offset"]))
    except (OSError, NotConfinedError, ValueError, TypeError, KeyError):
        return 0


def save_offset(path: Path, offset: int) -> None:
    """Store the offset, in the old one's place at once or not at all."""
    state: dict[str, Any] = {"offset": offset}
    folder, name = confined(path)
    folder.replace(name, json.dumps(state).encode())

"""The metrics that a script writes for TensorBoard, as metrics of its trial."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from hermes_ops.trial.event_files import EventFile, Restart, Scalar
from hermes_ops.trial.files import read_json, write_json
from hermes_ops.trial.metrics import Metric

PERIOD_S = 1.0
MOST_NAMES = 1000
MOST_STEPS = 1_000_000
_MARK = "tfevents"
_CLOCKS_S = 60.0  # by which the clock of a shared disk may be behind


class Curve:
    """Puts the scalars of one run of the script on the objective's steps.

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

    def take(self, name: str, scalar: Scalar) -> list[Metric]:
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


class Board:
    """Follows the event files below a folder that the trial's own processes write.

    Trials may share the folder: a file counts if its name ends with this host and the number of a
    process of the trial, as TensorFlow and PyTorch name it, or such a process has it open. The
    files of earlier segments are kept in mind in `memory`, and read again from their beginning.
    """

    def __init__(self, root: Path, objective: str, memory: Path) -> None:
        self._root, self._objective, self._memory = root, objective, memory
        self._host = socket.gethostname()
        self._files: dict[str, EventFile] = {}
        self._curves: dict[int, Curve] = {}
        self._numbers: dict[int, int] = {}
        self._segments: dict[str, int] = {}  # by path, counted from 1
        for path, segment in (read_json(memory) or {}).items():
            self._follow(str(path), int(segment))
        self._segment = max(self._segments.values(), default=0) + 1
        self._pids: set[int] = set()
        self._look_at_s = 0.0
        self._began_s = time.time()

    def look(self, pid: int, final: bool = False) -> list[Metric]:
        """Return the metrics that have come; `pid` is the script. It looks once a second."""
        started_s = time.monotonic()
        if not final and started_s < self._look_at_s:
            return []
        self._find(pid)
        found = self._read_all()
        before = -1
        while final and before != (at := sum(file.offset for file in self._files.values())):
            before = at
            found += self._read_all()
        spent_s = time.monotonic() - started_s
        self._look_at_s = started_s + max(PERIOD_S, 10.0 * spent_s)
        return found

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
        self._curves.setdefault(segment, Curve(self._objective, self._numbers))

    def _open_files(self) -> Iterator[str]:
        root = os.path.realpath(self._root) + os.sep
        for pid in self._pids:
            for path in open_files(pid):
                if _MARK in os.path.basename(path) and path.startswith(root):
                    yield path

    def _read(self, segment: int) -> Iterator[Metric]:
        """The new metrics of one segment's files, in the order in which they were written."""
        entries: list[tuple[str, Scalar]] = []
        for path, file in self._files.items():
            if self._segments[path] == segment:
                entries += self._valid(path, file)
        for name, scalar in sorted(entries, key=lambda entry: entry[1].time_s):
            yield from self._curves[segment].take(name, scalar)

    def _valid(self, path: str, file: EventFile) -> list[tuple[str, Scalar]]:
        folder = os.path.relpath(os.path.dirname(path), os.path.realpath(self._root))
        prefix = "" if folder == "." else folder + "/"
        entries: list[tuple[str, Scalar]] = []
        for entry in file.new():
            if isinstance(entry, Restart):
                entries = [(name, s) for name, s in entries if s.step < entry.step]
            else:
                entries.append((prefix + entry.tag, entry))
        return entries


def event_files(root: Path, since_s: float) -> Iterator[str]:
    """The event files below a folder that were written since then, by their real paths."""
    for parent, _, names in os.walk(os.path.realpath(root)):
        for name in names:
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):
                if _MARK in name and os.stat(path).st_mtime >= since_s:
                    yield path


def tree(pid: int) -> Iterable[int]:
    """A process and its descendants that live."""
    found, ahead = [], [pid]
    while ahead:
        parent = ahead.pop()
        found.append(parent)
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text()
                ahead += [int(child) for child in children.split()]
        except OSError:
            continue
    return found


def open_files(pid: int) -> Iterator[str]:
    """What a process has open; nothing if it has gone."""
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            try:
                yield os.readlink(os.path.join(folder, name))
            except OSError:
                continue
    except OSError:
        return

"""The metrics file: the truth of what a trial has reported; no (name, step) is in it twice."""

from __future__ import annotations

import fcntl
import json
import math
import os
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hermes_ops.trial.files import Follower, decode_value, drop_torn_line, encode_value, now_ms


class Metric(NamedTuple):
    """One reported value; `step` counts completed epochs (or reports): 0 is before the first."""

    name: str
    value: float
    step: int


class MetricsFile:
    """Append to a metrics file that other processes append to as well."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._follower = Follower(path)
        self._seen: dict[str, StepSet] = {}

    def append(self, metrics: Iterable[Metric], others: list[Metric] | None = None) -> list[Metric]:
        """Append what is new, whole lines at once, and return it.

        Lines that other writers have added since the last read are put into `others`, and `refresh`
        does not return them again. The lock on the file makes reading and appending one step.
        """
        handle = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            end = drop_torn_line(handle)
            for metric in self._new():
                if others is not None:
                    others.append(metric)
            fresh = self._unseen(metrics)
            data = "".join(_line(m) for m in fresh).encode()
            if data and os.write(handle, data) != len(data):
                os.ftruncate(handle, end)
                raise OSError(28, "No space left on device", str(self._path))
            for metric in fresh:
                self._note(metric)
            return fresh
        finally:
            os.close(handle)

    def refresh(self) -> list[Metric]:
        """Return what anybody has appended since the last look (this object's own lines too)."""
        return list(self._new())

    def _new(self) -> Iterator[Metric]:
        for document in self._follower.new():
            metric = parse(document)
            if metric is not None:
                self._note(metric)
                yield metric

    def _catch_up(self) -> None:
        for _ in self._new():
            pass

    def last_step(self, secondary: Collection[str] = ()) -> int:
        """Return the highest step of all metrics but the `secondary`; 0 without any."""
        self._catch_up()
        primary = (steps for name, steps in self._seen.items() if name not in secondary)
        return max((steps.highest for steps in primary), default=0)

    def reached(self, name: str) -> int | None:
        """Return the highest step of one metric; None if it is not in the file."""
        self._catch_up()
        steps = self._seen.get(name)
        return None if steps is None else steps.highest

    def progress(self, objective: str | None, secondary: Collection[str] = ()) -> int:
        """Return the highest step of the objective; without one, of all but the `secondary`."""
        return self.last_step(secondary) if objective is None else self.reached(objective) or 0

    def highest(self, name: str | None) -> int:
        """Return the highest step of a metric in the file, as last read; 0 without any."""
        steps = self._seen.get(name or "")
        return steps.highest if steps is not None else 0

    def names(self) -> set[str]:
        """Return the names of the metrics in the file."""
        self._catch_up()
        return set(self._seen)

    def _note(self, metric: Metric) -> None:
        self._seen.setdefault(metric.name, StepSet()).add(metric.step)

    def _unseen(self, metrics: Iterable[Metric]) -> list[Metric]:
        fresh: dict[tuple[str, int], Metric] = {}
        for metric in metrics:
            if metric.step not in self._seen.get(metric.name, ()):
                fresh.setdefault((metric.name, metric.step), metric)
        return list(fresh.values())


def parse(document: dict[str, object]) -> Metric | None:
    """Return the metric in one line of the file; None if the line is not one."""
    name, step = document.get("name"), document.get("step")
    if not isinstance(name, str) or isinstance(step, bool) or not isinstance(step, int):
        return None
    try:
        return Metric(name, decode_value(document.get("value")), step)
    except ValueError:
        return None


def as_document(metric: Metric) -> dict[str, object]:
    """Return the line of a metric in the file, as an object."""
    return {
        "name": metric.name,
        "value": encode_value(metric.value),
        "step": metric.step,
        "time_ms": now_ms(),
    }


def _line(metric: Metric) -> str:
    return json.dumps(as_document(metric), allow_nan=False) + "\n"


MOST_RANGES = 10_000


class StepSet:
    """Steps that follow one another at equal distance take one range, however many they are.

    Past 10,000 ranges, which takes steps without any order, every step up to the highest counts
    as stored.
    """

    def __init__(self) -> None:
        self._ranges: list[range] = []  # from the lowest to the highest; none reaches into another
        self._starts: list[int] = []
        self._closed_below = -math.inf
        self.highest = 0

    def __contains__(self, step: int) -> bool:
        if step < self._closed_below:
            return True
        at = bisect_right(self._starts, step) - 1
        return at >= 0 and step in self._ranges[at]

    def add(self, step: int) -> None:
        """Note a step; nothing happens if it is there."""
        if step in self:
            return
        self.highest = max(self.highest, step)
        at = bisect_right(self._starts, step)
        begin = max(0, at - 1)
        pieces = [p for whole in self._ranges[begin:at] for p in _with(whole, step)]
        self._put(begin, at, pieces or [range(step, step + 1)])
        if len(self._ranges) > MOST_RANGES:
            self._put(0, len(self._ranges), [])
            self._closed_below = self.highest + 1

    def _put(self, begin: int, end: int, pieces: list[range]) -> None:
        self._ranges[begin:end] = pieces
        self._starts[begin:end] = [piece.start for piece in pieces]


def _with(whole: range, step: int) -> list[range]:
    """Return the ranges of the members before and after `step`, and of `step`."""
    count = (step - whole.start) // whole.step + 1
    below, above = whole[:count], whole[count:]
    distance = step - below[-1]
    if not above and (len(below) == 1 or distance == whole.step):
        return [range(whole.start, step + 1, distance)]
    return [part for part in (below, range(step, step + 1), above) if part]

"""The metrics file: the truth of what a trial has reported; no (name, step) is in it twice."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hermes_ops.trial.files import Follower, decode_value, drop_torn_line, encode_value, now_ms
from hermes_ops.trial.steps import Steps


class Metric(NamedTuple):
    """One reported value; `step` counts completed epochs (or reports): 0 is before the first."""

    name: str
    value: float
    step: int


class MetricsFile:
    """Appends to a metrics file that other processes append to as well."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._follower = Follower(path)
        self._seen: dict[str, Steps] = {}

    def append(self, metrics: Iterable[Metric], others: list[Metric] | None = None) -> list[Metric]:
        """Append what is new, whole lines at once, and return it.

        What the file holds beyond the last look is put into `others`: `refresh` says it no more.
        The lock on the file makes "look, then write" one step, whoever else writes.
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

    def last_step(self, aside: Collection[str] = ()) -> int:
        """The highest step in the file, of all metrics but those `aside`; 0 without any."""
        self._catch_up()
        known = (steps for name, steps in self._seen.items() if name not in aside)
        return max((steps.highest for steps in known), default=0)

    def reached(self, name: str) -> int | None:
        """The highest step of one metric; None if it is not in the file."""
        self._catch_up()
        steps = self._seen.get(name)
        return None if steps is None else steps.highest

    def progress(self, objective: str | None, aside: Collection[str] = ()) -> int:
        """How far the trial has trained: only the objective tells, where there is one."""
        return self.last_step(aside) if objective is None else self.reached(objective) or 0

    def highest(self, name: str | None) -> int:
        """The highest step of a metric in the file, as last read; 0 without any."""
        steps = self._seen.get(name or "")
        return steps.highest if steps is not None else 0

    def names(self) -> set[str]:
        """The names of the metrics in the file."""
        self._catch_up()
        return set(self._seen)

    def _note(self, metric: Metric) -> None:
        self._seen.setdefault(metric.name, Steps()).add(metric.step)

    def _unseen(self, metrics: Iterable[Metric]) -> list[Metric]:
        fresh: dict[tuple[str, int], Metric] = {}
        for metric in metrics:
            if metric.step not in self._seen.get(metric.name, ()):
                fresh.setdefault((metric.name, metric.step), metric)
        return list(fresh.values())


def parse(document: dict[str, object]) -> Metric | None:
    """The metric in one line of the file; None if the line is not one."""
    name, step = document.get("name"), document.get("step")
    if not isinstance(name, str) or isinstance(step, bool) or not isinstance(step, int):
        return None
    try:
        return Metric(name, decode_value(document.get("value")), step)
    except ValueError:
        return None


def _line(metric: Metric) -> str:
    document = {
        "name": metric.name,
        "value": encode_value(metric.value),
        "step": metric.step,
        "time_ms": now_ms(),
    }
    return json.dumps(document, allow_nan=False) + "\n"

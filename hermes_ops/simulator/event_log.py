"""The event log of a simulation: one line of JSON an event; the outcomes follow from it alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hermes_ops.core.model import JobId, Point, SweepId
from hermes_ops.simulator.lives import Life
from hermes_ops.simulator.workload import Begin, Costs, Outcome, Work


class EventLog:
    """Writes each event as a line: its time `at_s`, its `event`, its `job`, and what belongs to it.

    Events: `submitted` (with the whole job), `granted` (with the policy's reason), `began`,
    `shared`, `trains`, `point`, `told` (to leave; with the reason), `left`, `ended`, `closed`.
    `write` gets each line with its line break (a file's `write`, a list's `append`).
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def add(self, at_s: float, event: str, job: JobId | None, **facts: object) -> None:
        """Write one event."""
        line = {"at_s": at_s, "event": event} | ({} if job is None else {"job": job}) | facts
        self._write(json.dumps(line) + "\n")


def work_fields(work: Work) -> dict[str, object]:
    """The job's fields that differ from their defaults."""
    return {
        field.name: _plain(getattr(work, field.name))
        for field in dataclasses.fields(work)
        if getattr(work, field.name) != field.default
    }


def replay(lines: Iterable[str]) -> tuple[Outcome, ...]:
    """The outcomes of a simulation, in order of submission, from the lines of its event log."""
    replayed = _Replay()
    for line in lines:
        replayed.take(json.loads(line))
    return tuple(life.outcome(replayed.closed_s) for life in replayed.lives.values())


class _Replay:
    def __init__(self) -> None:
        self.lives: dict[str, Life] = {}
        self.closed_s = 0.0

    def take(self, event: Mapping[str, Any]) -> None:
        at_s: float = event["at_s"]
        name: str = event["event"]
        if name == "closed":
            self.closed_s = at_s
        elif name == "submitted":
            work = _work(event["work"])
            self.lives[work.id] = Life(work, len(self.lives), work.submitted_s)
        else:
            self._change(self.lives[event["job"]], at_s, event)

    def _change(self, life: Life, at_s: float, event: Mapping[str, Any]) -> None:
        name = event["event"]
        if name == "began":
            life.begin(at_s, tuple(event["gpus"]), event["share"])
        elif name == "told":
            life.account(at_s)
        elif name == "shared":
            life.account(at_s)
            life.share = event["share"]
        elif name == "left":
            life.trained_s = event["trained_s"]
            life.leave(at_s, event["outcome"])
        elif name == "ended":
            life.end(at_s, event["state"])


def _work(fields: Mapping[str, Any]) -> Work:
    known = dict(fields)
    known["id"] = JobId(known["id"])
    if "sweep" in known:
        known["sweep"] = SweepId(known["sweep"])
    if "curve" in known:
        known["curve"] = tuple(Point(*point) for point in known["curve"])
    if "configuration" in known:
        known["configuration"] = tuple((name, value) for name, value in known["configuration"])
    if "costs" in known:
        known["costs"] = Costs(*known["costs"])
    if "starts" in known:
        known["starts"] = tuple(Begin(*begin) for begin in known["starts"])
    return Work(**known)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.astuple(value)
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value

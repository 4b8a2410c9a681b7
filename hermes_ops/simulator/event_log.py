"""The event log of a simulation, one line of JSON an event, and the journal that writes it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hermes_ops.core.model import Grant, JobId, Point, Reason, SweepId
from hermes_ops.simulator.simulated_job import SimulatedJob
from hermes_ops.simulator.workload import (
    Costs,
    JobOutcome,
    LossObservation,
    SegmentStart,
    SimulatedSegment,
    Work,
)


class EventLog:
    """Writes each event as a line: its time `at_s`, its `event`, its `job`, and further facts.

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
    """Return the job's fields that differ from their defaults, without its training model."""
    return {
        field.name: _plain(getattr(work, field.name))
        for field in dataclasses.fields(work)
        if field.name != "training" and getattr(work, field.name) != field.default
    }


def replay(lines: Iterable[str]) -> tuple[JobOutcome, ...]:
    """Return the outcomes of a simulation, by submission, from the lines of its event log."""
    replayed = _LogReplay()
    for line in lines:
        replayed.apply(json.loads(line))
    return tuple(job.outcome(replayed.closed_s) for job in replayed.jobs.values())


class _LogReplay:
    """Applies the events of a log to simulated jobs."""

    def __init__(self) -> None:
        self.jobs: dict[str, SimulatedJob] = {}
        self.closed_s = 0.0

    def apply(self, event: Mapping[str, Any]) -> None:
        at_s: float = event["at_s"]
        name: str = event["event"]
        if name == "closed":
            self.closed_s = at_s
        elif name == "submitted":
            work = _work(event["work"])
            self.jobs[work.id] = SimulatedJob(work, len(self.jobs), work.submitted_s)
        else:
            self._change(self.jobs[event["job"]], at_s, event)

    def _change(self, job: SimulatedJob, at_s: float, event: Mapping[str, Any]) -> None:
        name = event["event"]
        if name == "began":
            job.start_segment(at_s, tuple(event["gpus"]), event["share"])
        elif name == "told":
            job.account_service(at_s)
        elif name == "shared":
            job.account_service(at_s)
            job.share = event["share"]
        elif name == "left":
            job.trained_s = event["trained_s"]
            job.useful_gpu_s = event.get("useful_gpu_s")
            job.leave(at_s, event["outcome"])
        elif name == "ended":
            job.end(at_s, event["state"])


def _work(fields: Mapping[str, Any]) -> Work:
    values = dict(fields)
    values["id"] = JobId(values["id"])
    if "sweep" in values:
        values["sweep"] = SweepId(values["sweep"])
    if "curve" in values:
        values["curve"] = tuple(Point(*point) for point in values["curve"])
    if "configuration" in values:
        values["configuration"] = tuple((name, value) for name, value in values["configuration"])
    if "costs" in values:
        values["costs"] = Costs(*values["costs"])
    if "starts" in values:
        values["starts"] = tuple(SegmentStart(*begin) for begin in values["starts"])
    return Work(**values)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.astuple(value)
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value


class Journal:
    """Collects segments and observations, and writes each event to the log, if there is one."""

    def __init__(self, log: EventLog | None) -> None:
        self.segments: list[SimulatedSegment] = []
        self.observations: list[LossObservation] = []
        self._log = log

    def submitted(self, now_s: float, job: SimulatedJob) -> None:
        """Record the arrival of the job."""
        if self._log is not None:  # the fields of a job cost more than an event
            self._write(now_s, "submitted", job, work=work_fields(job.work))

    def granted(self, now_s: float, job: SimulatedJob, grant: Grant, reason: Reason) -> None:
        """Record a grant of GPUs, or of another share of them."""
        facts = {"gpus": grant.gpus, "share": grant.share, "reason": reason.text}
        self._write(now_s, "granted", job, **facts)

    def started(self, now_s: float, job: SimulatedJob) -> None:
        """Record that the job occupies its GPUs."""
        self._write(now_s, "began", job, gpus=job.gpus, share=job.share)

    def shared(self, now_s: float, job: SimulatedJob) -> None:
        """Record another share of its GPUs."""
        self._write(now_s, "shared", job, share=job.share)

    def trains(self, now_s: float, job: SimulatedJob) -> None:
        """Record the end of its start-up."""
        self._write(now_s, "trains", job)

    def seen(self, now_s: float, job: SimulatedJob) -> None:
        """Record that the next point of its curve is reached."""
        point = job.work.curve[job.seen]
        self.observations.append(LossObservation(job.id, point.step, point.loss, now_s))
        self._write(now_s, "point", job, step=point.step, loss=point.loss)

    def stopped(self, now_s: float, job: SimulatedJob, reason: Reason) -> None:
        """Record that the policy stops the job, or ends it."""
        self._write(now_s, "told", job, reason=reason.text)

    def left(self, segment: SimulatedSegment, job: SimulatedJob) -> None:
        """Record that the job has left its GPUs."""
        self.segments.append(segment)
        facts: dict[str, object] = {"outcome": segment.outcome, "trained_s": job.trained_s}
        if job.useful_gpu_s is not None:
            facts["useful_gpu_s"] = job.useful_gpu_s
        self._write(segment.end_s, "left", job, **facts)

    def ended(self, now_s: float, job: SimulatedJob) -> None:
        """Record its final state."""
        self._write(now_s, "ended", job, state=job.state)

    def closed(self, now_s: float) -> None:
        """Record the end of the simulation."""
        self._write(now_s, "closed", None)

    def _write(self, at_s: float, event: str, job: SimulatedJob | None, **facts: object) -> None:
        if self._log is not None:
            self._log.add(at_s, event, None if job is None else job.id, **facts)

"""From Airflow's rows and records to the decision core's facts: a pure translation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hermes_ops.airflow.metadata import OCCUPYING, TrialRow
from hermes_ops.airflow.records import (
    LEASE_KEY,
    SEGMENT_KEY,
    STOP_KEY,
    TASK_STATES,
    Lease,
    Segment,
    StopFlag,
    decode,
    is_active,
)
from hermes_ops.core.model import Job, JobId, Phase, Point, SweepId, Value
from hermes_ops.trial.failure import Cause

FINAL_STATES = ("success", "failed", "skipped", "removed", "upstream_failed")
READY_STATES = ("scheduled",)


@dataclass(frozen=True, slots=True)
class Trial:
    """All that is known of one trial.

    `left` is the outcome of its lease's segment where that has ended and the task, which waits for
    a slot or for the pod to be gone, has not said so yet.
    """

    row: TrialRow
    lease: Lease | None
    stop: StopFlag | None
    segment: Segment | None
    left: str = ""
    phase: Phase = field(init=False, compare=False, default=Phase.PENDING)
    """The trial's phase for a policy."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "phase", self._phase())  # asked for many times in each round

    @classmethod
    def of(cls, row: TrialRow, records: Mapping[str, Any]) -> Trial:
        """From a task instance and its records."""
        return cls(
            row,
            decode(Lease, records.get(LEASE_KEY)),
            decode(StopFlag, records.get(STOP_KEY)),
            decode(Segment, records.get(SEGMENT_KEY)),
        )

    @property
    def number(self) -> int:
        """The trial's number in its sweep."""
        return self.row.number

    @property
    def ended(self) -> bool:
        """True once the task instance is in a final state, or the trial said that it is done."""
        over = self.segment is not None and self.segment.final is not None
        return over or self.row.state in FINAL_STATES

    @property
    def failed(self) -> bool:
        """True once the trial has ended as failed, whether or not Airflow knows it yet."""
        final = self.segment.final if self.segment is not None else None
        return self.row.state == "failed" or final == "failed"

    @property
    def diverged(self) -> bool:
        """True once it has failed because its objective became NaN or infinite."""
        cause = self.segment.cause if self.segment is not None else ""
        return self.failed and cause == Cause.DIVERGED.value

    @property
    def awaits_mark(self) -> bool:
        """True when the trial was ended while its task waited, and that task waits still."""
        if self.segment is None or not self.idle:
            return False
        final = self.segment.final
        failed_here = final == "failed" and self.segment.task == self.row.id
        return failed_here or final in ("stopped_early", "cancelled")

    @property
    def was_given_up(self) -> bool:
        """True when the trial has failed without ever having begun."""
        segment = self.segment
        return segment is not None and segment.final == "failed" and segment.segments == 0

    @property
    def idle(self) -> bool:
        """True while its task neither is in a final state nor holds slots."""
        return self.row.state not in (*FINAL_STATES, *OCCUPYING)

    @property
    def task_state(self) -> str:
        """What the task of a trial that has ended is to be in Airflow."""
        final = self.segment.final if self.segment is not None else None
        return TASK_STATES.get(final or "", "skipped")

    @property
    def active(self) -> bool:
        """True while its lease is in force."""
        return is_active(self.lease, self.segment)

    @property
    def under_way(self) -> bool:
        """True while a segment of its lease, revoked or not, is under way in a live task."""
        return (
            self.segment is not None
            and self.lease is not None
            and self.segment.running
            and self.segment.epoch == self.lease.epoch
            and self.row.state in ("running", "deferred")
        )

    @property
    def runs(self) -> bool:
        """True while the lease's segment is under way in a live task."""
        return self.active and self.under_way

    @property
    def told(self) -> bool:
        """True when the segment of its lease has been told to stop."""
        return self.lease is not None and self.stop is not None and (
            self.stop.epoch == self.lease.epoch
        )  # fmt: skip

    @property
    def stopping(self) -> bool:
        """True when the segment under way has been told to stop."""
        return self.runs and self.told

    def _phase(self) -> Phase:
        if self.ended:
            return Phase.ENDED
        if self.lease is None:
            return Phase.PENDING
        if self.active:
            if self.stopping or self.left:
                return Phase.STOPPING
            return Phase.RUNNING if self.runs else Phase.STARTING
        return Phase.WAITING if self.row.state in READY_STATES else Phase.STOPPING

    @property
    def started_s(self) -> float | None:
        """When its segment began, of a STARTING trial its grant; None while it holds no GPUs."""
        if self.phase is Phase.RUNNING and self.segment is not None:
            return self.segment.started_s
        return self.lease.granted_s if self.phase is Phase.STARTING and self.lease else None

    def service_gpu_s(self, now_s: float) -> float:
        """GPU-seconds of its whole life up to `now_s`."""
        if self.segment is None:
            return 0.0
        ended_gpu_s, gpus = self.segment.service_gpu_s, max(1, len(self.segment.gpus))
        if not self.under_way:
            return ended_gpu_s
        return ended_gpu_s + max(0.0, now_s - self.segment.started_s) * gpus


def training_seconds(
    moment_s: float, spans: Sequence[tuple[float, float]], started_s: float | None
) -> float:
    """Seconds of training before `moment_s`: the ended spans and, if it trains, since then."""
    total = sum(max(0.0, min(end, moment_s) - start) for start, end in spans)
    if started_s is not None and moment_s > started_s:
        total += moment_s - started_s
    return total


def curve(
    points: Sequence[tuple[int, float, int]],
    sign: float,
    spans: Sequence[tuple[float, float]],
    started_s: float | None,
) -> tuple[Point, ...]:
    """The learning curve from (step, value, Unix milliseconds), lower is better.

    It begins with step 1: a value at step 0 says what the model was before its training.
    """
    return tuple(
        Point(step, sign * value, training_seconds(time_ms / 1000.0, spans, started_s))
        for step, value, time_ms in points
        if step > 0
    )


@dataclass(frozen=True, slots=True)
class SweepFacts:
    """What all trials of a sweep share."""

    sweep: SweepId
    submitted_s: float
    weight: float
    gpus: int
    sign: float
    total_steps: int | None
    preemptible: bool
    deadline_s: float | None = None  # when its budget of wall-clock time ends it
    nodes: tuple[str, ...] = ()  # that have a claim for its checkpoints; none: they lie elsewhere


def configuration(
    trial: Trial, foreseen: Mapping[str, Value] | None = None
) -> tuple[tuple[str, Value], ...]:
    """The trial's hyper-parameters: its lease's; before it has one, those foreseen for it."""
    found = trial.lease.config if trial.lease is not None else foreseen or {}
    return tuple(found.items())


def job(
    trial: Trial,
    facts: SweepFacts,
    shown: tuple[Point, ...],
    now_s: float,
    foreseen: Mapping[str, Value] | None = None,
) -> Job:
    """The trial as a policy sees it, with the curve that is `shown` of it.

    Its service holds for `now_s`; `foreseen` is the configuration that it will be opened with.
    """
    phase, segment = trial.phase, trial.segment or _before_the_first(facts)
    holds = phase in (Phase.STARTING, Phase.RUNNING)
    return Job(
        id=job_id(facts.sweep, trial.number),
        sweep=facts.sweep,
        submitted_s=facts.submitted_s,
        phase=phase,
        gpus_held=trial.lease.gpus if holds and trial.lease else (),
        min_gpus=facts.gpus,
        max_gpus=facts.gpus,
        weight=facts.weight,
        total_steps=facts.total_steps,
        deadline_s=facts.deadline_s,
        configuration=configuration(trial, foreseen),
        preemptible=facts.preemptible and segment.preemptible,
        nodes=_nodes(trial, facts),
        service_gpu_s=trial.service_gpu_s(now_s),
        curve=shown,
        preemptions=segment.preemptions,
        started_s=trial.started_s,
        waiting_since_s=None if holds else segment.ended_s,
        steps_at_start=segment.steps_at_start,
        checkpoint_s=segment.checkpoint_s,
        restore_s=segment.restore_s,
        tensor_skew=segment.tensor_skew,
        startup_s=segment.startup_s,
    )


def _nodes(trial: Trial, facts: SweepFacts) -> tuple[str, ...]:
    """Where the trial may run: with checkpoints on its node's own claim, where it ran before."""
    if not facts.nodes or trial.lease is None or len(trial.lease.nodes) != 1:
        return facts.nodes
    begun = trial.segment is not None and trial.segment.segments > 0
    return trial.lease.nodes if begun else facts.nodes


def _before_the_first(facts: SweepFacts) -> Segment:
    """In the place of a trial's segment before it has one: it waits since its submission."""
    return Segment(0, running=False, started_s=facts.submitted_s, ended_s=facts.submitted_s)


def job_id(sweep: str, number: int) -> JobId:
    """`sweep/number`."""
    return JobId(f"{sweep}/{number}")

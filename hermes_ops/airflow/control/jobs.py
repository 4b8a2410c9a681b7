"""From Airflow's rows, records and folders to the decision core's facts.

Of thousands of trials few have changed since the last round, and a round is to take milliseconds.
So what the last round made of a trial is made again only where the trial has changed. One state of
each trial is kept: it does not grow with time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from math import ceil, inf, isfinite

from hermes_ops.airflow.clock_steps import SETTLED_S
from hermes_ops.airflow.control.trial_state import READY_STATES, TrialRecords
from hermes_ops.airflow.folders import StatusFile, TrialFolder, read_start, with_start
from hermes_ops.airflow.metadata_rows import TaskInstanceRow
from hermes_ops.airflow.records import CorrectedStart, Lease, SegmentRecord
from hermes_ops.airflow.trial.segment_run import PAUSED, result_of, with_status
from hermes_ops.config.render import own_batch
from hermes_ops.core.curves import LearningCurve, PackedPoints
from hermes_ops.core.model import Job, JobId, Phase, Point, SweepId, Value
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.errors import HermesError


def training_seconds(
    moment_s: float, spans: Sequence[tuple[float, float]], started_s: float | None
) -> float:
    """Return the seconds of training before `moment_s`: ended spans and the segment under way."""
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
    """Return the learning curve from (step, value, Unix milliseconds), lower is better.

    It begins with step 1: a value at step 0 says what the model was before its training.
    """
    return tuple(
        Point(step, sign * value, training_seconds(time_ms / 1000.0, spans, started_s))
        for step, value, time_ms in points
        if step > 0
    )


@dataclass(frozen=True, slots=True)
class SizedSpan:
    """A stretch of training, in Unix seconds, with its GPUs and the samples of a step.

    `batch` is None where the samples are not known.
    """

    start_s: float
    end_s: float
    gpus: int
    batch: int | None = None


def sized_spans(segment: SegmentRecord) -> tuple[SizedSpan, ...]:
    """Return the stretches of a trial's training, with the one under way."""
    batches = segment.batches or (None,) * len(segment.spans)
    ended = zip(segment.spans, segment.sizes, batches, strict=False)
    spans = tuple(SizedSpan(start, end, size, batch) for (start, end), size, batch in ended)
    if not segment.running:
        return spans
    under_way = SizedSpan(segment.trains_since_s, inf, max(1, len(segment.gpus)), segment.batch)
    return (*spans, under_way)


def step_times(
    points: Sequence[tuple[int, float, int]],
    spans: Sequence[SizedSpan],
    unit_batch: int | None = None,
) -> tuple[StepTime, ...]:
    """Return the mean seconds of a step on each number of GPUs, with each batch, of a trial.

    `points` are (step, value, Unix milliseconds). What comes before the first report of a span does
    not count: it may contain the tracing of the model.

    A step here is a reported one, which is an epoch with Keras. How many samples it has is not
    known, and does not depend on the batch. With a `unit_batch`, the least batch of the sweep, it
    counts as a step of that many samples: with a batch of B samples it is unit_batch / B passes.
    """
    totals: dict[tuple[int, int | None], tuple[float, int]] = {}
    all_steps, _, times_ms = PackedPoints.from_rows(points).columns
    times_s = times_ms / 1000.0
    for span in spans:
        inside = (span.start_s <= times_s) & (times_s <= span.end_s)
        seen = zip(all_steps[inside].tolist(), times_s[inside].tolist(), strict=True)
        key = span.gpus, None if unit_batch is None else span.batch
        seconds, steps = totals.get(key, (0.0, 0))
        for (step, at_s), (later, later_s) in pairwise(seen):
            if later > step and later_s > at_s:
                seconds, steps = seconds + later_s - at_s, steps + later - step
        if steps:
            totals[key] = seconds, steps
    ordered = sorted(totals.items(), key=lambda item: (item[0][0], item[0][1] or 0))
    return tuple(_step_time(*key, s / n, unit_batch) for key, (s, n) in ordered)


def _step_time(gpus: int, batch: int | None, seconds: float, unit_batch: int | None) -> StepTime:
    if batch is None or unit_batch is None or gpus < 1:
        return StepTime(gpus, seconds)
    return StepTime(gpus, seconds * batch / unit_batch, local_batch=ceil(batch / gpus))


@dataclass(frozen=True, slots=True)
class SweepFacts:
    """The facts that all trials of a sweep share.

    `gpus` is the least number of GPUs of a trial, `most_gpus` the largest if it takes more than
    one, `sizes` the numbers in between that it takes, none if it takes all. `batch_range` are the
    batches of a step, of which `batch_parameter` is the part of each of `least_processes` on the
    least number of GPUs. `user` is the sweep's owner, `virtual_cluster` the owner's team by the
    pool's quota, empty without any. `priority_class` is empty for the normal one.
    """

    sweep: SweepId
    submitted_s: float
    weight: float
    gpus: int
    sign: float
    total_steps: int | None
    preemptible: bool
    deadline_s: float | None = None  # when its deadline or its wall-clock budget ends it
    nodes: tuple[str, ...] = ()  # on one of which all GPUs of a trial are; none: on any
    stays_on_node: bool = False  # its node alone has its checkpoints
    most_gpus: int | None = None
    sizes: tuple[int, ...] = ()
    batch_range: BatchRange | None = None
    batch_parameter: str = ""
    least_processes: int = 1
    is_on_one_node: bool = False  # the GPUs of a trial are all of one node: a pod's, a machine's
    may_span_nodes: bool = False  # as a pod on each node, where no node has GPUs enough
    user: str = ""
    virtual_cluster: str = ""
    priority_class: str = ""

    @property
    def is_sized(self) -> bool:
        """True where a policy may choose a trial's number of GPUs or its batch."""
        return self.most_gpus is not None or self.batch_range is not None


@lru_cache(maxsize=256)
def on_one_node(facts: SweepFacts, nodes: tuple[str, ...]) -> SweepFacts:
    """Return the facts of a sweep whose trials each get the GPUs of one node.

    Those that may be a pod on each of several nodes stay as they are where no node has their
    largest number of GPUs; one whose largest number fits on a node stays on one. `nodes` names the
    node of each GPU. Sizes that no node has are left out. Where nothing is known of nodes, or none
    has the least number of GPUs, the facts stay as they are.
    """
    most = facts.most_gpus or facts.gpus
    if not facts.is_on_one_node or most < 2:
        return facts
    counts = {n: c for n, c in Counter(nodes).items() if not facts.nodes or n in facts.nodes}
    if facts.may_span_nodes and most > max(counts.values(), default=0):
        return facts
    able = tuple(sorted(node for node, count in counts.items() if count >= facts.gpus))
    if not able:
        return facts
    most = min(most, max(counts.values()))
    sizes = tuple(size for size in facts.sizes if size <= most)
    most = max(sizes, default=most)
    return replace(
        facts,
        nodes=facts.nodes or able,
        most_gpus=most if most > facts.gpus else None,
        sizes=sizes if most > facts.gpus else (),
    )


def configuration(
    trial: TrialRecords, drawn: Mapping[str, Value] | None = None
) -> tuple[tuple[str, Value], ...]:
    """Return the trial's hyper-parameters: its lease's; before it has one, those drawn for it."""
    parameters = trial.lease.config if trial.lease is not None else drawn or {}
    return tuple(parameters.items())


def job(
    trial: TrialRecords,
    facts: SweepFacts,
    shown: Sequence[Point],
    now_s: float,
    drawn: Mapping[str, Value] | None = None,
    *,
    measured: tuple[StepTime, ...] = (),
) -> Job:
    """Return the trial as a policy sees it, with the curve that is `shown` of it.

    Its service holds for `now_s`; `drawn` is the configuration that it will be opened with,
    `measured` are its step times.
    """
    phase, segment = trial.phase, trial.segment or _before_the_first(facts)
    holds = phase in (Phase.STARTING, Phase.RUNNING)
    chosen = configuration(trial, drawn)
    most_gpus, sizes = sizes_below(facts, segment.failed_size)
    return Job(
        id=job_id(facts.sweep, trial.number),
        sweep=facts.sweep,
        submitted_s=facts.submitted_s,
        phase=phase,
        gpus_held=trial.lease.gpus if holds and trial.lease else (),
        gpus_to_leave=trial.lease.gpus if phase is Phase.STOPPING and trial.lease else (),
        uses_gpus=trial.uses_gpus,
        min_gpus=facts.gpus,
        max_gpus=most_gpus,
        sizes=sizes,
        batch_range=facts.batch_range,
        requested_batch=_requested_batch(facts, chosen),
        batch_held=trial.lease.batch if holds and trial.lease else None,
        step_times=measured,
        weight=facts.weight,
        user=facts.user,
        virtual_cluster=facts.virtual_cluster,
        priority_class=facts.priority_class,
        total_steps=facts.total_steps,
        deadline_s=facts.deadline_s,
        configuration=chosen,
        preemptible=facts.preemptible and segment.preemptible,
        resumes=not (trial.is_told_to_stop and trial.stop and trial.stop.final),
        nodes=_nodes(trial, facts),
        service_gpu_s=trial.service_gpu_s(now_s),
        curve=shown,
        preemptions=segment.preemptions,
        segments=0 if trial.segment is None else segment.segments,
        started_s=trial.started_s,
        waiting_since_s=None if holds else segment.ended_s,
        steps_at_start=segment.steps_at_start,
        checkpoint_s=segment.checkpoint_s,
        restore_s=segment.restore_s,
        tensor_skew=segment.tensor_skew,
        startup_s=segment.startup_s,
        repeat_s=segment.repeat_s,
    )


def _requested_batch(facts: SweepFacts, chosen: tuple[tuple[str, Value], ...]) -> int | None:
    """Return the samples of a step that the trial's own configuration gives on its least GPUs."""
    if facts.batch_range is None:
        return None
    return own_batch(dict(chosen).get(facts.batch_parameter), facts.least_processes)


def sizes_below(facts: SweepFacts, failed_size: int | None) -> tuple[int, tuple[int, ...]]:
    """Return the largest number of GPUs and the list of sizes, without those that have failed.

    Those are `failed_size` and all above it, unless the trial takes none below it.
    """
    most = facts.most_gpus or facts.gpus
    if failed_size is None or failed_size > most or failed_size <= facts.gpus:
        return most, facts.sizes
    sizes = tuple(size for size in facts.sizes if size < failed_size)
    return max(sizes, default=failed_size - 1), sizes


def _nodes(trial: TrialRecords, facts: SweepFacts) -> tuple[str, ...]:
    """Return where it may run: with checkpoints on its node's own claim, where it ran before."""
    if not facts.stays_on_node or trial.lease is None or len(trial.lease.nodes) != 1:
        return facts.nodes
    has_begun = trial.segment is not None and trial.segment.segments > 0
    return trial.lease.nodes if has_begun else facts.nodes


def _before_the_first(facts: SweepFacts) -> SegmentRecord:
    """Return a record for a trial without one: it has waited since its submission."""
    return SegmentRecord(0, running=False, started_s=facts.submitted_s, ended_s=facts.submitted_s)


def job_id(sweep: str, number: int) -> JobId:
    """Return `sweep/number`."""
    return JobId(f"{sweep}/{number}")


Points = Sequence[tuple[int, float, int]]
Spans = Sequence[tuple[float, float]]
Asked = tuple[Points, float, Spans, float | None]
Drawn = Mapping[str, Value]
_NO_CURVE = LearningCurve.from_rows(())
_NO_POINTS: Points = ()
_Spans = tuple[tuple[SizedSpan, ...], int | None]
Made = tuple[TrialRecords, Sequence[Point], Drawn | None, Job]


@dataclass(slots=True)
class TrialCache:
    """The trials, the learning curves and the jobs of one sweep as they were last made."""

    _trials: dict[int, tuple[Mapping[str, str], TrialRecords]] = field(default_factory=dict)
    _curves: dict[int, tuple[Asked, LearningCurve]] = field(default_factory=dict)
    _jobs: dict[int, Made] = field(default_factory=dict)
    _losses: dict[int, tuple[Points, float | None]] = field(default_factory=dict)
    _times: dict[int, tuple[Points, _Spans, tuple[StepTime, ...]]] = field(default_factory=dict)
    _waiting_since: dict[int, tuple[float, float]] = field(default_factory=dict)

    def trial(self, row: TaskInstanceRow, records: Mapping[str, str]) -> TrialRecords:
        """Return the trial's decoded records; the same object where nothing has changed."""
        cached = self._trials.get(row.number)
        if cached is None or cached[0] != records:
            built = TrialRecords.from_stored(row, records)
        elif cached[1].row is not row and cached[1].row != row:
            built = replace(cached[1], row=row)
        else:
            return cached[1]
        self._trials[row.number] = dict(records), built
        return built

    def curve(self, trial: TrialRecords, points: Points, sign: float) -> LearningCurve:
        """Return the trial's learning curve; the same object where nothing has changed.

        Where points have come since, the others are not converted again: there may be 100,000.
        """
        segment = trial.segment
        spans: Spans = () if segment is None else segment.spans
        since_s = segment.trains_since_s if segment is not None and segment.running else None
        inputs = (points, sign, spans, since_s)
        cached = self._curves.get(trial.number)
        if cached is None or cached[0] != inputs:
            reusable = 0 if cached is None else _known_points(cached[0], inputs)
            begun = _NO_CURVE if cached is None or reusable == 0 else cached[1]
            grown = begun.extended(curve(points[reusable:], sign, spans, since_s))
            self._curves[trial.number] = cached = (inputs, grown)
        return cached[1]

    def lowest_loss(self, number: int, points: Points, sign: float) -> float | None:
        """Return the lowest finite loss of a trial's points; None without any.

        Where points have come since, only they are looked at: the curves of a sweep may have
        50,000,000 points.
        """
        before, lowest = self._losses.get(number, (_NO_POINTS, None))
        if before is not points:
            compared = len(before) if points[: len(before)] == before else 0
            losses = [sign * value for _, value, _ in points[compared:]]
            finite = [loss for loss in losses if isfinite(loss)]
            earlier = [lowest] if compared and lowest is not None else []
            lowest = min((*earlier, *finite), default=None)
            self._losses[number] = points, lowest
        return lowest

    def job(
        self,
        trial: TrialRecords,
        facts: SweepFacts,
        points: Points,
        now_s: float,
        drawn: Drawn | None = None,
    ) -> Job:
        """Return the trial as a policy sees it, with the curve of these points.

        The service of a trial that trains grows: it is made again in each round.
        """
        shown = self.curve(trial, points, facts.sign)
        cached = self._jobs.get(trial.number)
        if cached and cached[0] is trial and cached[1] is shown and cached[2] is drawn:
            waiting_s = cached[3].waiting_since_s
            if waiting_s is None or waiting_s <= now_s:
                return cached[3]
        measured = self._step_times(trial, facts, points) if facts.is_sized else ()
        built = job(trial, facts, shown, now_s, drawn, measured=measured)
        if built.waiting_since_s is not None:
            since_s = self._waiting_since_s(trial.number, built.waiting_since_s, now_s)
            built = built if since_s is None else replace(built, waiting_since_s=since_s)
        if not trial.is_under_way:
            self._jobs[trial.number] = (trial, shown, drawn, built)
        return built

    def _step_times(
        self, trial: TrialRecords, facts: SweepFacts, points: Points
    ) -> tuple[StepTime, ...]:
        """Return the step times of a trial by its segments, made again where either has changed."""
        if trial.segment is None:
            return ()
        unit_batch = None if facts.batch_range is None else facts.batch_range.initial
        inputs = sized_spans(trial.segment), unit_batch
        cached = self._times.get(trial.number)
        if cached is None or cached[0] is not points or cached[1] != inputs:
            cached = self._times[trial.number] = points, inputs, step_times(points, *inputs)
        return cached[2]

    def _waiting_since_s(self, number: int, recorded_s: float, now_s: float) -> float | None:
        """Return since when a trial waits if its record, by a clock since set back, says later.

        That is when the set clock was first seen. Until the clock had caught up, a guard against
        waiting for ever would not count. None where the record is right.
        """
        recorded, since_s = self._waiting_since.get(number, (recorded_s, recorded_s))
        since_s = min(now_s, since_s if recorded == recorded_s else recorded_s)
        if since_s == recorded_s:
            return None
        self._waiting_since[number] = recorded_s, since_s
        return since_s


def _known_points(before: Asked, now: Asked) -> int:
    """Return how many points were there before, if those that are there now begin with them."""
    count = len(before[0])
    return count if before[1:] == now[1:] and now[0][:count] == before[0] else 0


START_PERIOD_S = SETTLED_S / 2
"""Seconds between two readings of when a segment began, which changes where the clock is set."""


@dataclass(slots=True)
class DeferredTrials:
    """The trials of one sweep whose pods the triggerer holds, with what their folders say.

    A segment that was preempted is closed by the controller, so that its task need not take a slot
    for that; its slots are free as soon as the trial has said so, while its pod is being removed.
    Every other end is concluded by the task, which Airflow schedules again with the slots that it
    had.
    """

    clock: Callable[[], float] = time.monotonic
    _status: dict[int, StatusFile] = field(default_factory=dict)
    _starts: dict[int, tuple[float, CorrectedStart | None]] = field(default_factory=dict)
    _updated: dict[int, tuple[tuple[object, ...], TrialRecords]] = field(default_factory=dict)

    def with_folder(self, trial: TrialRecords, sweep: str) -> TrialRecords:
        """Return the trial with the status and outcome in its folder, of a pod of its lease.

        As it is while the volume is away.
        """
        lease, segment = trial.lease, trial.segment
        if lease is None or lease.pod is None or segment is None or not segment.running:
            return trial
        if segment.epoch != lease.epoch:
            return trial
        try:
            if trial.row.state == "deferred":
                seen = self._with_status(trial, segment, sweep)
                left = _left(trial, lease, sweep) if trial.is_told_to_stop else ""
                return replace(seen, left=left) if left in PAUSED else seen
            if trial.row.state in READY_STATES:
                return replace(trial, left=_left(trial, lease, sweep))
        except HermesError:
            return trial
        return trial

    def _with_status(self, trial: TrialRecords, segment: SegmentRecord, sweep: str) -> TrialRecords:
        file = self._status.get(trial.number)
        if file is None:
            file = StatusFile.from_folder(TrialFolder.from_sweep(sweep, trial.number))
            self._status[trial.number] = file
        seen = (trial, file.read(), self._start(trial.number, segment.epoch, sweep))
        before, updated = self._updated.get(trial.number, ((), trial))
        if not before or any(one is not other for one, other in zip(seen, before, strict=True)):
            updated = replace(trial, segment=with_start(with_status(segment, seen[1]), seen[2]))
            self._updated[trial.number] = (seen, updated)
        return updated

    def _start(self, number: int, epoch: int, sweep: str) -> CorrectedStart | None:
        """Return when the segment began by the clock as it is set now, as of a moment ago."""
        read_s, start = self._starts.get(number, (-inf, None))
        if self.clock() - read_s >= START_PERIOD_S:
            corrected = read_start(TrialFolder.from_sweep(sweep, number), epoch)
            if corrected != start:  # the same object while it is unchanged
                start = corrected
            self._starts[number] = (self.clock(), start)
        return start


def _left(trial: TrialRecords, lease: Lease, sweep: str) -> str:
    result = result_of(TrialFolder.from_sweep(sweep, trial.number), lease.epoch)
    return str(result.get("outcome") or "")

"""The history of a finished sweep in MLflow, and the workload that it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median

from hermes_ops.config import SweepConfig, parse
from hermes_ops.core.curves import PackedPoints
from hermes_ops.core.model import JobId, SweepId, Value
from hermes_ops.core.summary import FINISHED, CurvePoints, Segment
from hermes_ops.core.training import STOPPED, Training, training
from hermes_ops.errors import HermesError
from hermes_ops.simulator.workload import Costs, SegmentStart, Work, Workload
from hermes_ops.tracking import SweepRef, Tracker
from hermes_ops.tracking.artifacts import SWEEP_FILE, fetch_sweep_file
from hermes_ops.tracking.runs import RUN_STATUS, TIMINGS, ended_spans_of
from hermes_ops.tracking.summary import CollectedSweep, collect
from hermes_ops.tracking.tracker import require_sweep
from hermes_ops.trial.keras.runtime import ENDING_S

Spans = tuple[tuple[float, float], ...]

OBSERVATION_DELAY_S = 0.4
"""Seconds from a report until a live policy sees the value, on one machine: it is sent to MLflow,
read from it and decided on, each of these at once but at most every 0.4 or 0.5 s."""


@dataclass(frozen=True, slots=True)
class RecordedTrial:
    """The data of one trial in MLflow; `config` is None for one that was never opened.

    `can_be_best` is False for one that misses a bound of its sweep's metrics.
    """

    number: int
    state: str
    config: Mapping[str, Value] | None
    points: CurvePoints = ()
    segments: tuple[Segment, ...] = ()
    timings: Mapping[str, float] | None = None  # those of TIMINGS that were measured
    gpu_seconds: float = 0.0
    preemptions: int = 0
    can_be_best: bool = True


@dataclass(frozen=True, slots=True)
class SweepHistory:
    """The data of a sweep in MLflow. Times are Unix seconds.

    `gpus`: slots of the pool that its trials could use; None when no controller has recorded it.
    `stops`: (trial, time) of each decision to preempt a trial.
    """

    sweep: str
    config: SweepConfig
    policy: str
    gpus: int | None
    started_s: float
    trials: tuple[RecordedTrial, ...]
    stops: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class MeasuredFigures:
    """The measured figures of the sweep.

    `best`: the finished trial with the best value, of those that can be the best.
    `time_to_best_s`: from the sweep's start until the end of that trial; None without any.
    """

    policy: str
    best: int | None
    time_to_best_s: float | None
    gpu_hours: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class RecordedSweep:
    """A sweep as a workload, with its measured figures; `costs` are its typical ones.

    `never_best`: the jobs that miss a bound of the sweep's metrics.
    """

    workload: Workload
    config: SweepConfig
    gpus: int | None
    measured: MeasuredFigures
    costs: Costs
    never_best: frozenset[JobId] = frozenset()


def fetch_recorded_sweep(tracker: Tracker, sweep: str) -> RecordedSweep:
    """Fetch an ended sweep; raise Refused for an unknown one, HermesError for a running one."""
    ref = require_sweep(tracker, sweep)
    run = tracker.sweep(ref)
    if run.state not in RUN_STATUS:
        raise HermesError(f"the sweep {sweep!r} has not ended yet: wait, or stop it.")
    document = fetch_sweep_file(tracker.artifacts, run.ref.parent_run_id, run.ref.sweep_id)
    config = parse(document, f"{SWEEP_FILE} of {run.ref.sweep_id}", base=None)
    collected = collect(
        tracker,
        run.ref,
        metric=config.objective.metric,
        direction=config.objective.direction.value,
        max_trials=config.trial_count,
        others=config.secondary,
    )
    return reconstruct(history_of(config, collected, stops_of(tracker, run.ref)))


def history_of(
    config: SweepConfig, collected: CollectedSweep, stops: tuple[tuple[int, float], ...] = ()
) -> SweepHistory:
    """Convert what was collected of an ended sweep.

    The time between an end and a continuation of the sweep is cut out of all times.
    """
    runs = {t.number: t for t in collected.trials}
    spans = ended_spans_of(collected.run.tags)
    trials = []
    for summary in collected.summary.trials:
        trial_run = runs.get(summary.number)
        measured = (
            ((name, trial_run.timing_s(name)) for name in TIMINGS) if trial_run is not None else ()
        )
        trials.append(
            RecordedTrial(
                number=summary.number,
                state=summary.state,
                config=summary.config,
                points=PackedPoints.from_rows(
                    (step, value, round(1_000 * _active_s(at_ms / 1_000, spans)))
                    for step, value, at_ms in collected.curves.get(summary.number, ())
                ),
                segments=_active_segments(trial_run.segments if trial_run else (), spans),
                timings={name: seconds for name, seconds in measured if seconds is not None},
                gpu_seconds=summary.gpu_seconds,
                preemptions=summary.preemptions,
                can_be_best=not summary.violates,
            )
        )
    return SweepHistory(
        sweep=collected.summary.sweep,
        config=config,
        policy=collected.run.tags.get("hermes.policy", ""),
        gpus=collected.summary.pool_slots,
        started_s=collected.run.started_ms / 1000.0,
        trials=tuple(trials),
        stops=tuple((trial, _active_s(at_s, spans)) for trial, at_s in stops),
    )


def _active_segments(segments: Sequence[Segment], spans: Spans) -> tuple[Segment, ...]:
    return tuple(
        replace(
            segment,
            start_s=_active_s(segment.start_s, spans),
            end_s=None if segment.end_s is None else _active_s(segment.end_s, spans),
        )
        for segment in segments
    )


def _active_s(at_s: float, spans: Spans) -> float:
    """Return a time minus the parts of `spans`, in which the sweep had ended, before that time."""
    return at_s - sum(max(0.0, min(at_s, until_s) - ended_s) for ended_s, until_s in spans)


def stops_of(tracker: Tracker, sweep: SweepRef) -> tuple[tuple[int, float], ...]:
    """Fetch (trial, Unix seconds) of each recorded decision to preempt a trial."""
    decisions = tracker.read_decisions(sweep.parent_run_id)
    stops = [d for d in decisions if d.get("action") == "stop"]
    return tuple((int(d["trial"]), float(d["time_s"])) for d in stops)


def reconstruct(history: SweepHistory) -> RecordedSweep:
    """Reconstruct the workload of a sweep, in seconds since its start.

    The points of a trial say how long it trains. Time between segments, starts and restores are not
    training but `costs`: the trial's own where measured, else the sweep's median; its first
    segments have their own starts. The parts of a switch that no trial measures by itself
    (Airflow's part, the first traced batch) are the sweep's medians, as `handover_s`, `warm_s` and
    `leave_s`. A finished trial ends after its last point by the time that its script took to exit.
    All trials are submitted when the first one could start, and values are observed as late as live
    (`OBSERVATION_DELAY_S`).

    `cut_short`: a trial that did not finish, except one that failed at a value that was not finite
    (it would fail there again).
    """
    spent = _TimeSpent.from_history(history)
    jobs = tuple(_job(history, spent, trial, trained) for trial, trained in spent.trained)
    workload = Workload(history.sweep, jobs, observation_delay_s=OBSERVATION_DELAY_S)
    measured = _measured(history)
    never = frozenset(_job_id(history, t) for t in history.trials if not t.can_be_best)
    return RecordedSweep(workload, history.config, history.gpus, measured, spent.costs, never)


def _job_id(history: SweepHistory, trial: RecordedTrial) -> JobId:
    return JobId(f"{history.sweep}/{trial.number}")


def _job(history: SweepHistory, spent: _TimeSpent, trial: RecordedTrial, trained: Training) -> Work:
    return Work(
        id=_job_id(history, trial),
        submitted_s=spent.submitted_s,
        seconds=_seconds(trial, trained, spent.tail_s),
        gpus=history.config.trial.gpu_range.least,
        sweep=SweepId(history.sweep),
        weight=history.config.weight,
        preemptible=history.config.trial.preemptible,
        deadline_s=_deadline_s(history),
        total_steps=history.config.budget.max_epochs,
        curve=trained.curve,
        configuration=tuple((trial.config or {}).items()),
        costs=spent.costs_of(trial),
        cut_short=is_cut_short(trial),
        starts=tuple(spent.starts_of(trial, trained)),
    )


def _deadline_s(history: SweepHistory) -> float | None:
    """Return when its deadline or its wall-clock budget ends the sweep, from its start."""
    at_s = history.config.deadline_at_s(history.started_s)
    own_s = None if at_s is None else at_s - history.started_s
    ends = (own_s, history.config.budget.wall_clock_seconds)
    return min((end_s for end_s in ends if end_s is not None), default=None)


def is_cut_short(trial: RecordedTrial) -> bool:
    """Return whether the trial's curve would have continued."""
    if trial.state == "failed" and trial.points and not isfinite(trial.points[-1][1]):
        return False
    return trial.state != FINISHED


def _seconds(trial: RecordedTrial, trained: Training, tail_s: float) -> float:
    last_s = trained.curve[-1].seconds if trained.curve else 0.0
    if trial.state != FINISHED:
        return last_s
    return last_s + (tail_s if trained.tail_s is None else trained.tail_s)


def _measured(history: SweepHistory) -> MeasuredFigures:
    sign = history.config.objective.sign
    best: tuple[float, int] | None = None
    for trial in history.trials:
        values = [sign * value for _, value, _ in trial.points if isfinite(value)]
        able = trial.state == FINISHED and trial.can_be_best
        if able and values and (best is None or min(values) < best[0]):
            best = (min(values), trial.number)
    ends = [
        segment.end_s
        for trial in history.trials
        for segment in trial.segments
        if best is not None and trial.number == best[1] and segment.end_s is not None
    ]
    return MeasuredFigures(
        policy=history.policy,
        best=None if best is None else best[1],
        time_to_best_s=max(ends) - history.started_s if ends else None,
        gpu_hours=sum(t.gpu_seconds for t in history.trials) / 3600.0,
        preemptions=sum(t.preemptions for t in history.trials),
    )


@dataclass(frozen=True, slots=True)
class _TimeSpent:
    """The time spent by a sweep, as medians over its segments."""

    trained: tuple[tuple[RecordedTrial, Training], ...]
    costs: Costs
    tail_s: float
    submitted_s: float

    @classmethod
    def from_history(cls, history: SweepHistory) -> _TimeSpent:
        """Compute the medians over all trials."""
        measured_of = {name: _timings(history, name) for name in TIMINGS}
        typical = {name: _median(seconds) for name, seconds in measured_of.items()}
        first = [_trained(t, history, None, typical["startup_s"], 0.0) for t in history.trials]
        step_s = _median([t.step_s for t in first if t.step_s is not None])
        handover = _Handover.from_history(history)
        checkpoint_s, startup_s = typical["checkpoint_s"], typical["startup_s"]
        leave_s = max(
            0.0, handover.stop_s + handover.gap_after_stop_s - handover.gap_s - checkpoint_s
        )
        going_s = leave_s + checkpoint_s
        trained = [_trained(t, history, step_s or None, startup_s, going_s) for t in history.trials]
        measured = list(_measured_starts(history, trained))
        first_batch_s = max(0.0, _median([lead_s - startup_s for lead_s, startup_s in measured]))
        if not measured:  # no start-up was measured: it is all time before the first batch
            typical["startup_s"] = _median([s for t in trained for s in t.leads_s if s is not None])
        costs = Costs(
            startup_s=typical["startup_s"],
            restore_s=typical["restore_s"],
            checkpoint_s=checkpoint_s,
            handover_s=handover.gap_s,
            warm_s=first_batch_s,
            leave_s=leave_s,
            ending_s=ENDING_S,
            repeat_s=typical["repeat_s"] if measured_of["repeat_s"] else None,
        )
        begins_s = [s.start_s - history.started_s for s in _firsts(_segments(history))]
        return cls(
            trained=tuple(zip(history.trials, trained, strict=True)),
            costs=costs,
            tail_s=_median([t.tail_s for t in trained if t.tail_s is not None]),
            submitted_s=max(0.0, _median(begins_s) - handover.gap_s),
        )

    def costs_of(self, trial: RecordedTrial) -> Costs:
        """Return the trial's measured costs (medians of its segments), else the sweep's."""
        measured_costs = dict(trial.timings or {})
        for name in ("startup_s", "restore_s"):
            measured = [s for s in (getattr(one, name) for one in trial.segments) if s is not None]
            if measured:
                measured_costs[name] = median(measured)
        return replace(self.costs, **measured_costs)

    def starts_of(self, trial: RecordedTrial, trained: Training) -> Iterator[SegmentStart]:
        """Yield the start of each segment of the trial.

        An unmeasured start-up is the time that neither the restore nor the usual first batch
        explains.
        """
        costs = self.costs_of(trial)
        segments = sorted(trial.segments, key=lambda s: s.start_s)
        for number, (segment, lead_s) in enumerate(zip(segments, trained.leads_s, strict=True)):
            restore_s = segment.restore_s
            if restore_s is None:
                restore_s = costs.restore_s if number else 0.0
            startup_s = segment.startup_s
            if lead_s is None:
                known_s = costs.startup_s if startup_s is None else startup_s
                yield SegmentStart(known_s + restore_s + costs.warm_s, known_s, restore_s)
            elif startup_s is None:
                yield SegmentStart(lead_s, max(0.0, lead_s - costs.warm_s - restore_s), restore_s)
            else:
                yield SegmentStart(lead_s, startup_s, restore_s)


@dataclass(frozen=True, slots=True)
class _Handover:
    """The handover of GPUs between trials: medians in seconds, 0 where there was none.

    `gap_s`: from one trial's end to the next one's start on that GPU; `gap_after_stop_s`: the same
    after a stop; `stop_s`: from the decision to stop a trial to the end of its segment.
    """

    gap_s: float
    gap_after_stop_s: float
    stop_s: float

    @classmethod
    def from_history(cls, history: SweepHistory) -> _Handover:
        """Compute the medians of the sweep's segments and decisions."""
        gaps: dict[bool, list[float]] = {True: [], False: []}
        for earlier, later in _successions(_segments(history)):
            assert earlier.end_s is not None
            gaps[earlier.outcome in STOPPED].append(max(0.0, later.start_s - earlier.end_s))
        ends = [(s.trial, s.end_s) for s in _segments(history) if s.end_s is not None]
        stops = [
            min((end_s - stop_s for trial, end_s in ends if trial == stopped and end_s >= stop_s))
            for stopped, stop_s in history.stops
            if any(trial == stopped and end_s >= stop_s for trial, end_s in ends)
        ]
        return cls(
            gap_s=_median(gaps[False] or gaps[True]),
            gap_after_stop_s=_median(gaps[True] or gaps[False]),
            stop_s=_median(stops),
        )


def _trained(
    trial: RecordedTrial,
    history: SweepHistory,
    step_s: float | None,
    startup_s: float,
    leave_s: float,
) -> Training:
    return training(
        trial.points,
        trial.segments,
        sign=history.config.objective.sign,
        typical_step_s=step_s,
        startup_s=(trial.timings or {}).get("startup_s", startup_s),
        leave_s=leave_s,
    )


def _measured_starts(
    history: SweepHistory, trained: Sequence[Training]
) -> Iterator[tuple[float, float]]:
    """Yield (lead, measured part of it) of each segment whose start was measured."""
    for trial, training_of in zip(history.trials, trained, strict=True):
        segments = sorted(trial.segments, key=lambda s: s.start_s)
        for segment, lead_s in zip(segments, training_of.leads_s, strict=True):
            if lead_s is not None and segment.startup_s is not None:
                yield lead_s, segment.startup_s + (segment.restore_s or 0.0)


def _timings(history: SweepHistory, name: str) -> list[float]:
    return [t.timings[name] for t in history.trials if t.timings and name in t.timings]


def _segments(history: SweepHistory) -> list[Segment]:
    segments = (segment for trial in history.trials for segment in trial.segments)
    return sorted(segments, key=lambda s: (s.start_s, s.trial))


def _firsts(segments: Sequence[Segment]) -> list[Segment]:
    """Return the first segment on each GPU."""
    first: dict[int, Segment] = {}
    for segment in segments:
        for gpu in segment.gpus:
            first.setdefault(gpu, segment)
    return list(first.values())


def _successions(segments: Sequence[Segment]) -> list[tuple[Segment, Segment]]:
    """Return each ended segment with its successor on each of its GPUs."""
    last: dict[int, Segment] = {}
    pairs = []
    for segment in segments:
        for gpu in segment.gpus:
            earlier = last.get(gpu)
            if earlier is not None and earlier.end_s is not None:
                pairs.append((earlier, segment))
            last[gpu] = segment
    return pairs


def _median(values: Sequence[float]) -> float:
    """Return the median; 0 without values."""
    return median(values) if values else 0.0

"""A finished sweep of one's own, read back from MLflow as a workload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median

from hermes_ops.config import SweepConfig, parse
from hermes_ops.config.files import read_yaml
from hermes_ops.core.model import JobId, SweepId, Value
from hermes_ops.core.summary import CurvePoints, Segment
from hermes_ops.core.training import STOPPED, Training, training
from hermes_ops.errors import HermesError
from hermes_ops.simulator.workload import Begin, Costs, Work, Workload
from hermes_ops.tracking import SweepRef, Tracker
from hermes_ops.tracking.runs import RUN_STATUS, TIMINGS
from hermes_ops.tracking.summary import Collected, collect, find
from hermes_ops.trial.runtime import ENDING_S

FINISHED = "finished"

SIGHT_S = 0.4
"""How much later than it is reported a live policy sees a value on one machine: it is sent, read
from MLflow and looked at as soon as it is there, each of these at most every 0.4 or 0.5 s."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What MLflow holds of one trial; `config` is None for one that was never opened.

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
class Record:
    """What MLflow holds of a sweep. Times are Unix seconds.

    `gpus`: slots of the pool that its trials could use; None when no controller has said so.
    `stops`: (trial, time) of each decision to stop a trial that was to go on later.
    """

    sweep: str
    config: SweepConfig
    policy: str
    gpus: int | None
    started_s: float
    trials: tuple[Trial, ...]
    stops: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """What really came of the sweep; `best` is the finished trial with the best value, of those
    that can be the best.

    `time_to_best_s`: from the sweep's start until that trial had ended; None without any.
    """

    policy: str
    best: int | None
    time_to_best_s: float | None
    gpu_hours: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """A sweep as a workload, with what was measured; `costs` are the sweep's typical ones.

    `never_best`: the jobs that miss a bound of the sweep's metrics.
    """

    workload: Workload
    config: SweepConfig
    gpus: int | None
    measured: Measured
    costs: Costs
    never_best: frozenset[JobId] = frozenset()


def read(tracker: Tracker, sweep: str) -> Recorded:
    """Read an ended sweep; raises Refused for an unknown one, HermesError for one that runs."""
    ref = find(tracker, sweep)
    run = tracker.sweep(ref)
    if run.state not in RUN_STATUS:
        raise HermesError(f"the sweep {sweep!r} has not ended yet: wait, or stop it.")
    text = tracker.artifacts.read(run.ref.parent_run_id, "sweep.yaml").decode()
    source = f"sweep.yaml of {run.ref.sweep_id}"
    config = parse(read_yaml(text, source).data, source, base=None)
    found = collect(
        tracker,
        run.ref,
        metric=config.objective.metric,
        direction=config.objective.direction.value,
        max_trials=config.trial_count,
        others=config.secondary,
    )
    return recorded(record_of(config, found, stops_of(tracker, run.ref)))


def record_of(
    config: SweepConfig, found: Collected, stops: tuple[tuple[int, float], ...] = ()
) -> Record:
    """What was collected of an ended sweep, as a record."""
    runs = {t.number: t for t in found.trials}
    trials = []
    for summary in found.summary.trials:
        kept = runs.get(summary.number)
        measured = ((name, kept.timing_s(name)) for name in TIMINGS) if kept is not None else ()
        trials.append(
            Trial(
                number=summary.number,
                state=summary.state,
                config=summary.config,
                points=found.curves.get(summary.number, ()),
                segments=kept.segments if kept is not None else (),
                timings={name: seconds for name, seconds in measured if seconds is not None},
                gpu_seconds=summary.gpu_seconds,
                preemptions=summary.preemptions,
                can_be_best=not summary.violates,
            )
        )
    return Record(
        sweep=found.summary.sweep,
        config=config,
        policy=found.run.tags.get("hermes.policy", ""),
        gpus=found.summary.pool_slots,
        started_s=found.run.started_ms / 1000.0,
        trials=tuple(trials),
        stops=stops,
    )


def stops_of(tracker: Tracker, sweep: SweepRef) -> tuple[tuple[int, float], ...]:
    """(trial, Unix seconds) of each recorded decision to stop a trial that was to go on later."""
    decisions = tracker.read_decisions(sweep.parent_run_id)
    stops = [d for d in decisions if d.get("action") == "stop"]
    return tuple((int(d["trial"]), float(d["time_s"])) for d in stops)


def recorded(record: Record) -> Recorded:
    """The workload that a sweep was, in seconds since its start, configurations as they were.

    A trial trains as long as its points say; time between segments, starts and restores are no
    training but `costs` (its own where measured, else the sweep's median; of its first segments
    what each of them took). What of a switch no trial measures by itself (Airflow's part, the first
    traced batch) is the sweep's median, as `handover_s`, `warm_s` and `leave_s`. A finished trial
    ends after its last point by what its script took to exit. All trials are submitted when the
    first one could begin, and values are seen as late as live (`SIGHT_S`).

    `cut_short`: a trial that did not finish, except one that failed at a value that was not finite
    (it would do so again).
    """
    clock = _Clock.of(record)
    sweep = SweepId(record.sweep)
    steps = record.config.budget.max_epochs
    jobs = tuple(
        Work(
            id=JobId(f"{record.sweep}/{trial.number}"),
            submitted_s=clock.submitted_s,
            seconds=_seconds(trial, trained, clock.tail_s),
            gpus=record.config.trial.gpus,
            sweep=sweep,
            weight=record.config.weight,
            preemptible=record.config.trial.preemptible,
            deadline_s=record.config.budget.wall_clock_seconds,
            total_steps=steps,
            curve=trained.curve,
            configuration=tuple((trial.config or {}).items()),
            costs=clock.costs_of(trial),
            cut_short=is_cut_short(trial),
            starts=tuple(clock.starts_of(trial, trained)),
        )
        for trial, trained in clock.trained
    )
    workload = Workload(record.sweep, jobs, sight_s=SIGHT_S)
    measured = _measured(record)
    never = frozenset(
        JobId(f"{record.sweep}/{t.number}") for t in record.trials if not t.can_be_best
    )
    return Recorded(workload, record.config, record.gpus, measured, clock.costs, never)


def is_cut_short(trial: Trial) -> bool:
    """True when the trial's curve would have gone on."""
    if trial.state == "failed" and trial.points and not isfinite(trial.points[-1][1]):
        return False
    return trial.state != FINISHED


def _seconds(trial: Trial, trained: Training, tail_s: float) -> float:
    last_s = trained.curve[-1].seconds if trained.curve else 0.0
    if trial.state != FINISHED:
        return last_s
    return last_s + (tail_s if trained.tail_s is None else trained.tail_s)


def _measured(record: Record) -> Measured:
    sign = record.config.objective.sign
    best: tuple[float, int] | None = None
    for trial in record.trials:
        values = [sign * value for _, value, _ in trial.points if isfinite(value)]
        able = trial.state == FINISHED and trial.can_be_best
        if able and values and (best is None or min(values) < best[0]):
            best = (min(values), trial.number)
    ends = [
        segment.end_s
        for trial in record.trials
        for segment in trial.segments
        if best is not None and trial.number == best[1] and segment.end_s is not None
    ]
    return Measured(
        policy=record.policy,
        best=None if best is None else best[1],
        time_to_best_s=max(ends) - record.started_s if ends else None,
        gpu_hours=sum(t.gpu_seconds for t in record.trials) / 3600.0,
        preemptions=sum(t.preemptions for t in record.trials),
    )


@dataclass(frozen=True, slots=True)
class _Clock:
    """Where the seconds of a sweep went, as medians over its segments."""

    trained: tuple[tuple[Trial, Training], ...]
    costs: Costs
    tail_s: float
    submitted_s: float

    @classmethod
    def of(cls, record: Record) -> _Clock:
        """From all trials together."""
        typical = {name: _median(_timings(record, name)) for name in TIMINGS}
        first = [_trained(t, record, None, typical["startup_s"], 0.0) for t in record.trials]
        step_s = _median([t.step_s for t in first if t.step_s is not None])
        handed = _Handed.of(record)
        checkpoint_s, startup_s = typical["checkpoint_s"], typical["startup_s"]
        leave_s = max(0.0, handed.stop_s + handed.gap_after_stop_s - handed.gap_s - checkpoint_s)
        going_s = leave_s + checkpoint_s
        trained = [_trained(t, record, step_s or None, startup_s, going_s) for t in record.trials]
        told = list(_told(record, trained))
        first_batch_s = max(0.0, _median([lead_s - startup_s for lead_s, startup_s in told]))
        if not told:  # nobody measured a start-up: it is all that came before the first batch
            typical["startup_s"] = _median([s for t in trained for s in t.leads_s if s is not None])
        costs = Costs(
            startup_s=typical["startup_s"],
            restore_s=typical["restore_s"],
            checkpoint_s=checkpoint_s,
            handover_s=handed.gap_s,
            warm_s=first_batch_s,
            leave_s=leave_s,
            ending_s=ENDING_S,
        )
        begins_s = [s.start_s - record.started_s for s in _firsts(_segments(record))]
        return cls(
            trained=tuple(zip(record.trials, trained, strict=True)),
            costs=costs,
            tail_s=_median([t.tail_s for t in trained if t.tail_s is not None]),
            submitted_s=max(0.0, _median(begins_s) - handed.gap_s),
        )

    def costs_of(self, trial: Trial) -> Costs:
        """The trial's own costs where it has measured them: the medians of its segments."""
        own = dict(trial.timings or {})
        for name in ("startup_s", "restore_s"):
            measured = [s for s in (getattr(one, name) for one in trial.segments) if s is not None]
            if measured:
                own[name] = median(measured)
        return replace(self.costs, **own)

    def starts_of(self, trial: Trial, trained: Training) -> Iterator[Begin]:
        """How each segment of the trial began.

        Where no measurement was kept the start-up is what neither the restore nor the usual first
        batch explains.
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
                yield Begin(known_s + restore_s + costs.warm_s, known_s, restore_s)
            elif startup_s is None:
                yield Begin(lead_s, max(0.0, lead_s - costs.warm_s - restore_s), restore_s)
            else:
                yield Begin(lead_s, startup_s, restore_s)


@dataclass(frozen=True, slots=True)
class _Handed:
    """How GPUs changed hands: medians of the seconds that each part took, 0 where none did.

    `gap_s`: from one trial's end to the next one's start on that GPU; `gap_after_stop_s`: the same
    after a stop; `stop_s`: from the decision to stop a trial to the end of its segment.
    """

    gap_s: float
    gap_after_stop_s: float
    stop_s: float

    @classmethod
    def of(cls, record: Record) -> _Handed:
        """From the sweep's segments and decisions."""
        gaps: dict[bool, list[float]] = {True: [], False: []}
        for earlier, later in _successions(_segments(record)):
            assert earlier.end_s is not None
            gaps[earlier.outcome in STOPPED].append(max(0.0, later.start_s - earlier.end_s))
        ends = [(s.trial, s.end_s) for s in _segments(record) if s.end_s is not None]
        stops = [
            min((end_s - told_s for trial, end_s in ends if trial == told and end_s >= told_s))
            for told, told_s in record.stops
            if any(trial == told and end_s >= told_s for trial, end_s in ends)
        ]
        return cls(
            gap_s=_median(gaps[False] or gaps[True]),
            gap_after_stop_s=_median(gaps[True] or gaps[False]),
            stop_s=_median(stops),
        )


def _trained(
    trial: Trial, record: Record, step_s: float | None, startup_s: float, leave_s: float
) -> Training:
    return training(
        trial.points,
        trial.segments,
        sign=record.config.objective.sign,
        typical_step_s=step_s,
        startup_s=(trial.timings or {}).get("startup_s", startup_s),
        leave_s=leave_s,
    )


def _told(record: Record, trained: Sequence[Training]) -> Iterator[tuple[float, float]]:
    """Of each segment with a measured start: its lead, and what of that was measured."""
    for trial, found in zip(record.trials, trained, strict=True):
        segments = sorted(trial.segments, key=lambda s: s.start_s)
        for segment, lead_s in zip(segments, found.leads_s, strict=True):
            if lead_s is not None and segment.startup_s is not None:
                yield lead_s, segment.startup_s + (segment.restore_s or 0.0)


def _timings(record: Record, name: str) -> list[float]:
    return [t.timings[name] for t in record.trials if t.timings and name in t.timings]


def _segments(record: Record) -> list[Segment]:
    found = (segment for trial in record.trials for segment in trial.segments)
    return sorted(found, key=lambda s: (s.start_s, s.trial))


def _firsts(segments: Sequence[Segment]) -> list[Segment]:
    """The first segment on each GPU."""
    first: dict[int, Segment] = {}
    for segment in segments:
        for gpu in segment.gpus:
            first.setdefault(gpu, segment)
    return list(first.values())


def _successions(segments: Sequence[Segment]) -> list[tuple[Segment, Segment]]:
    """Each ended segment with the one that came after it on a GPU of its own."""
    last: dict[int, Segment] = {}
    found = []
    for segment in segments:
        for gpu in segment.gpus:
            earlier = last.get(gpu)
            if earlier is not None and earlier.end_s is not None:
                found.append((earlier, segment))
            last[gpu] = segment
    return found


def _median(values: Sequence[float]) -> float:
    """The median; 0 of nothing."""
    return median(values) if values else 0.0

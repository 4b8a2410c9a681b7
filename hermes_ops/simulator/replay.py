"""The replay of a finished sweep under another policy.

A curve that was cut short is continued in two extreme ways, so that each figure has bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite
from statistics import median_low
from typing import Any

from hermes_ops.config.sweep_rules import with_sweep_rules
from hermes_ops.core.model import Gpu, JobId, Point, Policy
from hermes_ops.core.options import GuardOptions, without_guards
from hermes_ops.errors import ConfigError, HermesError, Problem
from hermes_ops.policies import make_policy
from hermes_ops.simulator.engine import simulate
from hermes_ops.simulator.event_log import EventLog
from hermes_ops.simulator.metrics import lowest_loss
from hermes_ops.simulator.oracle import oracle
from hermes_ops.simulator.sweep_history import RecordedSweep
from hermes_ops.simulator.workload import Costs, JobOutcome, SimulationRun, Work, Workload

OBSERVATION_SHIFTS_S = (0.0, -0.2, -0.15, -0.1, -0.05, 0.05, 0.1, 0.15, 0.2)
"""Shifts of the observation delay; a figure is the median over the simulations with each shift.
Which trial is preempted can depend on a fraction of a second that no policy controls."""

MOST_POINTS = 1_000
"""The maximum number of points of a missing part, whatever its number of steps."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The minimum and the maximum of a figure; both are None for what never happened.

    They are equal when no part that the figure depends on is missing.
    """

    low: float | None
    high: float | None

    @property
    def range(self) -> tuple[float, float] | None:
        """Both of them; None for what never happened."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def times(self, factor: float) -> Bounds:
        """Convert to another unit."""
        both = self.range
        return self if both is None else Bounds(factor * both[0], factor * both[1])

    def document(self) -> dict[str, float | None]:
        """Return the JSON document."""
        return {"low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """The policy to replay under, with its options (those of the guards among them).

    With `switch_s`, that is the whole cost of every segment; None: the measured costs.
    """

    policy: str
    options: Mapping[str, Any]
    guards: bool = True
    gpus: int | None = None
    switch_s: float | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay.

    `needed`: the cut-short trials whose missing part the result depends on; `runs`: one simulation
    for each continuation of the curves, with the usual observation delay.
    """

    settings: ReplaySettings
    gpus: int
    costs: Costs
    time_to_best_s: Bounds
    gpu_hours: Bounds
    preemptions: Bounds
    makespan_s: Bounds
    cut_short: tuple[int, ...]
    needed: tuple[int, ...]
    runs: tuple[tuple[str, SimulationRun], ...]


def replay(
    recorded: RecordedSweep,
    settings: ReplaySettings,
    *,
    log_of: Callable[[str], EventLog | None] = lambda _: None,
    shifts_s: Sequence[float] = OBSERVATION_SHIFTS_S,
) -> Replay:
    """Simulate the sweep alone on the pool under the policy, with its early stopping and limits.

    Each figure is the minimum and the maximum over the simulations of `completions`; each of these
    is the median over `shifts_s`, of which 0 comes first. The time to best of a simulation ends
    with the finished trial of the lowest loss. Where cut-short trials are needed, each of them can
    be the best, and the best complete trial only if no needed one has recorded a lower loss. Time
    budgets do not end the sweep.

    For a policy that neither reads curves nor preempts (fifo) the truth lies within the bounds if
    no missing step took longer than the slowest recorded one. For other policies the bounds are
    those of the extremes: between them a policy may decide differently, with a figure outside.

    Raise ConfigError for an unknown policy or option or an unknown number of GPUs.
    """
    usual, *others = [
        _replay_shifted(recorded, settings, shift_s, (lambda _: None) if shift_s else log_of)
        for shift_s in (shifts_s if recorded.workload.observation_delay_s else (0.0,))
    ]
    replays = (usual, *others)
    return replace(
        usual,
        time_to_best_s=_median_bounds(r.time_to_best_s for r in replays),
        gpu_hours=_median_bounds(r.gpu_hours for r in replays),
        preemptions=_median_bounds(r.preemptions for r in replays),
        makespan_s=_median_bounds(r.makespan_s for r in replays),
        needed=tuple(sorted({number for r in replays for number in r.needed})),
    )


def _replay_shifted(
    recorded: RecordedSweep,
    settings: ReplaySettings,
    shift_s: float,
    log_of: Callable[[str], EventLog | None],
) -> Replay:
    """Replay with the observation delay shifted by `shift_s`."""
    gpus = tuple(Gpu(index) for index in range(_gpus(recorded, settings)))
    workload, costs = _workload(recorded, settings)
    delay_s = max(0.0, workload.observation_delay_s + shift_s)
    runs = [
        (c.name, _simulate(recorded, c, gpus, settings, log_of(c.name)))
        for c in completions(replace(workload, observation_delay_s=delay_s))
    ]
    cut = {work.id: work.seconds for work in workload.jobs if work.cut_short}
    whole_s = [_ends_s(run, cut, recorded.never_best) for _, run in runs]
    needed = {o.work.id for _, run in runs for o in run.outcomes if _needs(o, cut)}
    return Replay(
        settings=settings,
        gpus=len(gpus),
        costs=costs,
        time_to_best_s=_bounds([end for ends in whole_s for end in ends]),
        gpu_hours=_bounds(_gpu_hours(run, costs.handover_s) for _, run in runs),
        preemptions=_bounds(float(sum(o.preemptions for o in run.outcomes)) for _, run in runs),
        makespan_s=_bounds(max((s.end_s for s in run.segments), default=0.0) for _, run in runs),
        cut_short=_numbers(cut),
        needed=_numbers(needed),
        runs=tuple(runs),
    )


def _median_bounds(bounds: Iterable[Bounds]) -> Bounds:
    """Return the lower median, a simulated value, of each end of the bounds that exist."""
    ranges = [both for b in bounds if (both := b.range) is not None]
    if not ranges:
        return Bounds(None, None)
    return Bounds(median_low(low for low, _ in ranges), median_low(high for _, high in ranges))


def _gpus(recorded: RecordedSweep, settings: ReplaySettings) -> int:
    gpus = settings.gpus if settings.gpus is not None else recorded.gpus
    each = recorded.config.trial.gpu_range.least
    if gpus is None or gpus < each:
        fact = "an unknown number" if gpus is None else str(gpus)
        problem = Problem("gpus", fact, f"at least {each}", "name it with --gpus")
        raise ConfigError("the replay", (problem,))
    return gpus


def _workload(recorded: RecordedSweep, settings: ReplaySettings) -> tuple[Workload, Costs]:
    """Return the workload with the costs of the settings, and the typical costs."""
    if settings.switch_s is None:
        return recorded.workload, recorded.costs
    costs = Costs(startup_s=settings.switch_s)
    jobs = tuple(replace(work, costs=costs, starts=()) for work in recorded.workload.jobs)
    return replace(recorded.workload, jobs=jobs), costs


def _simulate(
    recorded: RecordedSweep,
    completion: Completion,
    gpus: tuple[Gpu, ...],
    settings: ReplaySettings,
    log: EventLog | None,
) -> SimulationRun:
    policy = _policy(recorded, completion.workload, settings)
    return simulate(completion.workload, gpus, policy, log=log)


def _policy(recorded: RecordedSweep, workload: Workload, settings: ReplaySettings) -> Policy[Any]:
    """Build the policy like the controller of a pool: guards, then the sweep's own limits."""
    knowledge = {"oracle": oracle(workload), "prior": ()}
    policy = make_policy(settings.policy, without_guards(settings.options), knowledge)
    configs = {workload.name: recorded.config}
    if not settings.guards:
        return with_sweep_rules(policy, configs, open_per_gpu=None)
    guards = GuardOptions.parse(settings.options)
    return with_sweep_rules(guards.around(policy), configs, guards.open_per_gpu)


def _needs(outcome: JobOutcome, cut: Mapping[JobId, float]) -> bool:
    """Return whether the simulation trained the trial beyond its recording."""
    recorded_s = cut.get(outcome.work.id)
    if recorded_s is None:
        return False
    return outcome.state == "finished" or outcome.trained_s > recorded_s


def _ends_s(
    run: SimulationRun, cut: Mapping[JobId, float], never: Collection[JobId]
) -> list[float]:
    """Return the ends of the finished trials that can be the best of the run."""
    able = [o for o in run.outcomes if o.work.id not in never]
    finished = [o for o in able if o.state == "finished" and o.ended_s is not None]
    open_ = [o for o in finished if o.work.id in cut]
    complete = [o for o in finished if o.work.id not in cut and _can_be_best(o)]
    shown = min((_recorded_lowest(o, cut) for o in open_), default=float("inf"))
    best = min(complete, key=lambda o: lowest_loss(o.work), default=None)
    candidates = open_ if best is None or lowest_loss(best.work) > shown else [best, *open_]
    return [o.ended_s for o in candidates if o.ended_s is not None]


def _can_be_best(outcome: JobOutcome) -> bool:
    """Return whether a trial can be the best: it has a value, and did not fail."""
    curve = outcome.work.curve
    return bool(curve) and isfinite(curve[-1].loss) and isfinite(lowest_loss(outcome.work))


def _recorded_lowest(outcome: JobOutcome, cut: Mapping[JobId, float]) -> float:
    recorded_s = cut[outcome.work.id]
    shown = (p.loss for p in outcome.work.curve if p.seconds <= recorded_s and isfinite(p.loss))
    return min(shown, default=float("inf"))


def _gpu_hours(run: SimulationRun, handover_s: float) -> float:
    """Return the GPU-hours as a live sweep counts them, without the handover of GPUs."""
    return (
        sum(max(0.0, s.end_s - s.begin_s - handover_s) * len(s.gpus) for s in run.segments) / 3600.0
    )


def _bounds(values: Iterable[float]) -> Bounds:
    figures = list(values)
    return Bounds(min(figures), max(figures)) if figures else Bounds(None, None)


def _numbers(jobs: Iterable[JobId]) -> tuple[int, ...]:
    return tuple(sorted(int(job.rpartition("/")[2]) for job in jobs))


@dataclass(frozen=True, slots=True)
class Completion:
    """The workload with every missing part replaced by the same guess for all trials."""

    name: str
    workload: Workload


def completions(workload: Workload) -> tuple[Completion, ...]:
    """Return the workload itself when no curve is cut short; else three continuations.

    * `at-once`: the trial would have ended with its last recorded step;
    * `slow-and-better`: it needs all its planned steps, each as long as its slowest recorded one
      (or the sweep's slowest, if it has none), then the longest exit of all trials; its loss falls
      evenly to the lowest of the sweep;
    * `slow-and-flat`: as long, with a constant loss.

    Raise HermesError when a trial is cut short and no trial has recorded how long a step takes.
    """
    if not any(work.cut_short for work in workload.jobs):
        return (Completion("whole", workload),)
    extremes = _Extremes.from_workload(workload)
    return (
        Completion("at-once", workload),
        Completion("slow-and-better", _completed(workload, extremes, better=True)),
        Completion("slow-and-flat", _completed(workload, extremes, better=False)),
    )


@dataclass(frozen=True, slots=True)
class _Extremes:
    """The extremes that the sweep has recorded."""

    slowest_step_s: float
    longest_exit_s: float
    lowest: float
    highest: float

    @classmethod
    def from_workload(cls, workload: Workload) -> _Extremes:
        slowest_s = max((_slowest_step_s(work) for work in workload.jobs), default=0.0)
        missing = [w.id for w in workload.jobs if w.cut_short and _missing(w)]
        if slowest_s == 0.0 and missing:
            raise HermesError(
                f"nothing can be said of {workload.name!r}: no trial has shown how long a step "
                f"takes, and {missing[0]} did not come to its end. Let a trial finish first."
            )
        losses = [p.loss for work in workload.jobs for p in work.curve if isfinite(p.loss)]
        exits_s = (w.seconds - w.curve[-1].seconds for w in workload.jobs if w.curve)
        return cls(
            slowest_step_s=slowest_s,
            longest_exit_s=max(exits_s, default=0.0),
            lowest=min(losses, default=0.0),
            highest=max(losses, default=0.0),
        )


def _completed(workload: Workload, extremes: _Extremes, *, better: bool) -> Workload:
    jobs = (_work(w, extremes, better=better) if w.cut_short else w for w in workload.jobs)
    return replace(workload, jobs=tuple(jobs))


def _work(work: Work, extremes: _Extremes, *, better: bool) -> Work:
    step_s = _slowest_step_s(work) or extremes.slowest_step_s
    seconds = work.seconds + _missing(work) * step_s + extremes.longest_exit_s
    points = tuple(_points(work, step_s, extremes, better=better))
    return replace(work, seconds=seconds, curve=(*work.curve, *points))


def _points(work: Work, step_s: float, extremes: _Extremes, *, better: bool) -> Iterator[Point]:
    missing = _missing(work)
    finite = [p.loss for p in work.curve if isfinite(p.loss)]
    begin = finite[-1] if finite else extremes.highest
    end = min(extremes.lowest, lowest_loss(work)) if better else begin
    last = work.curve[-1].step if work.curve else 0
    stride = max(1, -(-missing // MOST_POINTS))
    for done in (*range(stride, missing, stride), *([missing] if missing else [])):
        loss = begin + (end - begin) * done / missing
        yield Point(last + done, loss, work.seconds + done * step_s)


def _missing(work: Work) -> int:
    """Return the number of planned steps that were not recorded."""
    last = work.curve[-1].step if work.curve else 0
    return max(0, (work.total_steps or 0) - last)


def _slowest_step_s(work: Work) -> float:
    """Return the longest of the trial's recorded steps; 0 without a point."""
    begin = Point(0, inf, 0.0)
    return max(
        (
            (later.seconds - earlier.seconds) / (later.step - earlier.step)
            for earlier, later in pairwise((begin, *work.curve))
            if later.step > earlier.step
        ),
        default=0.0,
    )

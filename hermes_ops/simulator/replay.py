"""The replay of a finished sweep under another policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median_low
from typing import Any

from hermes_ops.config.sweep_rules import with_sweep_rules
from hermes_ops.core.model import Gpu, JobId, Policy
from hermes_ops.core.options import GuardOptions, without_guards
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.policies import make_policy
from hermes_ops.simulator.completions import Completion, completions
from hermes_ops.simulator.engine import simulate
from hermes_ops.simulator.event_log import EventLog
from hermes_ops.simulator.metrics import lowest_loss
from hermes_ops.simulator.oracle import oracle
from hermes_ops.simulator.sweep_history import RecordedSweep
from hermes_ops.simulator.workload import Costs, JobOutcome, SimulationRun, Workload

OBSERVATION_SHIFTS_S = (0.0, -0.2, -0.15, -0.1, -0.05, 0.05, 0.1, 0.15, 0.2)
"""Shifts of the observation delay; a figure is the median over the simulations with each shift.
Which trial is preempted can depend on a fraction of a second that no policy controls."""


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
    runs = [
        (c.name, _simulate(recorded, c, gpus, settings, log_of(c.name)))
        for c in completions(_with_delay(workload, shift_s))
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


def _with_delay(workload: Workload, shift_s: float) -> Workload:
    return replace(workload, observation_delay_s=max(0.0, workload.observation_delay_s + shift_s))


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

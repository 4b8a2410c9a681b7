"""What the trials of a finished sweep would have done under another policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median_low
from typing import Any

from hermes_ops.config.limits import within_sweeps
from hermes_ops.core.guard_options import GuardOptions, without_guards
from hermes_ops.core.model import Gpu, JobId, Policy
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.policies import make_policy
from hermes_ops.simulator.completions import Completion, completions
from hermes_ops.simulator.engine import oracle, simulate
from hermes_ops.simulator.event_log import EventLog
from hermes_ops.simulator.metrics import lowest_loss
from hermes_ops.simulator.recorded import Recorded
from hermes_ops.simulator.workload import Costs, Outcome, Run, Workload

SIGHT_SHIFTS_S = (0.0, -0.2, -0.15, -0.1, -0.05, 0.05, 0.1, 0.15, 0.2)
"""Values are seen so much sooner or later than usual in the simulations of which a figure is the
median: which trial makes way can hang on a part of a second that nobody decides."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the most that a figure can be; both are None for what never came about.

    They are equal when nothing that was needed is missing.
    """

    low: float | None
    high: float | None

    @property
    def range(self) -> tuple[float, float] | None:
        """Both of them; None for what never came about."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def times(self, factor: float) -> Bounds:
        """In another unit."""
        found = self.range
        return self if found is None else Bounds(factor * found[0], factor * found[1])

    def document(self) -> dict[str, float | None]:
        """As JSON."""
        return {"low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Choice:
    """The policy to replay under, with its options (those of the guards among them).

    With `switch_s`, every segment costs as much and nothing else; None: as it was measured.
    """

    policy: str
    options: Mapping[str, Any]
    guards: bool = True
    gpus: int | None = None
    switch_s: float | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """What the trials would have done. `needed`: the cut-short ones of whose missing part the
    result depends; `runs`: one simulation for each way in which the curves could have gone on,
    values seen as late as usual.
    """

    choice: Choice
    gpus: int
    costs: Costs
    time_to_best_s: Bounds
    gpu_hours: Bounds
    preemptions: Bounds
    makespan_s: Bounds
    cut_short: tuple[int, ...]
    needed: tuple[int, ...]
    runs: tuple[tuple[str, Run], ...]


def replay(
    recorded: Recorded,
    choice: Choice,
    *,
    log_of: Callable[[str], EventLog | None] = lambda _: None,
    shifts_s: Sequence[float] = SIGHT_SHIFTS_S,
) -> Replay:
    """Simulate the sweep alone on the pool under the policy, its early stopping and limits kept.

    Each figure is the least and the most over the simulations of `completions`, and of each of
    these the median over `shifts_s`, of which 0 comes first. The time to best is, in each
    simulation, that until the finished trial with the lowest loss has ended; where cut-short trials
    are needed, each of them can have been the best, and the best complete trial can only while no
    needed one has shown a lower loss. Budgets of time do not end it.

    For a policy that never looks at curves nor preempts (fifo) the truth lies within the bounds if
    no missing step took longer than the slowest recorded one. For others the bounds are those of
    the extremes alone: a policy may take a turn between them that lies outside.

    Raises ConfigError for an unknown policy or option or an unknown number of GPUs.
    """
    usual, *others = [
        _replayed(recorded, choice, shift_s, (lambda _: None) if shift_s else log_of)
        for shift_s in (shifts_s if recorded.workload.sight_s else (0.0,))
    ]
    found = (usual, *others)
    return replace(
        usual,
        time_to_best_s=_middle(r.time_to_best_s for r in found),
        gpu_hours=_middle(r.gpu_hours for r in found),
        preemptions=_middle(r.preemptions for r in found),
        makespan_s=_middle(r.makespan_s for r in found),
        needed=tuple(sorted({number for r in found for number in r.needed})),
    )


def _replayed(
    recorded: Recorded, choice: Choice, shift_s: float, log_of: Callable[[str], EventLog | None]
) -> Replay:
    """The replay in which values are seen so much later than usual."""
    gpus = tuple(Gpu(index) for index in range(_gpus(recorded, choice)))
    workload, costs = _workload(recorded, choice)
    runs = [
        (c.name, _simulated(recorded, c, gpus, choice, log_of(c.name)))
        for c in completions(_seen_later(workload, shift_s))
    ]
    cut = {work.id: work.seconds for work in workload.jobs if work.cut_short}
    whole_s = [_ends_s(run, cut, recorded.never_best) for _, run in runs]
    needed = {o.work.id for _, run in runs for o in run.outcomes if _needs(o, cut)}
    return Replay(
        choice=choice,
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


def _middle(bounds: Iterable[Bounds]) -> Bounds:
    """The lower median of each end, so that it is one that was simulated; of those that are."""
    known = [found for b in bounds if (found := b.range) is not None]
    if not known:
        return Bounds(None, None)
    return Bounds(median_low(low for low, _ in known), median_low(high for _, high in known))


def _seen_later(workload: Workload, shift_s: float) -> Workload:
    return replace(workload, sight_s=max(0.0, workload.sight_s + shift_s))


def _gpus(recorded: Recorded, choice: Choice) -> int:
    gpus = choice.gpus if choice.gpus is not None else recorded.gpus
    each = recorded.config.trial.gpus
    if gpus is None or gpus < each:
        found = "an unknown number" if gpus is None else str(gpus)
        problem = Problem("gpus", found, f"at least {each}", "name it with --gpus")
        raise ConfigError("the replay", (problem,))
    return gpus


def _workload(recorded: Recorded, choice: Choice) -> tuple[Workload, Costs]:
    """The workload with the costs of the choice, and the typical ones."""
    if choice.switch_s is None:
        return recorded.workload, recorded.costs
    costs = Costs(startup_s=choice.switch_s)
    jobs = tuple(replace(work, costs=costs, starts=()) for work in recorded.workload.jobs)
    return replace(recorded.workload, jobs=jobs), costs


def _simulated(
    recorded: Recorded,
    completion: Completion,
    gpus: tuple[Gpu, ...],
    choice: Choice,
    log: EventLog | None,
) -> Run:
    policy = _policy(recorded, completion.workload, choice)
    return simulate(completion.workload, gpus, policy, log=log)


def _policy(recorded: Recorded, workload: Workload, choice: Choice) -> Policy[Any]:
    """As the controller of a pool builds it: guards, then the sweep's own limits."""
    own, given = without_guards(choice.options), {"oracle": oracle(workload), "prior": ()}
    policy, configs = make_policy(choice.policy, own, given), {workload.name: recorded.config}
    if not choice.guards:
        return within_sweeps(policy, configs, open_per_gpu=None)
    guards = GuardOptions.of(choice.options)
    return within_sweeps(guards.around(policy), configs, guards.open)


def _needs(outcome: Outcome, cut: Mapping[JobId, float]) -> bool:
    """True when the trial came to the end of what was recorded and was to go on."""
    recorded_s = cut.get(outcome.work.id)
    if recorded_s is None:
        return False
    return outcome.state == "finished" or outcome.trained_s > recorded_s


def _ends_s(run: Run, cut: Mapping[JobId, float], never: Collection[JobId]) -> list[float]:
    """When each finished trial ended that can be the best of the run."""
    able = [o for o in run.outcomes if o.work.id not in never]
    finished = [o for o in able if o.state == "finished" and o.ended_s is not None]
    open_ = [o for o in finished if o.work.id in cut]
    complete = [o for o in finished if o.work.id not in cut and _has_shown_all(o)]
    shown = min((_recorded_lowest(o, cut) for o in open_), default=float("inf"))
    best = min(complete, key=lambda o: lowest_loss(o.work), default=None)
    candidates = open_ if best is None or lowest_loss(best.work) > shown else [best, *open_]
    return [o.ended_s for o in candidates if o.ended_s is not None]


def _has_shown_all(outcome: Outcome) -> bool:
    """True for a trial that can be the best: it has a value, and did not fail."""
    curve = outcome.work.curve
    return bool(curve) and isfinite(curve[-1].loss) and isfinite(lowest_loss(outcome.work))


def _recorded_lowest(outcome: Outcome, cut: Mapping[JobId, float]) -> float:
    recorded_s = cut[outcome.work.id]
    shown = (p.loss for p in outcome.work.curve if p.seconds <= recorded_s and isfinite(p.loss))
    return min(shown, default=float("inf"))


def _gpu_hours(run: Run, handover_s: float) -> float:
    """As a live sweep counts them: the time in which a GPU changes hands is nobody's."""
    return (
        sum(max(0.0, s.end_s - s.begin_s - handover_s) * len(s.gpus) for s in run.segments) / 3600.0
    )


def _bounds(values: Iterable[float]) -> Bounds:
    found = list(values)
    return Bounds(min(found), max(found)) if found else Bounds(None, None)


def _numbers(jobs: Iterable[JobId]) -> tuple[int, ...]:
    return tuple(sorted(int(job.rpartition("/")[2]) for job in jobs))

"""The figures of a simulation. Times count from the first submission."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from math import inf, isfinite

import numpy as np

from hermes_ops.core.model import JobId
from hermes_ops.simulator.workload import JobOutcome, SimulationRun, Work, Workload

WITHIN = 0.01  # "good": a loss at most this much above the lowest of all, relative to it


@dataclass(frozen=True, slots=True)
class Metrics:
    """The figures of one run, with the names of its JSON. None: it never happened.

    Completion: submission to end, of the jobs that finished. Queueing: seconds without GPUs between
    submission and end. Utilisation: part of GPUs times makespan that was held, costs included.
    `time_to_best_seconds`: until the trial with the lowest loss of all has run all its epochs.
    `time_to_good_seconds`: until any trial has shown a loss within 1 % of that lowest one.
    `fairness_*`: Themis' rho, see `fairness`; `worst_finish_time_fairness`: the largest rho of
    `static_fairness`. `decision_ms_*` are measured, all others virtual.
    """

    jobs: int
    finished: int
    mean_completion_seconds: float | None
    median_completion_seconds: float | None
    p95_completion_seconds: float | None
    p99_completion_seconds: float | None
    mean_queueing_seconds: float
    makespan_seconds: float
    utilisation: float
    gpu_seconds: float
    lost_gpu_seconds: float
    preemptions: int
    resizes: int
    completed_in_window: int
    fairness_mean: float | None
    fairness_median: float | None
    fairness_p99: float | None
    fairness_max: float | None
    worst_finish_time_fairness: float | None
    time_to_best_seconds: float | None
    time_to_good_seconds: float | None
    decisions: int
    decision_ms: float | None
    decision_ms_median: float | None

    def document(self) -> dict[str, float | int | None]:
        """Return the figures by name; None for one that is not finite."""
        return {n: v if v is None or isfinite(v) else None for n, v in asdict(self).items()}


def measure(run: SimulationRun) -> Metrics:
    """Compute the figures of a run."""
    completions = [o.completion_s for o in run.outcomes if o.completion_s is not None]
    rho = list(fairness(run).values())
    decision_ms = [1000.0 * s for s in run.decision_s]
    return Metrics(
        jobs=len(run.outcomes),
        finished=len(completions),
        mean_completion_seconds=_mean(completions),
        median_completion_seconds=percentile(completions, 50),
        p95_completion_seconds=percentile(completions, 95),
        p99_completion_seconds=percentile(completions, 99),
        mean_queueing_seconds=_mean([o.waited_s for o in run.outcomes]) or 0.0,
        makespan_seconds=makespan_s(run),
        utilisation=utilisation(run),
        gpu_seconds=sum(o.service_gpu_s for o in run.outcomes),
        lost_gpu_seconds=max(0.0, sum(o.lost_gpu_s for o in run.outcomes)),  # float rounding
        preemptions=sum(o.preemptions for o in run.outcomes),
        resizes=sum(o.resizes for o in run.outcomes),
        completed_in_window=_completed_in_window(run),
        fairness_mean=_mean(rho),
        fairness_median=percentile(rho, 50),
        fairness_p99=percentile(rho, 99),
        fairness_max=max(rho, default=None),
        worst_finish_time_fairness=max(static_fairness(run).values(), default=None),
        time_to_best_seconds=time_to_best_s(run),
        time_to_good_seconds=time_to_good_s(run),
        decisions=run.decisions,
        decision_ms=_mean(decision_ms),
        decision_ms_median=percentile(decision_ms, 50),
    )


def _completed_in_window(run: SimulationRun) -> int:
    """Return the number of jobs that finished until the end of the workload's window."""
    window_s = run.workload.window_s
    last_s = inf if window_s is None else window_s
    return sum(o.completion_s is not None and (o.ended_s or 0.0) <= last_s for o in run.outcomes)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the percentile, linear between the two nearest values; None without values."""
    return float(np.percentile(values, percent)) if len(values) else None


def makespan_s(run: SimulationRun) -> float:
    """Return the time from the first submission until the last GPU is released; 0 without any."""
    return max((s.end_s for s in run.segments), default=_begin_s(run)) - _begin_s(run)


def utilisation(run: SimulationRun) -> float:
    """Return the part of GPUs x makespan in which a GPU was held, in [0, 1]; 0 if nothing ran.

    A GPU that several jobs share counts once.
    """
    stretches: dict[int, list[tuple[float, float]]] = {gpu.index: [] for gpu in run.gpus}
    for segment in run.segments:
        for gpu in segment.gpus:
            stretches[gpu].append((segment.begin_s, segment.end_s))
    whole = len(run.gpus) * makespan_s(run)
    return min(1.0, sum(map(_covered, stretches.values())) / whole) if whole > 0 else 0.0


def _covered(stretches: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of stretches."""
    total, until = 0.0, -inf
    for begin, end in sorted(stretches):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def fairness(run: SimulationRun) -> dict[JobId, float]:
    """Return the finish-time fairness of each finished job: shared over independent time.

    Shared time: its completion time. Independent time: its service alone on its share of the GPUs,
    of which it uses no more than it requests; 1 is fair, less is better. The share is GPUs / n,
    with n the mean number of unfinished jobs during its stay, including itself.
    Source: Mahajan et al., "Themis", NSDI 2020, section 3; counting n as a mean over the stay,
    and leaving out that a job can be slower on fewer GPUs, are our choices.
    """
    present = _Presence(run.outcomes)
    rho: dict[JobId, float] = {}
    for outcome in run.outcomes:
        work, alone_s = outcome.work, outcome.work.alone_s
        if outcome.completion_s is not None and outcome.ended_s is not None and alone_s:
            share = len(run.gpus) / present.mean(work.submitted_s, outcome.ended_s)
            independent_s = alone_s * work.gpus / min(share, work.gpus)
            rho[work.id] = outcome.completion_s / independent_s
    return rho


def static_fairness(run: SimulationRun) -> dict[JobId, float]:
    """Return the finish-time fairness of each finished job against a fixed share of the GPUs.

    Its completion time over its time alone on the requested GPUs x max(1, jobs / GPUs), with all
    jobs of the workload, whether present or not. Source: the evaluation of Zheng et al.,
    "Shockwave", NSDI 2023 (a job is unfair to above 1.05); the bound of 1 is ours.
    """
    contention = max(1.0, len(run.outcomes) / len(run.gpus))
    return {
        o.work.id: o.completion_s / (alone_s * contention)
        for o in run.outcomes
        if o.completion_s is not None and (alone_s := o.work.alone_s)
    }


class _Presence:
    """The number of unfinished submitted jobs, as an integral over time."""

    def __init__(self, outcomes: Sequence[JobOutcome]) -> None:
        last_s = max((o.ended_s for o in outcomes if o.ended_s is not None), default=0.0)
        changes = [(o.work.submitted_s, 1) for o in outcomes]
        changes += [(o.ended_s if o.ended_s is not None else last_s, -1) for o in outcomes]
        changes.sort()
        self._times = [at_s for at_s, _ in changes]
        self._counts = list(accumulate(by for _, by in changes))
        areas = (
            (later - at) * count
            for (at, later), count in zip(pairwise(self._times), self._counts, strict=False)
        )
        self._areas = [0.0, *accumulate(areas)]

    def mean(self, begin_s: float, end_s: float) -> float:
        """Return the mean number of jobs between two times; 1 for an empty interval."""
        if end_s <= begin_s:
            return 1.0
        return (self._until(end_s) - self._until(begin_s)) / (end_s - begin_s)

    def _until(self, at_s: float) -> float:
        place = bisect_right(self._times, at_s) - 1
        if place < 0:
            return 0.0
        return self._areas[place] + (at_s - self._times[place]) * self._counts[place]


def lowest_loss(work: Work) -> float:
    """Return the lowest loss of a job's whole curve; inf without any."""
    return min((p.loss for p in work.curve if isfinite(p.loss)), default=inf)


def best_work(workload: Workload) -> Work | None:
    """Return the job with the lowest loss, of two the first in the workload; None without any."""
    best = min(workload.jobs, key=lowest_loss, default=None)
    return best if best is not None and isfinite(lowest_loss(best)) else None


def time_to_best_s(run: SimulationRun) -> float | None:
    """Return the seconds until the trial with the lowest loss has run all its epochs."""
    best = best_work(run.workload)
    if best is None:
        return None
    outcome = next(o for o in run.outcomes if o.work.id == best.id)
    if outcome.completion_s is None or outcome.ended_s is None:
        return None
    return outcome.ended_s - _begin_s(run)


def time_to_good_s(run: SimulationRun, within: float = WITHIN) -> float | None:
    """Return the seconds until a trial has a loss at most `within` (relative) above the lowest."""
    best = best_work(run.workload)
    if best is None:
        return None
    lowest = lowest_loss(best)
    limit = lowest + within * abs(lowest)
    return next((s.at_s - _begin_s(run) for s in run.observations if s.loss <= limit), None)


def regret(run: SimulationRun) -> tuple[tuple[float, float], ...]:
    """Return the best loss so far minus the lowest of all, as (seconds, regret) of each fall.

    It is a step function from the first observed loss on. It never rises, and is 0 once the lowest
    loss of all is observed.
    """
    best = best_work(run.workload)
    if best is None:
        return ()
    return tuple(_falls(run, lowest_loss(best)))


def _falls(run: SimulationRun, lowest: float) -> Iterator[tuple[float, float]]:
    best = inf
    for observation in run.observations:
        if observation.loss < best:
            best = observation.loss
            yield observation.at_s - _begin_s(run), best - lowest


def _begin_s(run: SimulationRun) -> float:
    return min((w.submitted_s for w in run.workload.jobs), default=0.0)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class TeamResult:
    """The figures of one team's jobs, with the names of their JSON.

    Waiting: seconds without GPUs between submission and end. `fairness_*`: finish-time fairness of
    its finished jobs (`metrics.fairness`; 1 is fair, less is better), None without any.
    """

    team: str
    jobs: int
    mean_waiting_seconds: float
    p99_waiting_seconds: float
    gpu_seconds: float
    fairness_mean: float | None
    fairness_median: float | None
    fairness_p99: float | None

    def document(self) -> dict[str, float | int | None]:
        """Return the figures by name."""
        return {name: value for name, value in asdict(self).items() if name != "team"}


def team_results(run: SimulationRun) -> tuple[TeamResult, ...]:
    """Return the results of all teams by name; none where no job has a team."""
    by_team: dict[str, list[JobOutcome]] = {}
    for outcome in run.outcomes:
        by_team.setdefault(outcome.work.virtual_cluster, []).append(outcome)
    if set(by_team) <= {""}:
        return ()
    rho = fairness(run)
    return tuple(_result(team, by_team[team], rho) for team in sorted(by_team))


def _result(
    team: str, outcomes: Sequence[JobOutcome], fairness_of: dict[JobId, float]
) -> TeamResult:
    waited = [outcome.waited_s for outcome in outcomes]
    rho = [fairness_of[o.work.id] for o in outcomes if o.work.id in fairness_of]
    return TeamResult(
        team=team,
        jobs=len(outcomes),
        mean_waiting_seconds=sum(waited) / len(waited),
        p99_waiting_seconds=percentile(waited, 99) or 0.0,
        gpu_seconds=sum(outcome.service_gpu_s for outcome in outcomes),
        fairness_mean=sum(rho) / len(rho) if rho else None,
        fairness_median=percentile(rho, 50),
        fairness_p99=percentile(rho, 99),
    )


def jain_index(values: Sequence[float]) -> float | None:
    """Return Jain's fairness index, (sum x)^2 / (n sum x^2), in [1 / n, 1]; None without values.

    1: all are equal. Source: Jain, Chiu, Hawe, DEC-TR-301, 1984.
    """
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares > 0 else None

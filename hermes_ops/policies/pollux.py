"""Pollux: the sizes with the greatest fair goodput, by an exact knapsack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import ClassVar

import numpy as np

from hermes_ops.core.goodput import goodputs
from hermes_ops.core.model import Grant, Job, JobId, Plan, Reason, Snapshot, Term
from hermes_ops.core.oracle import Oracle
from hermes_ops.core.order import submission
from hermes_ops.core.sizes import StepTime
from hermes_ops.core.speed_model import SpeedModel, fit_speed_model
from hermes_ops.policies.toolbox.job_speeds import MeasuredSpeeds, kind_key, packed
from hermes_ops.policies.toolbox.knapsack import Floats, knapsack, option_table
from hermes_ops.policies.toolbox.parameter_checks import positive
from hermes_ops.policies.toolbox.sized_grants import SizingProblem
from hermes_ops.policies.toolbox.whole_nodes import cleared, node_size, packing_sizes

MOST_GPUS = 64
RESTART_S = 30.0
WEIGHT = 0.25
FLOOR = 1e-3


@dataclass(frozen=True, slots=True)
class PolluxMemory:
    """The grants of the last decision and its time: at one instant they are not changed."""

    at_s: float | None = None
    grants: tuple[Grant, ...] = ()


@dataclass(frozen=True, slots=True)
class Pollux:
    """Choose the sizes with the greatest sum of -1 / (0.25 x F x speed-up + 0.001) over all jobs.

    The speed-up of a size is its goodput (steps of the initial batch a second, with the batch that
    is best there) over that of the job's fair size, the largest up to GPUs / jobs, rounded up. F is
    1 for the size that a job holds, else max(age - 30 s x restarts, 0) / (age + 30 s). A job gets
    at most twice the GPUs of the largest size that it has tried, at most 64, and at first its
    least. Sizes of a node and more are whole nodes. Decided again every `interval_s`.

    With an oracle step times are known; without one, or with `blind`, they are fitted to what
    jobs have measured: each job's own, or with `shared` those of all jobs of a kind, who then share
    the largest size as well.

    Source: Qiao et al., "Pollux", OSDI 2021, section 4.2, and its public artefact (petuum/adaptdl,
    commit c793c70) for the numbers. Ours: the objective is maximised exactly, by a multiple-choice
    knapsack over packed placements, in the place of the artefact's genetic algorithm, which also
    spreads jobs over nodes. The batch is left to the job.
    """

    oracle: Oracle | None = None
    blind: bool = False
    shared: bool = True
    interval_s: float = 60.0
    name: ClassVar[str] = "pollux"
    preempts: ClassVar[bool] = True
    sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("interval_s", self.interval_s)

    def initial(self) -> PolluxMemory:
        """Return the memory without a decision."""
        return PolluxMemory()

    def decide(self, snapshot: Snapshot, memory: PolluxMemory) -> tuple[Plan, PolluxMemory]:
        """Return the plan of the greatest value; the last one again at the same instant."""
        problem = SizingProblem.from_snapshot(snapshot)
        grants = _still_possible(problem, memory.grants) if memory.at_s == snapshot.time_s else None
        if grants is None:
            sizes = self._sizes(problem)
            grants = problem.grants(sizes, moving=cleared(problem, sizes))
        order = sorted(snapshot.queue, key=lambda job: _rank(job, snapshot.time_s))
        review_s = snapshot.time_s + self.interval_s if problem.jobs else None
        plan = problem.plan(grants, _reason(grants), order, review_s)
        return plan, PolluxMemory(snapshot.time_s, grants)

    def _sizes(self, problem: SizingProblem) -> dict[JobId, int]:
        now_s = problem.snapshot.time_s
        jobs = sorted(problem.jobs, key=lambda job: _rank(job, now_s))
        if not jobs:
            return {}
        oracle = None if self.blind else self.oracle
        speeds = _Goodputs(problem, oracle, shared=self.shared)
        fair = ceil(problem.gpus / len(jobs))
        each = node_size(problem)
        options = []
        for job in jobs:
            able = packing_sizes(job, min(speeds.most(job), problem.gpus), each)
            held = {problem.held(job)} - {0}  # of which nothing that costs a restart takes it away
            options.append(tuple(sorted(held.union(able))))
        sizes, values = option_table(options, -1.0 / FLOOR)
        for row, job in enumerate(jobs):
            best = max(
                [n for n in packing_sizes(job, fair, each) if n <= fair], default=job.min_gpus
            )
            rates = speeds.rates(job, (*options[row], best))
            alone = max(float(rates[-1]), 1e-12)
            factors = _restart_factors(job, options[row], problem.held(job), now_s)
            column = slice(1, len(options[row]) + 1)
            values[row, column] = -1.0 / (WEIGHT * factors * rates[:-1] / alone + FLOOR)
        chosen = knapsack(sizes, values, problem.gpus)
        return {job.id: int(sizes[row, chosen[row]]) for row, job in enumerate(jobs)}


def _restart_factors(job: Job, sizes: Sequence[int], held: int, now_s: float) -> Floats:
    age_s = max(0.0, now_s - job.submitted_s)
    moved = max(age_s - RESTART_S * max(0, job.segments - 1), 0.0) / (age_s + RESTART_S)
    return np.where(np.array(sizes, dtype=np.int64) == held, 1.0, moved)


class _Goodputs:
    """The goodput of jobs by size, up to a factor a job, and the most GPUs that each may get."""

    def __init__(self, problem: SizingProblem, oracle: Oracle | None, *, shared: bool) -> None:
        self._oracle, self._shared = oracle, shared
        self._snapshot = problem.snapshot
        self._placements: dict[int, tuple[int, ...]] = {}
        self._plain = MeasuredSpeeds(problem.snapshot)
        self._times: dict[object, set[StepTime]] = {}
        self._tried: dict[object, int] = {}
        self._noise: dict[object, float] = {}
        for job in problem.snapshot.jobs:
            key = self._key(job)
            self._times.setdefault(key, set()).update(job.step_times)
            tried = max((time.gpus for time in job.step_times), default=0)
            self._tried[key] = max(self._tried.get(key, 0), tried)
            if job.noise_scale is not None:
                self._noise[key] = min(self._noise.get(key, job.noise_scale), job.noise_scale)

    def most(self, job: Job) -> int:
        """Return twice the largest size tried, at first the least, at most MOST_GPUS."""
        tried = self._tried.get(self._key(job), 0)
        return max(job.min_gpus, min(2 * tried, MOST_GPUS))

    def rates(self, job: Job, sizes: Sequence[int]) -> Floats:
        """Return the goodput on each size, on as few nodes as possible."""
        if self._oracle is not None:
            rates = [self._oracle.rate(job, self._packed(size)) for size in sizes]
            return np.array(rates)
        if job.batch_range is None:
            return np.array([self._plain.speed(job, size) for size in sizes])
        key = self._key(job)
        model = _fitted(_extremes(self._times[key]))
        if model is None:
            return np.array(sizes, dtype=np.float64)
        noise = job.noise_scale if job.noise_scale is not None else self._noise.get(key, 0.0)
        nodes = [len(self._packed(size)) for size in sizes]
        return goodputs(model, job.batch_range, noise, sizes, nodes).rate

    def _key(self, job: Job) -> object:
        return kind_key(job) if self._shared and self._oracle is None else job.id

    def _packed(self, size: int) -> tuple[int, ...]:
        if size not in self._placements:
            self._placements[size] = packed(self._snapshot, size)
        return self._placements[size]


def _extremes(times: Iterable[StepTime]) -> tuple[StepTime, ...]:
    """Return of each number of GPUs and nodes the times with the fewest and the most samples.

    A time between them tells little more, and each new time costs a fit.
    """
    by_size: dict[tuple[int, int], list[StepTime]] = {}
    for time in sorted(times, key=_by_size):
        by_size.setdefault((time.gpus, time.nodes), []).append(time)
    return tuple(t for found in by_size.values() for t in dict.fromkeys((found[0], found[-1])))


@lru_cache(maxsize=4096)
def _fitted(times: tuple[StepTime, ...]) -> SpeedModel | None:
    """Return the model of the step times; None if none of them tells its samples a GPU."""
    try:
        return fit_speed_model(times).model
    except ValueError:
        return None


def _by_size(time: StepTime) -> tuple[float, ...]:
    return time.gpus, time.nodes, time.local_batch or 0, time.seconds, time.compute_s or 0.0


def _still_possible(problem: SizingProblem, grants: tuple[Grant, ...]) -> tuple[Grant, ...] | None:
    """Return the grants if all jobs with GPUs have theirs, and the others can have them."""
    snapshot = problem.snapshot
    granted = {grant.job: grant for grant in grants}
    if any(granted.get(job) != now for job, now in snapshot.retained.items()):
        return None  # it is not that decision whose moves are under way
    able = {job.id for job in problem.jobs} | snapshot.retained.keys()
    pool = set(snapshot.node_of)
    for grant in grants:
        if grant.job not in able or not pool.issuperset(grant.gpus):
            return None
        if not snapshot.index[grant.job].takes(len(grant.gpus)):
            return None
    return grants or None


def _rank(job: Job, now_s: float) -> tuple[float, object]:
    return job.attained_gpu_s(now_s), submission(job)


def _reason(grants: tuple[Grant, ...]) -> Callable[[Job, bool], Reason]:
    sizes = {grant.job: len(grant.gpus) for grant in grants}

    def explain(job: Job, on: bool) -> Reason:
        if on:
            terms = (Term("gpus", sizes.get(job.id, 0)),)
            return Reason("this size adds most to the goodput of all jobs", terms)
        return Reason("waits: the GPUs add more elsewhere", would_change="a job that ends")

    return explain

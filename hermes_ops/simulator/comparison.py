"""The comparison of policies on the same workloads, seed by seed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import exp, log
from multiprocessing import get_context
from time import process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.amounts import counted
from hermes_ops.core.guards import Quantum
from hermes_ops.core.model import Gpu, JobId, Policy
from hermes_ops.core.options import GuardOptions, without_guards
from hermes_ops.core.quota import Quota
from hermes_ops.core.within_quota import WithinQuota
from hermes_ops.core.wrapper import OneSize
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.policies import compares_trials, make_policy, sizes_jobs
from hermes_ops.simulator.engine import simulate
from hermes_ops.simulator.metrics import Metrics, TeamResult, measure, regret, team_results
from hermes_ops.simulator.oracle import OracleBest, oracle
from hermes_ops.simulator.workload import SimulationRun, Workload
from hermes_ops.simulator.workload_source import DrawnWorkload, WorkloadSource

CONFIDENCE = 0.95
RESAMPLES = 10_000
Steps = tuple[tuple[float, float], ...]
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy with its parameters, within the live pool's guards or without (the default).

    The guards' own options (`guard_k` ...) are among the parameters, and errors without guards.
    `label` is its name in tables, in place of the policy's. It decides within `quota`, if given.
    `capacities` are the GPUs of each queue for a policy that guarantees them by itself.
    """

    policy: str
    parameters: tuple[tuple[str, object], ...] = ()
    guards: bool = False
    label: str = ""
    quota: Quota | None = None
    capacities: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        """Its name in tables."""
        return self.label or self.policy

    def make(self, draw: DrawnWorkload) -> Policy[Any]:
        """Create the policy for this workload; raise ConfigError for an unknown name or parameter.

        A policy that needs an oracle gets the workload's; one that uses earlier sweeps gets those;
        one that knows the sizes of past jobs (2D-Gittins) gets the workload's own, as in Tiresias'
        simulation. "oracle-best" is the bound of `OracleBest`. One that does not size jobs gives
        each job what its user requests (`OneSize`).
        """
        future = oracle(draw.workload)
        if self.policy == OracleBest.name:
            return _one_size(OracleBest(future), draw.workload)
        lengths_s = ((work.alone_s, work.gpus) for work in draw.workload.jobs)
        sizes_gpu_s = tuple(alone_s * gpus for alone_s, gpus in lengths_s if alone_s is not None)
        knowledge = {"oracle": future, "prior": draw.prior, "sizes_gpu_s": sizes_gpu_s}
        if self.capacities:
            knowledge["capacities"] = self.capacities
        options = dict(self.parameters)
        guards = GuardOptions.parse(options if self.guards else {})
        policy_options = without_guards(options) if self.guards else options
        policy = make_policy(self.policy, policy_options, knowledge)
        policy = guards.around(policy) if self.guards else policy
        if self.quota is not None:
            quantum = Quantum(guards.k if self.guards else 0.0, guards.default_switch_s)
            compares, sizes = compares_trials(self.policy), sizes_jobs(self.policy)
            policy = WithinQuota(policy, self.quota, quantum, compares=compares, sizes=sizes)
        return policy if sizes_jobs(self.policy) else _one_size(policy, draw.workload)


def _one_size(policy: Policy[Any], workload: Workload) -> Policy[Any]:
    """Return the policy for jobs of one size; one of rigid jobs alone needs no other view."""
    return OneSize(policy) if workload.is_elastic else policy


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The result of one policy and one seed; `completions_s` and `regret` are for pictures.

    `jobs` are all jobs by submission, with their completion; None for one that did not finish.
    `teams` are the results of the teams, none where no job has one.
    """

    policy: str
    seed: int
    metrics: Metrics
    completions_s: tuple[float, ...]
    regret: Steps
    jobs: tuple[tuple[JobId, float | None], ...] = ()
    teams: tuple[TeamResult, ...] = ()

    @classmethod
    def from_run(cls, run: SimulationRun, policy: str, seed: int) -> PolicyResult:
        """Compute the result of a run."""
        completions = (o.completion_s for o in run.outcomes if o.completion_s is not None)
        jobs = tuple((o.work.id, o.completion_s) for o in run.outcomes)
        figures = measure(run)
        return cls(
            policy, seed, figures, tuple(sorted(completions)), regret(run), jobs, team_results(run)
        )


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the ends of its confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of one value a seed, with its 95 % bootstrap interval (by percentiles).

    The interval lies within the values; of one value, or of equal ones, it is the value. The
    resamples are seeded: the same values always give the same interval. Raise ValueError without
    values.
    """
    if not values:
        raise ValueError("there is no value to take the mean of")
    if min(values) == max(values):
        return Interval(values[0], values[0], values[0])
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    ends = ((1 - CONFIDENCE) / 2 * 100, (1 + CONFIDENCE) / 2 * 100)
    low, high = np.percentile(array[_resamples(len(array))].mean(axis=1), ends)
    return Interval(mean, min(mean, float(low)), max(mean, float(high)))


@lru_cache(maxsize=4)
def _resamples(size: int) -> NDArray[np.int64]:
    return np.random.default_rng(size).integers(size, size=(RESAMPLES, size))


def ratio_interval(values: Sequence[float], base: Sequence[float]) -> Interval | None:
    """Return the geometric mean of base / value over seeds: above 1 is sooner than `base`.

    The interval is that of the mean logarithm. None when a value or its partner is not above 0.
    """
    if not values or min(*values, *base) <= 0:
        return None
    logarithm = mean_interval([log(b / v) for v, b in zip(values, base, strict=True)])
    return Interval(exp(logarithm.mean), exp(logarithm.low), exp(logarithm.high))


@dataclass(frozen=True, slots=True)
class Comparison:
    """All results, in the order of the policies, then of the seeds."""

    workload: str
    gpus: int
    seeds: tuple[int, ...]
    policies: tuple[str, ...]
    results: tuple[PolicyResult, ...]

    def results_of(self, policy: str) -> tuple[PolicyResult, ...]:
        """Return the results of one policy, by seed."""
        return tuple(r for r in self.results if r.policy == policy)

    def interval(self, policy: str, metric: str) -> Interval | None:
        """Return the mean over seeds with its interval; None when a seed has no value."""
        values = self._values(policy, metric)
        present = [v for v in values if v is not None]
        return mean_interval(present) if values and len(present) == len(values) else None

    def speed_up(self, policy: str, metric: str, base: str | None = None) -> Interval | None:
        """Return how many times sooner than `base` (the first policy); geometric mean of seeds."""
        values = self._values(policy, metric)
        bases = self._values(base or self.policies[0], metric)
        pairs = [(v, b) for v, b in zip(values, bases, strict=True) if v is not None and b]
        if not pairs or len(pairs) < len(values):
            return None
        return ratio_interval(*zip(*pairs, strict=True))

    def _values(self, policy: str, metric: str) -> list[float | None]:
        return [r.metrics.document()[metric] for r in self.results_of(policy)]


def check_fits(workload: Workload, gpus: tuple[Gpu, ...]) -> None:
    """Raise ConfigError when a job requests more GPUs than there are: it would never run."""
    wide = [work for work in workload.jobs if work.gpus > len(gpus)]
    if wide:
        most = max(work.gpus for work in wide)
        fact = f"{counted(len(wide), 'job')} of up to {most} GPUs"
        problem = Problem("gpus", fact, f"at most {len(gpus)}", "simulate more GPUs")
        raise ConfigError(f"the workload {workload.name!r}", (problem,))


def simulate_seed(
    source: WorkloadSource, gpus: tuple[Gpu, ...], contender: Contender, seed: int
) -> PolicyResult:
    """Simulate one policy on the workload of one seed."""
    draw = source.draw(seed)
    run = simulate(draw.workload, gpus, contender.make(draw), clock=process_time)
    return PolicyResult.from_run(run, contender.name, seed)


def compare(
    source: WorkloadSource,
    gpus: tuple[Gpu, ...],
    contenders: Sequence[Contender],
    seeds: Sequence[int],
    *,
    jobs: int | None = None,
    pool: Executor | None = None,
) -> Comparison:
    """Simulate every policy on the workload of every seed, in `jobs` processes (default: cores).

    With a `pool` of `workers`, use those. A workload that is the same for every seed is simulated
    once, and counts for the first seed alone. Raise ConfigError for bad input before a process is
    started.
    """
    used_seeds = tuple(seeds) if source.varies else tuple(seeds[:1])
    first = source.draw(used_seeds[0])
    check_fits(first.workload, gpus)
    for contender in contenders:
        contender.make(first)
    simulations = [
        (source, gpus, contender, seed) for contender, seed in product(contenders, used_seeds)
    ]
    if pool is not None:
        results = tuple(pool.map(simulate_seed, *zip(*simulations, strict=True)))
    else:
        results = tuple(
            _simulate_all(simulations, min(jobs or os.cpu_count() or 1, len(simulations)))
        )
    names = tuple(contender.name for contender in contenders)
    return Comparison(source.name, len(gpus), used_seeds, names, results)


@contextmanager
def workers(jobs: int | None = None) -> Iterator[Executor]:
    """Start `jobs` processes (default: cores) for several comparisons, each with one thread."""
    context = get_context("spawn")  # numpy reads the number of threads when it is first imported
    with (
        _one_thread_each(),
        ProcessPoolExecutor(jobs or os.cpu_count() or 1, mp_context=context) as pool,
    ):
        yield pool


def _simulate_all(
    simulations: Sequence[tuple[WorkloadSource, tuple[Gpu, ...], Contender, int]], jobs: int
) -> Iterator[PolicyResult]:
    """Yield the results in the order of `simulations`."""
    columns = tuple(zip(*simulations, strict=True))
    if jobs <= 1:
        yield from map(simulate_seed, *columns)
        return
    with workers(jobs) as pool:
        yield from pool.map(simulate_seed, *columns)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Limit processes that start meanwhile to one thread, unless the user has set a number."""
    added = [name for name in THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]

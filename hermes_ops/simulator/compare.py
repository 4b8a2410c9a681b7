"""Several policies on the same workloads, seed by seed, and what they came to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from time import process_time
from typing import Any, Protocol

from hermes_ops.core.guard_options import GuardOptions, without_guards
from hermes_ops.core.history import PastTrial
from hermes_ops.core.model import Gpu, Policy
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.policies import make_policy
from hermes_ops.simulator.bounds import OracleBest
from hermes_ops.simulator.curves import Curves, read_curves, sample
from hermes_ops.simulator.disturbances import read_disturbances
from hermes_ops.simulator.engine import oracle, simulate
from hermes_ops.simulator.intervals import Interval, mean_interval, ratio_interval
from hermes_ops.simulator.metrics import Metrics, measure, regret
from hermes_ops.simulator.traces import poisson, read_trace
from hermes_ops.simulator.workload import Costs, Run, Workload

Steps = tuple[tuple[float, float], ...]
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Draw:
    """The workload of one seed, and the trials of earlier sweeps that a policy may know."""

    workload: Workload
    prior: tuple[PastTrial, ...] = ()


class Task(Protocol):
    """Where workloads come from: one a seed, the same for every policy."""

    @property
    def name(self) -> str:
        """What reports call it."""
        ...

    @property
    def varies(self) -> bool:
        """False when every seed gives the same workload."""
        ...

    def draw(self, seed: int) -> Draw:
        """The workload of this seed; ConfigError when it cannot be had."""
        ...


@dataclass(frozen=True, slots=True)
class TraceTask:
    """The jobs of a trace, all of them, with one start-up cost for all."""

    path: Path
    startup_s: float = 0.0
    varies: bool = False

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name.partition(".")[0]

    def draw(self, seed: int) -> Draw:  # noqa: ARG002  # the same for every seed
        """The trace; the seed changes nothing."""
        return Draw(
            _with_startup(_trace(self.path.absolute(), _written_ns(self.path)), self.startup_s)
        )


@dataclass(frozen=True, slots=True)
class CurvesTask:
    """Sweeps of `trials` configurations drawn from a file of learning curves."""

    path: Path
    trials: int = 64
    prior_sweeps: int = 0
    good: int | None = None
    startup_s: float = 0.0
    varies: bool = True

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.stem

    def draw(self, seed: int) -> Draw:
        """The sweep of this seed."""
        workload, prior = sample(
            _curves(self.path.absolute(), _written_ns(self.path)),
            self.trials,
            seed,
            prior_sweeps=self.prior_sweeps,
            costs=Costs(startup_s=self.startup_s),
            good=self.good,
        )
        return Draw(workload, prior)


@dataclass(frozen=True, slots=True)
class PoissonTask:
    """`jobs` random jobs: exponential gaps of this mean, log-normal lengths of this median."""

    jobs: int
    mean_gap_s: float
    median_s: float
    startup_s: float = 0.0
    varies: bool = True

    @property
    def name(self) -> str:
        """How many jobs."""
        return f"poisson-{self.jobs}"

    def draw(self, seed: int) -> Draw:
        """The arrivals of this seed."""
        made = poisson(self.jobs, mean_gap_s=self.mean_gap_s, seed=seed, median_s=self.median_s)
        return Draw(_with_startup(made, self.startup_s))


@dataclass(frozen=True, slots=True)
class DisturbedTask:
    """Another task's workloads, whose nodes fail and slow down as a file says."""

    task: Task
    path: Path

    @property
    def name(self) -> str:
        """The other task's."""
        return self.task.name

    @property
    def varies(self) -> bool:
        """As the other task."""
        return self.task.varies

    def draw(self, seed: int) -> Draw:
        """The other task's workload with the disturbances."""
        made = self.task.draw(seed)
        disturbances = read_disturbances(self.path)
        return replace(made, workload=replace(made.workload, disturbances=disturbances))


@lru_cache(maxsize=4)  # one reading for all seeds of a process
def _curves(path: Path, written_ns: int) -> Curves:  # noqa: ARG001  # a newer file is read anew
    return read_curves(path)


@lru_cache(maxsize=4)
def _trace(path: Path, written_ns: int) -> Workload:  # noqa: ARG001
    return read_trace(path)


def _written_ns(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _with_startup(workload: Workload, startup_s: float) -> Workload:
    if not startup_s:
        return workload
    jobs = (replace(w, costs=replace(w.costs, startup_s=startup_s)) for w in workload.jobs)
    return replace(workload, jobs=tuple(jobs))


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy with its parameters, within the live pool's guards or bare (the default).

    The guards' own options (`guard_k` ...) are among the parameters; without guards they are wrong.
    `label` is what tables call it when the policy's name says too little.
    """

    policy: str
    parameters: tuple[tuple[str, object], ...] = ()
    guards: bool = False
    label: str = ""

    @property
    def name(self) -> str:
        """What tables call it."""
        return self.label or self.policy

    def make(self, draw: Draw) -> Policy[Any]:
        """The policy for this workload; ConfigError for an unknown name or parameter.

        A policy that needs an oracle gets the workload's; one that has a use for earlier sweeps
        gets those; one that knows the sizes of past jobs (2D-Gittins) gets the workload's own, as
        in Tiresias' simulation. "oracle-best" is the bound of `OracleBest`.
        """
        future = oracle(draw.workload)
        if self.policy == OracleBest.name:
            return OracleBest(future)
        sizes_gpu_s = tuple(work.seconds * work.gpus for work in draw.workload.jobs)
        given = {"oracle": future, "prior": draw.prior, "sizes_gpu_s": sizes_gpu_s}
        options = dict(self.parameters)
        if not self.guards:
            return make_policy(self.policy, options, given)
        policy = make_policy(self.policy, without_guards(options), given)
        return GuardOptions.of(options).around(policy)


@dataclass(frozen=True, slots=True)
class Result:
    """What one policy made of one seed; `completions_s` and `regret` feed the pictures."""

    policy: str
    seed: int
    metrics: Metrics
    completions_s: tuple[float, ...]
    regret: Steps

    @classmethod
    def of(cls, run: Run, policy: str, seed: int) -> Result:
        """The result of a run."""
        completions = (o.completion_s for o in run.outcomes if o.completion_s is not None)
        return cls(policy, seed, measure(run), tuple(sorted(completions)), regret(run))


@dataclass(frozen=True, slots=True)
class Comparison:
    """All results, in the order of the policies, then of the seeds."""

    workload: str
    gpus: int
    seeds: tuple[int, ...]
    policies: tuple[str, ...]
    results: tuple[Result, ...]

    def of(self, policy: str) -> tuple[Result, ...]:
        """The results of one policy, by seed."""
        return tuple(r for r in self.results if r.policy == policy)

    def interval(self, policy: str, metric: str) -> Interval | None:
        """The mean over seeds with its interval; None when a seed never came to that."""
        values = self._values(policy, metric)
        known = [v for v in values if v is not None]
        return mean_interval(known) if values and len(known) == len(values) else None

    def speed_up(self, policy: str, metric: str, base: str | None = None) -> Interval | None:
        """How many times sooner than `base` (the first policy), as geometric mean over seeds."""
        values = self._values(policy, metric)
        bases = self._values(base or self.policies[0], metric)
        pairs = [(v, b) for v, b in zip(values, bases, strict=True) if v is not None and b]
        if not pairs or len(pairs) < len(values):
            return None
        return ratio_interval(*zip(*pairs, strict=True))

    def _values(self, policy: str, metric: str) -> list[float | None]:
        return [r.metrics.document()[metric] for r in self.of(policy)]


def check_fits(workload: Workload, gpus: tuple[Gpu, ...]) -> None:
    """Raise ConfigError when a job asks for more GPUs than there are: it would never run."""
    wide = [work for work in workload.jobs if work.gpus > len(gpus)]
    if wide:
        most = max(work.gpus for work in wide)
        found = f"{len(wide)} jobs that need more, one of them {most} GPUs"
        problem = Problem("gpus", found, f"at most {len(gpus)}", "simulate more GPUs")
        raise ConfigError(f"the workload {workload.name!r}", (problem,))


def play(task: Task, gpus: tuple[Gpu, ...], contender: Contender, seed: int) -> Result:
    """Simulate one policy on the workload of one seed."""
    draw = task.draw(seed)
    run = simulate(draw.workload, gpus, contender.make(draw), clock=process_time)
    return Result.of(run, contender.name, seed)


def compare(
    task: Task,
    gpus: tuple[Gpu, ...],
    contenders: Sequence[Contender],
    seeds: Sequence[int],
    *,
    jobs: int | None = None,
    pool: Executor | None = None,
) -> Comparison:
    """Simulate every policy on the workload of every seed, in `jobs` processes (default: cores).

    With a `pool` of `workers` those do it. A workload that is the same for every seed is simulated
    once, and counts for the first seed alone. Bad input (ConfigError) is found before a process is
    started.
    """
    kept = tuple(seeds) if task.varies else tuple(seeds[:1])
    first = task.draw(kept[0])
    check_fits(first.workload, gpus)
    for contender in contenders:
        contender.make(first)
    wanted = [(task, gpus, contender, seed) for contender, seed in product(contenders, kept)]
    if pool is not None:
        results = tuple(pool.map(play, *zip(*wanted, strict=True)))
    else:
        results = tuple(_played(wanted, min(jobs or os.cpu_count() or 1, len(wanted))))
    names = tuple(contender.name for contender in contenders)
    return Comparison(task.name, len(gpus), kept, names, results)


@contextmanager
def workers(jobs: int | None = None) -> Iterator[Executor]:
    """So many processes (default: cores) for several comparisons, each in one thread."""
    context = get_context("spawn")  # numpy reads the number of threads when it is first imported
    with (
        _one_thread_each(),
        ProcessPoolExecutor(jobs or os.cpu_count() or 1, mp_context=context) as pool,
    ):
        yield pool


def _played(
    wanted: Sequence[tuple[Task, tuple[Gpu, ...], Contender, int]], jobs: int
) -> Iterator[Result]:
    """The results in the order of `wanted`."""
    columns = tuple(zip(*wanted, strict=True))
    if jobs <= 1:
        yield from map(play, *columns)
        return
    with workers(jobs) as pool:
        yield from pool.map(play, *columns)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that start meanwhile compute in one thread, unless the user has said otherwise."""
    added = [name for name in THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]

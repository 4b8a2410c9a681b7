"""Pollux' published workloads: jobs of six applications, at their measured speeds.

Source: Qiao et al., "Pollux", OSDI 2021, and its artefact's simulator (petuum/adaptdl, branch
osdi21-artifact). 16 nodes of 4 GPUs, a decision every 60 s, 30 s for each start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import inf
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.model import JobId, Point
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.core.speed_model import Floats
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.simulator.pollux_data import (
    MOST_GPUS,
    STEP_TIMES,
    Application,
    PolluxJob,
    StepTable,
    read_pollux,
    written_ns,
)
from hermes_ops.simulator.workload import Costs, Pace, Placement, Work, Workload
from hermes_ops.simulator.workload_source import DrawnWorkload

Integers = NDArray[np.int64]

ROUND_S = 60.0
STARTUP_S = 30.0
APART_S = 2.0**-20
CANDIDATES = 50
"""The batches among which a job chooses its own, from least to largest, in geometric steps."""

LEAST_SQR = 1e-9
"""The least squared norm of a gradient, as a part of the variance, for a noise scale to exist."""

ROUNDING = 1e-8  # what a quotient may exceed a whole number by and count as that number
ONE_SIZE = {"ncf": 1}
"""Applications that run on this many GPUs, with their largest batch, whatever a policy says."""

PUBLISHED_TIRESIAS = {
    "limits_gpu_s": (57_600.0,),
    "order": "entry",
    "placement": "emptiest",
    "demotion": "exact",
}
"""The parameters of 2D-LAS in the artefact: two queues, and no promotion."""

PUBLISHED_POLLUX = {"placement": "packed", "noise": "measured"}
"""The parameters of Pollux as its reference figures by knapsack have them."""

BatchPlan = tuple[Integers, Integers]
"""Samples a GPU in one pass, and the passes (at least 1), of each of several batches."""


class StepTimes:
    """The measured times of a pass, between which it interpolates."""

    def __init__(self, table: StepTable) -> None:
        self._table = table

    def seconds(self, placement: Placement, local: Integers) -> tuple[Floats, Floats]:
        """Return the seconds of a pass, and those that are communication; nan: not measured.

        Placements count as equal if one is a rotation of the other. A measured one is linear in
        the samples a GPU; others are piecewise linear over (nodes, GPUs, samples a GPU) between
        the means of those that were measured, by Delaunay triangulation.
        """
        rotations = (placement[i:] + placement[:i] for i in range(len(placement)))
        rows = self._table.measured.get(min(rotations))
        if rows is None:
            nodes, gpus = np.full(len(local), len(placement)), np.full(len(local), sum(placement))
            times = self._between(np.column_stack((nodes, gpus, local)).astype(np.float64))
            return times[:, 0], times[:, 1]
        step, sync = (
            np.interp(local, rows[:, 0], rows[:, column], left=np.nan, right=np.nan)
            for column in (1, 2)
        )
        return step, sync

    @cached_property
    def _between(self) -> Callable[[Floats], Floats]:
        from scipy.interpolate import LinearNDInterpolator

        points = self._table.points
        between: Callable[[Floats], Floats] = LinearNDInterpolator(points[:, :3], points[:, 3:])
        return between


class PolluxModel:
    """How an application trains: its pace is in steps of its initial batch a second.

    A step of a larger batch counts for more of them, by the noise of the gradients in the epoch
    (Pollux, section 3.1: statistical efficiency). Without a batch from the plan a job takes the one
    with the greatest pace, by the noise that it has measured last. `sizes`: from
    one GPU to as many as its largest batch allows.
    """

    def __init__(self, application: Application) -> None:
        self.application = application
        most = ONE_SIZE.get(application.name, min(MOST_GPUS, application.batches.most_gpus))
        self.sizes = tuple(range(1, most + 1))
        self.times = StepTimes(application.steps)
        self._batches = np.array([t.batch for t in application.trained], dtype=np.float64)
        epochs = slice(application.epochs)
        self._sqr = np.array([t.grad_sqr[epochs] for t in application.trained])
        self._var = np.array([t.grad_var[epochs] for t in application.trained])
        self.progress: Floats = np.min([t.progress[epochs] for t in application.trained], axis=0)
        self._iteration = np.array([t.iteration[epochs] for t in application.trained])
        self._paces: dict[tuple[Placement, int, int | None], Pace] = {}
        self._candidates: dict[Placement, _BatchCandidates] = {}
        self._own: dict[tuple[Placement, int], tuple[int, int]] = {}
        self._expected: dict[tuple[Placement, int, int | None], float] = {}

    def with_size(self, gpus: int) -> PolluxModel:
        """Return the model, with the same tables, of a job that takes this number of GPUs alone."""
        model = copy(self)
        model.sizes = (gpus,)
        return model

    @property
    def batch_range(self) -> BatchRange:
        """The batches that the job may use."""
        return self.application.batches

    def pace(self, placement: Placement, epoch: int, batch: int | None) -> Pace:
        """Return its pace; raise ConfigError where the step times have a hole."""
        epoch = min(epoch, self.application.epochs - 1)
        key = placement, epoch, batch
        if key not in self._paces:
            self._paces[key] = self._pace(placement, epoch, batch)
        return self._paces[key]

    def noise_scale(self, epoch: int) -> float | None:
        """Return the noise scale in that epoch, as measured with the initial batch.

        Where the gradient's measured norm is 0, the noise scale is large and not infinite.
        """
        epoch = min(epoch, self.application.epochs - 1)
        sqr, var = self._noise(epoch, self.application.batches.initial)
        return self.application.batches.initial * var / max(sqr, LEAST_SQR * var)

    def expected_rate(self, placement: Placement, epoch: int, batch: int | None) -> float:
        """Return its greatest rate if the noise were that of this epoch with this batch."""
        initial = self.application.batches.initial
        epoch = min(epoch, self.application.epochs - 1)
        if self.application.name in ONE_SIZE:
            return self.pace(placement, epoch, None).rate
        key = placement, epoch, batch
        if key not in self._expected:
            sqr, var = self._noise(epoch, initial if batch is None else batch)
            rates = self._candidates_of(placement).rates(sqr, var, initial)
            self._expected[key] = float(rates.max())
        return self._expected[key]

    def steps(self, batch: int) -> tuple[float, ...]:
        """Return the steps of that batch until the end of each epoch, as they were recorded."""
        return tuple(float(np.interp(batch, self._batches, at)) for at in self._iteration.T)

    def alone_s(self, placement: Placement, batch: int | None) -> float:
        """Return the seconds of the whole job on these GPUs, its start included."""
        rates = [self.pace(placement, e, batch).rate for e in range(self.application.epochs)]
        return STARTUP_S + float(np.sum(np.diff(self.progress, prepend=0.0) / rates))

    def _noise(self, epoch: int, batch: float) -> tuple[float, float]:
        """Return the squared norm and the variance of the gradient, linear between batches."""
        sqr, var = self._sqr[:, epoch], self._var[:, epoch]
        return (
            float(np.interp(batch, self._batches, sqr)),
            float(np.interp(batch, self._batches, var)),
        )

    def _pace(self, placement: Placement, epoch: int, batch: int | None) -> Pace:
        gpus = sum(placement)
        if batch is None and self.application.name in ONE_SIZE:
            batch = self.application.batches.most
        if batch is None:
            local, passes = self._chosen(placement, epoch)
        else:
            local, passes = (int(part[0]) for part in split(self.batch_range, gpus, [batch]))
        step_times = self.times.seconds(placement, np.array([local]))
        step_s, sync_s = float(step_times[0][0]), float(step_times[1][0])
        if not step_s > 0:
            raise self.hole(placement, local)
        total = gpus * local * passes
        sqr, var = self._noise(epoch, total)
        gain = (var + sqr) / (var * self.batch_range.initial / total + sqr)
        compute_s = step_s - sync_s
        rate = gain / (step_s + (passes - 1) * compute_s)
        return Pace(rate, StepTime(gpus, step_s, len(placement), local, compute_s), total, passes)

    def _chosen(self, placement: Placement, epoch: int) -> tuple[int, int]:
        """Return the local batch and the passes with the greatest pace.

        The noise is that of the epoch as measured with the batch of the epoch before.
        """
        key = placement, epoch
        if key not in self._own:
            initial = self.batch_range.initial
            before = max(initial, self.batch_range.least_local * sum(placement))
            if epoch > 0:
                local, passes = self._chosen(placement, epoch - 1)
                before = local * passes * sum(placement)
            sqr, var = self._noise(epoch, before)
            self._own[key] = self._candidates_of(placement).best(sqr, var, initial)
        return self._own[key]

    def _candidates_of(self, placement: Placement) -> _BatchCandidates:
        if placement not in self._candidates:
            self._candidates[placement] = _BatchCandidates.for_placement(self, placement)
        return self._candidates[placement]

    def hole(self, placement: Placement, local: int) -> ConfigError:
        """Return the error of a step time that is not there."""
        where = f"{self.application.name} on {'+'.join(map(str, placement))} GPUs"
        found = f"no step time with {local} samples a GPU"
        fix = "add lines to the step times, or give another batch"
        allowed = "one that was measured, or lies between those that were"
        return ConfigError(STEP_TIMES, (Problem(where, found, allowed, fix),))


@dataclass(frozen=True, slots=True)
class _BatchCandidates:
    """The batches from which a job on some GPUs chooses, with the seconds of a step of each."""

    local: Integers
    passes: Integers
    total: Integers
    seconds: Floats

    @classmethod
    def for_placement(cls, model: PolluxModel, placement: Placement) -> _BatchCandidates:
        """Return those for which there are step times; ConfigError if there are none."""
        limits, gpus = model.batch_range, sum(placement)
        least = max(limits.initial, limits.least_local * gpus)
        local, passes = split(limits, gpus, np.geomspace(least, limits.most, CANDIDATES))
        step, sync = model.times.seconds(placement, local)
        seconds = step + (passes - 1) * (step - sync)
        most_local = inf if limits.most_local is None else limits.most_local
        usable = (limits.least_local <= local) & (local <= most_local) & (seconds > 0)
        if not usable.any():
            raise model.hole(placement, int(local[0]))
        local, passes = local[usable], passes[usable]
        return cls(local, passes, gpus * local * passes, seconds[usable])

    def rates(self, sqr: float, var: float, initial: int) -> Floats:
        """Return the pace of each at this noise."""
        return np.asarray((var + sqr) / (var * initial / self.total + sqr) / self.seconds)

    def best(self, sqr: float, var: float, initial: int) -> tuple[int, int]:
        """Return the local batch and the passes with the greatest pace at this noise."""
        place = int(np.argmax(self.rates(sqr, var, initial)))
        return int(self.local[place]), int(self.passes[place])


def split(limits: BatchRange, gpus: int, batches: Floats | list[int]) -> BatchPlan:
    """Return the samples a GPU in one pass and the passes for each batch over these GPUs.

    As few passes as fit; on one GPU at least two for more than the initial batch (the noise is
    measured between the passes). The whole is at most the largest batch.
    """
    per_gpu = np.asarray(batches, dtype=np.float64) / gpus
    whole = np.ceil(per_gpu - ROUNDING)
    most_local = inf if limits.most_local is None else limits.most_local
    passes = np.maximum(1, np.ceil(whole / most_local - ROUNDING)).astype(np.int64)
    if gpus == 1:
        passes = np.where(per_gpu > limits.initial + ROUNDING, np.maximum(passes, 2), passes)
    local = np.ceil(per_gpu / passes - ROUNDING).astype(np.int64)
    return np.minimum(local, limits.most // (gpus * passes)), passes


@dataclass(frozen=True, slots=True)
class PolluxSource:
    """The workloads of a folder at one load; the seed is a workload's number."""

    folder: Path
    load: float
    varies: bool = field(default=True, init=False)

    @property
    def name(self) -> str:
        """The name of the workload and its load."""
        return f"pollux-{self.load:g}"

    def draw(self, seed: int) -> DrawnWorkload:
        """Return the workload of that number; raise ConfigError if there is none."""
        numbers = workload_numbers(self.folder, self.load)
        if seed not in numbers:
            allowed = ", ".join(map(str, numbers)) or "none at this load"
            problem = Problem("number", str(seed), allowed, "name one of these")
            raise ConfigError(f"the workload {self.name!r}", (problem,))
        models, jobs = _models(self.folder.absolute(), written_ns(self.folder))
        published = in_order(jobs[self.load, seed])
        works = tuple(_work(job, models[job.application]) for job in published)
        return DrawnWorkload(_workload(f"{self.name}-{seed}", works))


def in_order(jobs: Sequence[PolluxJob]) -> tuple[PolluxJob, ...]:
    """Return the jobs, those of one second a microsecond apart: they keep the order of the file.

    The last one of a second keeps its time, so that all are seen in the same round.
    """
    later: dict[float, int] = Counter(job.submitted_s for job in jobs)
    result = []
    for job in jobs:
        later[job.submitted_s] -= 1
        at_s = max(0.0, job.submitted_s - later[job.submitted_s] * APART_S)
        result.append(replace(job, submitted_s=at_s))
    return tuple(result)


def workload_numbers(folder: Path, load: float) -> tuple[int, ...]:
    """Return the numbers of the folder's workloads at that load, ascending."""
    _, jobs = _models(folder.absolute(), written_ns(folder))
    return tuple(sorted(number for at, number in jobs if at == load))


Models = dict[str, PolluxModel]
Jobs = dict[tuple[float, int], tuple[PolluxJob, ...]]


@lru_cache(maxsize=2)  # one reading for all workloads of a process, and one table of paces
def _models(folder: Path, written_ns: int) -> tuple[Models, Jobs]:  # noqa: ARG001  # newer: again
    data = read_pollux(folder)
    models = {name: PolluxModel(application) for name, application in data.applications.items()}
    return models, dict(data.workloads)


def isolated(application: str, gpus: int, batch: int, folder: Path) -> Workload:
    """Return the workload of one job that is submitted at 0 and takes these GPUs alone."""
    models, _ = _models(folder.absolute(), written_ns(folder))
    job = PolluxJob(f"{application}-0", 0.0, application, gpus, batch)
    works = (_work(job, models[application].with_size(gpus)),)
    return _workload(f"{application}-alone", works)


def _workload(name: str, works: tuple[Work, ...]) -> Workload:
    """Return the workload in rounds: a decision at the end of each."""
    return Workload(name, works, round_s=ROUND_S, first_decision_s=ROUND_S, whole_seconds=True)


def _work(job: PolluxJob, model: PolluxModel) -> Work:
    application = model.application
    return Work(
        JobId(job.name),
        job.submitted_s,
        float(model.progress[-1]),
        gpus=job.gpus,
        model_name=job.application,
        total_steps=application.epochs,
        curve=_curve(model),
        costs=Costs(startup_s=STARTUP_S),
        training=model,
        batch=job.batch,
        steps=model.steps(job.batch),
        exclusive_s=model.alone_s(packed(job.gpus), job.batch),
        expects=model.expected_rate,
    )


def _curve(model: PolluxModel) -> tuple[Point, ...]:
    """Return the validation metric by epoch, as trained with the initial batch.

    Its sign is turned where it rises: a loss is lower when it is better.
    """
    metric = model.application.trained[0].metric
    sign = -1.0 if metric[-1] > metric[0] else 1.0
    return tuple(
        Point(epoch, sign * float(value), float(work))
        for epoch, (value, work) in enumerate(zip(metric, model.progress, strict=False), start=1)
    )


def packed(gpus: int, each: int = 4) -> Placement:
    """Return the placement on as few nodes of `each` GPUs as possible."""
    rest = gpus % each
    return (*(each,) * (gpus // each), *((rest,) if rest else ()))

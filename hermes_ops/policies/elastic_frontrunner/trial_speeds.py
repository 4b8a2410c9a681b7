"""How much faster the trials of a sweep train on more GPUs, each compared with itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, inf, log
from statistics import mean

import numpy as np

from hermes_ops.core.curves import LearningCurve, Memo
from hermes_ops.core.model import Job, JobId, Point
from hermes_ops.core.sizes import StepTime
from hermes_ops.core.speed_model import AllReduceSpeed

LOG_STEP = 0.01
"""Measured speed-ups are rounded to steps of their logarithm: small errors change no forecast."""

MOST_LOG = 10.0
"""A speed-up beyond the exponential of this, or below its inverse, counts as this."""

_Measured = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A trial runs on `gpus` GPUs from the step `begin` on."""

    begin: int
    gpus: int


@dataclass(frozen=True, slots=True)
class SearchMemory:
    """The step for which each trial was given its GPUs, and on how many it has run from when on."""

    goals: tuple[tuple[JobId, int], ...] = ()
    stretches: tuple[tuple[JobId, tuple[Stretch, ...]], ...] = ()


NO_SEARCH = SearchMemory()
"""The memory before the first trial."""


@dataclass(frozen=True, slots=True)
class TrialSpeeds:
    """The speed of a sweep's trials by their number of GPUs, relative to one size.

    `measured`: (GPUs, speed), ascending; empty before any trial has run on two sizes. `largest`:
    the largest size that a trial has run on, 0 before any. `least`: the least that one takes.
    """

    measured: _Measured = ()
    largest: int = 0
    least: int = 1

    @classmethod
    def from_trials(cls, jobs: Sequence[Job]) -> TrialSpeeds:
        """Return the mean ratios of the steps that the same trial has measured on several sizes.

        Trials differ in their speed, by their hyper-parameters, so none is compared with another:
        the logarithm of a step's seconds is that of the trial plus that of the size, by least
        squares. A size that no chain of trials connects with the smallest one is left out.
        """
        rows = [row for job in jobs if job.step_times for row in (_seconds(job.step_times),) if row]
        largest = max((gpus for row in rows for gpus, _ in row), default=0)
        least = min((job.min_gpus for job in jobs), default=1)
        several = tuple(sorted({row for row in rows if len(row) > 1}))
        return cls(_fitted(several), largest, least)

    def speed(self, gpus: int) -> float:
        """Return the speed: measured, else by a model of the all-reduce; linear before any."""
        return _speed(self.measured, gpus) if self.measured else gpus / self.least


def at_one_size(job: Job, stretches: Sequence[Stretch], speeds: TrialSpeeds) -> Job:
    """Return the job with the curve that it would have had at a speed of 1 throughout.

    Without a stretch its curve is that of the one size that it has measured, if it is one.
    """
    if not job.curve or job.min_gpus == job.max_gpus:
        return job
    sizes = () if stretches else {time.gpus for time in job.step_times}
    if len(sizes) == 1:
        stretches = (Stretch(0, *sizes),)
    factors = tuple([(stretch.begin, speeds.speed(stretch.gpus)) for stretch in stretches])
    if all([factor == 1.0 for _, factor in factors]):
        return job
    return _RESCALED.get((job,), factors)[0]


@lru_cache(maxsize=1 << 13)
def _seconds(times: tuple[StepTime, ...]) -> _Measured:
    """Return the logarithm of a trial's seconds a step by size, the mean over nodes and batches.

    A step whose samples are known counts by the seconds of a sample.
    """
    logs: dict[int, list[float]] = {}
    for time in times:
        if 0 < time.seconds < inf:
            samples = time.gpus * (time.local_batch or 0) or 1
            logs.setdefault(time.gpus, []).append(log(time.seconds / samples))
    return tuple((gpus, sum(values) / len(values)) for gpus, values in sorted(logs.items()))


@lru_cache(maxsize=1 << 12)
def _speed(measured: _Measured, gpus: int) -> float:
    speed_on = dict(measured)
    return speed_on[gpus] if gpus in speed_on else AllReduceSpeed.fit(measured).speed(gpus)


@lru_cache(maxsize=256)
def _fitted(trials: tuple[_Measured, ...]) -> _Measured:
    """Return the speeds of the sizes that are connected with the smallest, which has 1."""
    sizes = _connected(trials)
    if len(sizes) < 2:
        return ()
    column = {gpus: place for place, gpus in enumerate(sizes)}
    rows, values = [], []
    for trial in trials:
        measured = [(column[gpus], seconds) for gpus, seconds in trial if gpus in column]
        middle = mean(seconds for _, seconds in measured) if measured else 0.0
        for place, seconds in measured:
            row = np.zeros(len(sizes))
            row[[other for other, _ in measured]] -= 1 / len(measured)
            row[place] += 1
            rows.append(row)
            values.append(middle - seconds)
    solved = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)[0]
    limited = np.clip(solved - solved[0], -MOST_LOG, MOST_LOG)
    logs = np.round(limited / LOG_STEP) * LOG_STEP
    return tuple((gpus, exp(float(value))) for gpus, value in zip(sizes, logs, strict=True))


def _connected(trials: Sequence[_Measured]) -> list[int]:
    """Return the sizes, ascending, that trials connect with the smallest of all."""
    groups = [{gpus for gpus, _ in trial} for trial in trials]
    reached = {min(gpus for group in groups for gpus in group)} if groups else set[int]()
    growing = True
    while growing:
        more = set[int]().union(*(group for group in groups if group & reached)) - reached
        growing = bool(more)
        reached |= more
    return sorted(reached)


def _rescaled(jobs: Sequence[Job], factors: Sequence[tuple[int, float]]) -> Iterator[Job]:
    curves = _CURVES.get([job.curve for job in jobs], factors)
    yield from map(_with_curve, jobs, curves)


def _with_curve(job: Job, curve: Sequence[Point]) -> Job:
    return replace(job, curve=curve)


def _rescaled_curves(
    curves: Sequence[Sequence[Point]], factors: Sequence[tuple[int, float]]
) -> Iterator[LearningCurve]:
    for curve in curves:
        yield LearningCurve.from_rows(_points(curve, factors))


def _points(curve: Sequence[Point], factors: Sequence[tuple[int, float]]) -> Iterator[Point]:
    """Yield the points; a step on two sizes counts as of the first."""
    before_s, seconds, place = 0.0, 0.0, 0
    step = 0
    for point in curve:
        while place + 1 < len(factors) and factors[place + 1][0] <= step:
            place += 1
        seconds += (point.seconds - before_s) * factors[place][1]
        yield replace(point, seconds=seconds)
        before_s, step = point.seconds, point.step


_CURVES = Memo[Sequence[Point], LearningCurve](_rescaled_curves, 1 << 13)
_RESCALED = Memo[Job, Job](_rescaled, 1 << 12)

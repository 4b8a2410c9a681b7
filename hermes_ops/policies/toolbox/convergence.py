"""How fast a job's loss falls: the number by which the Hermes policy ranks jobs.

The Hermes paper (Electronics 2021, 10(3), 350) ranks by "convergence", but its formula is not
recovered; what follows is a choice. The improvement of the best loss over the newest slice is
divided by the training seconds of the slice and by the largest drop seen in the job's SWEEP.

* The best loss so far, not the newest: a loss that rose and came back earns nothing for it.
* A slice is the newest `SLICE_STEPS` intervals of the curve (all of it while it is shorter): one
  interval is too noisy to preempt for, the whole curve would praise a plateau for its past.
* Trials of one sweep share an objective, so one scale serves them. When each job is its own
  sweep this equals SLAQ's normalisation by the job's own largest drop (SoCC 2017). Within a sweep
  own normalisation cannot compare two trials: after one drop each has lost exactly 1.0 of its own
  largest drop, the one that fell by 2.0 and the one that fell by 0.01.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.curves import Table, columns
from hermes_ops.core.model import Job, JobId, Phase, Point, SweepId
from hermes_ops.core.speed_model import Floats

SLICE_STEPS = 3
_BACK = SLICE_STEPS + 1
MIN_SLICE_S = 1e-3  # two points of one clock tick: no rate is infinite
UNSEEN = inf
_PENDING, _ENDED = Phase.PENDING, Phase.ENDED
_ID, _PHASE, _CURVE = attrgetter("id"), attrgetter("phase"), attrgetter("curve")
_SWEEP, _WEIGHT = attrgetter("sweep"), attrgetter("weight")


def convergence(curve: Sequence[Point], largest_drop: float) -> float:
    """Return the share of `largest_drop` won per second of the newest slice, in 1/s, at least 0.

    +inf (`UNSEEN`) with fewer than two points: such a job has still to show itself. 0 when the
    newest loss is NaN or infinite, or when there was no finite loss before the slice.
    """
    if len(curve) < 2:
        return UNSEEN
    return float(_rates(_Curves(_facts([curve])), np.array([largest_drop]))[0])


def largest_drops(jobs: Iterable[Job]) -> dict[SweepId, float]:
    """Return the largest finite loss minus the smallest of each sweep; ended jobs count."""
    shown = [job for job in jobs if job.curve]
    if not shown:
        return {}
    sweeps, numbers = _sweeps(shown)
    drops = _drops(numbers, _Curves(_FACTS.get([job.curve for job in shown]))).tolist()
    return {sweep: drop for sweep, drop in zip(sweeps, drops, strict=True) if drop >= 0}


def weighted_convergences(jobs: Iterable[Job]) -> dict[JobId, float]:
    """Return convergence times weight of every job that has not ended; +inf if not seen yet."""
    jobs = tuple(jobs)
    rates = np.full(len(jobs), UNSEEN)
    shown = [place for place, curve in enumerate(map(_CURVE, jobs)) if curve]
    if shown:
        rates[shown] = _weighted([jobs[place] for place in shown])
    facts = zip(map(_ID, jobs), map(_PHASE, jobs), rates.tolist(), strict=True)
    return {
        job: UNSEEN if phase is _PENDING else rate
        for job, phase, rate in facts
        if phase is not _ENDED
    }


def _weighted(jobs: Sequence[Job]) -> Floats:
    """Return convergence times weight of jobs with a curve."""
    curves = _Curves(_FACTS.get(list(map(_CURVE, jobs))))
    numbers = _sweeps(jobs)[1]
    rates = _rates(curves, _drops(numbers, curves)[numbers])
    rates *= np.fromiter(map(_WEIGHT, jobs), float, len(jobs))
    rates[curves.lengths < 2] = UNSEEN
    return rates


class _Curves:
    """Many curves of at least one point, side by side: large sweeps have 100,000 points.

    `highest`, and the lowest `before` and `after` the newest slice begins, are of finite losses;
    infinite where there is none.
    """

    def __init__(self, facts: Floats) -> None:
        self.lengths, self.before, self.after, self.highest, newest, self.slice_s = facts.T
        self.is_finite_now = np.isfinite(newest)


def _facts(curves: Sequence[Sequence[Point]]) -> Floats:
    """Return points, lowest before and after the cut, highest, newest loss, slice seconds."""
    losses = np.concatenate([columns(curve).losses for curve in curves])
    lengths = np.array(list(map(len, curves)))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    cuts = np.minimum(np.maximum(starts + 1, ends - SLICE_STEPS), ends - 1)
    finite = np.isfinite(losses)
    low, high = np.where(finite, losses, inf), np.where(finite, losses, -inf)
    best = np.minimum.reduceat(low, np.stack((starts, cuts), axis=1).ravel())
    highest = np.maximum.reduceat(high, starts)
    begun = np.array([curve[-_BACK:][0].seconds for curve in curves])
    slice_s = np.maximum([curve[-1].seconds for curve in curves] - begun, MIN_SLICE_S)
    facts = (lengths, best[0::2], best[1::2], highest, losses[ends - 1], slice_s)
    return np.stack(facts, axis=1)


_FACTS: Table[Sequence[Point]] = Table(_facts, width=6)


def _rates(curves: _Curves, largest_drops: Floats) -> Floats:
    """`convergence` of each curve; a curve of one point has 0."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        drops = curves.before - np.minimum(curves.before, curves.after)
        rates = drops / largest_drops / curves.slice_s
    able = curves.is_finite_now & np.isfinite(drops) & (largest_drops > 0)
    return np.where(able, rates, 0.0)


def _sweeps(jobs: Iterable[Job]) -> tuple[dict[SweepId, int], NDArray[np.int64]]:
    """Return a number for each sweep, and the sweep's number of each job."""
    names = list(map(_SWEEP, jobs))
    sweeps = {sweep: number for number, sweep in enumerate(dict.fromkeys(names))}
    return sweeps, np.fromiter(map(sweeps.__getitem__, names), np.int64, len(names))


def _drops(numbers: NDArray[np.int64], curves: _Curves) -> Floats:
    """Return the largest drop of each sweep, by its number; -inf where no loss is finite."""
    sweeps = int(numbers.max()) + 1
    highest, lowest = np.full(sweeps, -inf), np.full(sweeps, inf)
    np.maximum.at(highest, numbers, curves.highest)
    np.minimum.at(lowest, numbers, np.minimum(curves.before, curves.after))
    with np.errstate(over="ignore"):
        drops: Floats = highest - lowest
    return drops

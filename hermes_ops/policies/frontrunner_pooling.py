"""Estimates of the final losses, together with what similar trials come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dtrtrs

from hermes_ops.policies.frontrunner_stages import Ends

Floats = NDArray[np.float64]
SIGNALS = (0.1, 0.5, 1.2)  # variance of what hyper-parameters tell, over that of the estimates
NUGGETS = (0.08, 0.3, 0.8)  # variance of what no other trial tells, over that of the estimates
COMMON = 0.3  # variance of the level of all, likewise
SLOW = 0.3  # mean and standard deviation of how much lower one deviation slower ends, likewise


@dataclass(frozen=True, slots=True, eq=False)
class Outlook:
    """The final loss of each of N trials of the sweep.

    `mean` and `sd`: by all that is known; `alone`: the variance that is left when only the other
    trials are asked, not the trial's own curve.
    """

    mean: Floats
    sd: Floats
    alone: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Crowd:
    """What trials have in common: `kernels[V, M, M]`, `slowness[M]`; N of them are the sweep's."""

    kernels: Floats
    slowness: Floats
    trials: int


@dataclass(frozen=True, slots=True, eq=False)
class _Told:
    """What curves tell, on W worlds: for R begun trials `offsets[W, R]` from the line of slowness
    and their `noise[R]`; for N trials the line `base[W, N]`, the ends of their own curves and the
    variance of these (0 weight where `own` is infinite).
    """

    known: NDArray[np.bool_]
    offsets: Floats
    noise: Floats
    base: Floats
    ends: Floats
    own: Floats
    size: float


def pooled(worlds: Sequence[Ends], gains: Sequence[float], crowd: Crowd) -> list[Outlook]:
    """The outlook in each world, by a Gaussian process over hyper-parameters and slowness.

    Trials that have begun teach. The kernels, the share of what they tell and that of what is each
    trial's own are averaged by their evidence. `gains`, 0 to 1: how far each world believes that
    slow trials end lower. The worlds share one covariance, from their mean variances.
    """
    told = _told(worlds, gains, crowd)
    kernels = crowd.kernels if len(crowd.kernels) else np.zeros((1, *2 * crowd.slowness.shape))
    common = SLOW**2 * np.outer(crowd.slowness, crowd.slowness) + COMMON
    parts = [
        _posterior(told, told.size * (signal * kernel + common), told.size * nugget)
        for kernel, signal, nugget in product(kernels, SIGNALS, NUGGETS)
    ]
    evidence, mean, variance, alone = (np.array(column) for column in zip(*parts, strict=True))
    odds = np.exp(evidence - evidence.max(axis=0))
    odds /= odds.sum(axis=0)
    found = []
    for world in range(len(worlds)):
        share = odds[:, world]
        middle = share @ mean[:, world]
        spread = share @ (variance + mean[:, world] ** 2) - middle**2
        found.append(Outlook(middle, np.sqrt(np.maximum(spread, 1e-8)), share @ alone))
    return found


def _told(worlds: Sequence[Ends], gains: Sequence[float], crowd: Crowd) -> _Told:
    known = ~np.isnan(worlds[0].variance)
    variance = np.mean([world.variance for world in worlds], axis=0)
    means = np.stack([world.mean for world in worlds])
    views = np.array([_view(world, known) for world in worlds])
    size = float(views[:, 1].mean())
    line = views[:, :1] - SLOW * np.sqrt(size) * np.outer(gains, crowd.slowness)
    mine = slice(crowd.trials)
    begun = known[mine]
    return _Told(
        known=known,
        offsets=(means - line)[:, known],
        noise=variance[known] + 1e-6,
        base=line[:, mine],
        ends=np.where(begun, means[:, mine], 0.0),
        own=np.where(begun, variance[mine], np.inf),
        size=size,
    )


def _view(world: Ends, known: NDArray[np.bool_]) -> tuple[float, float]:
    """The level of the final losses and their variance, as far as curves tell them."""
    mean, noise = world.mean[known], world.variance[known]
    apart = float(mean.var()) + 0.02
    weight = 1 / (noise + apart)
    centre = float(weight @ mean / weight.sum())
    weight = 1 / (noise + COMMON * apart)
    seen = float(weight @ (mean - centre) ** 2 / weight.sum())
    return centre, (seen * len(mean) + 2 * world.spread**2) / (len(mean) + 2)


def _posterior(told: _Told, smooth: Floats, nugget: float) -> tuple[Floats, Floats, Floats, Floats]:
    """Log evidence of each world up to a constant; mean[W, N], variance[N] and variance alone."""
    known, count = told.known, told.base.shape[1]
    inner = smooth[np.ix_(known, known)] + np.diag(told.noise + nugget)
    root = np.linalg.cholesky(inner)
    both = np.concatenate([told.offsets.T, smooth[known, :count]], axis=1)
    solved, _ = dtrtrs(root, both, lower=1)
    values, cross = np.split(solved, [len(told.offsets)], axis=1)
    evidence = -0.5 * (values**2).sum(axis=0) - np.log(np.diag(root)).sum()
    mean = told.base + values.T @ cross
    left = np.maximum(np.diag(smooth)[:count] - (cross**2).sum(axis=0), 1e-8)
    weight = nugget / (nugget + told.own)
    mean = mean + weight * (told.ends - mean)
    return evidence, mean, (1 - weight) ** 2 * left + nugget * (1 - weight), left + nugget

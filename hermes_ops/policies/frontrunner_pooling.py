"""Estimates of the final losses, corrected by what trials with similar hyper-parameters come to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

Floats = NDArray[np.float64]
SIGNALS = (0.1, 0.5, 1.2)  # variance of the smooth part, over that of the estimates
NUGGETS = (0.08, 0.4)  # variance of what no other trial tells, over that of the estimates
ENOUGH = 6  # estimates from curves, below which nothing is corrected


@dataclass(frozen=True, slots=True, eq=False)
class Estimates:
    """`mean` and standard deviation `sd` of the final loss of each trial."""

    mean: Floats
    sd: Floats


def pooled(found: Estimates, known: NDArray[np.bool_], kernels: Floats) -> Estimates:
    """The same estimates after a Gaussian process over hyper-parameters has seen them all.

    Only trials that are `known` (begun) teach. `kernels[W, M, M]`: similarities, between which the
    data choose. Without any, or with too little known, the estimates come back as they are.
    """
    if known.sum() < ENOUGH or not len(kernels):
        return found
    noise = found.sd[known] ** 2
    centre = _centre(found.mean[known], noise)
    offset = found.mean[known] - centre
    weight = 1 / (noise + 0.05)
    variance = float(weight @ offset**2 / weight.sum()) + 0.02
    parts = [
        _posterior(signal * variance * kernel, nugget * variance, known, offset, noise)
        for kernel, signal, nugget in product(kernels, SIGNALS, NUGGETS)
    ]
    evidence = np.array([part[0] for part in parts])
    odds = np.exp(evidence - evidence.max())
    odds /= odds.sum()
    means, variances = (np.array([part[k] for part in parts]) for k in (1, 2))
    mean = odds @ means
    spread = odds @ (variances + means**2) - mean**2
    return Estimates(mean + centre, np.sqrt(np.maximum(spread, 1e-8)))


def _centre(mean: Floats, noise: Floats) -> float:
    weight = 1 / (noise + float(mean.var()) + 0.02)
    return float(weight @ mean / weight.sum())


def _posterior(
    smooth: Floats, nugget: float, known: NDArray[np.bool_], offset: Floats, noise: Floats
) -> tuple[float, Floats, Floats]:
    """Log evidence up to a constant, and the mean and variance of every trial."""
    prior = smooth + nugget * np.eye(len(smooth))
    inner = prior[np.ix_(known, known)] + np.diag(noise + 1e-6)
    root = np.linalg.cholesky(inner)
    told = solve_triangular(root, offset, lower=True)
    cross = solve_triangular(root, prior[known], lower=True)
    evidence = -0.5 * float(told @ told) - float(np.log(np.diag(root)).sum())
    mean: Floats = told @ cross
    variance: Floats = np.maximum(np.diag(prior) - (cross**2).sum(axis=0), 1e-8)
    return evidence, mean, variance

"""Bayesian linear regression in closed form, with joint samples of its coefficients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincinv, ndtri

Floats = NDArray[np.float64]
SAMPLES = 160


@dataclass(frozen=True, slots=True, eq=False)
class Belief:
    """What is known of the line before any data.

    `mean` and `sd` (D each) of the first D coefficients; those after them have mean 0 and the
    standard deviation `noise` times one of `scales`, which are weighed by the data. `noise` is the
    expected residual, worth `weight` observations times two.
    """

    mean: Floats
    sd: Floats
    scales: tuple[float, ...]
    noise: float
    weight: float


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """The posterior: a mixture over the scales of normal-inverse-gamma distributions.

    `odds[G]`, `means[G, D]`, `roots[G, D, D]` (inverse Cholesky factors of the precisions),
    `shape`, `rates[G]` of the residual variance.
    """

    odds: Floats
    means: Floats
    roots: Floats
    shape: float
    rates: Floats

    @property
    def mean(self) -> Floats:
        """The expected coefficients."""
        found: Floats = self.odds @ self.means
        return found

    @property
    def noise(self) -> float:
        """The typical residual."""
        return float(np.sqrt(self.odds @ self.rates / self.shape))


def fit(rows: Floats, values: Floats, belief: Belief) -> Fit:
    """The posterior of `values` ~ `rows` @ coefficients; without rows it is the belief itself."""
    known, width, scales = len(belief.mean), rows.shape[1], np.array(belief.scales)
    start = np.zeros(width)
    start[:known] = belief.mean
    variance = np.empty((len(scales), width))
    variance[:, :known] = (belief.sd / belief.noise) ** 2
    variance[:, known:] = scales[:, None] ** 2 + 1e-9
    diagonal = np.arange(width)
    precision = np.repeat((rows.T @ rows)[None], len(scales), axis=0)
    precision[:, diagonal, diagonal] += 1.0 / variance
    roots: Floats = np.linalg.inv(np.linalg.cholesky(precision))
    residual = values - rows @ start
    explained = roots @ (rows.T @ residual)
    means = start + (explained[:, None, :] @ roots)[:, 0]
    left = np.maximum(residual @ residual - (explained**2).sum(axis=1), 0.0)
    shape = belief.weight + len(values) / 2
    rates = belief.weight * belief.noise**2 + left / 2
    evidence = np.log(roots[:, diagonal, diagonal]).sum(axis=1)
    evidence -= np.log(variance).sum(axis=1) / 2 + shape * np.log(rates)
    odds = np.exp(evidence - evidence.max())
    return Fit(odds / odds.sum(), means, roots, shape, rates)


def draw(found: Fit, stream: int) -> tuple[Floats, Floats]:
    """Samples of the coefficients (SAMPLES x D) and of the residual's size (SAMPLES).

    The same `stream` uses the same random numbers at every call: what changes between two calls
    changes because of the data alone.
    """
    normal, share, quantile = _numbers(stream, found.means.shape[1])
    part = np.minimum(np.searchsorted(np.cumsum(found.odds), share), len(found.odds) - 1)
    size = np.sqrt(found.rates[part] / _gamma(found.shape)[quantile])
    made = np.empty_like(normal)
    for number in range(len(found.odds)):
        mine = part == number
        made[mine] = found.means[number] + size[mine, None] * (normal[mine] @ found.roots[number])
    return made, size


@lru_cache(maxsize=256)
def _numbers(stream: int, width: int) -> tuple[Floats, Floats, NDArray[np.intp]]:
    random = np.random.default_rng((2, stream))
    spread = (np.arange(SAMPLES) + 0.5) / SAMPLES
    share = spread[random.permutation(SAMPLES)]
    return random.standard_normal((SAMPLES, width)), share, random.permutation(SAMPLES)


@lru_cache(maxsize=4096)
def _gamma(shape: float) -> Floats:
    quantiles: Floats = gammaincinv(shape, (np.arange(SAMPLES) + 0.5) / SAMPLES)
    return quantiles


@lru_cache(maxsize=1)
def _levels() -> Floats:
    levels: Floats = ndtri((np.arange(24) + 0.5) / 24)
    return levels


def normal_levels() -> Floats:
    """24 equally probable values of a standard normal, ascending."""
    return _levels()

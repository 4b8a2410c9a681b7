"""Bayesian linear regression in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

Floats = NDArray[np.float64]
LEVELS = 12


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


@lru_cache(maxsize=1)
def _levels() -> Floats:
    levels: Floats = ndtri((np.arange(LEVELS) + 0.5) / LEVELS)
    return levels


def normal_levels() -> Floats:
    """LEVELS equally probable values of a standard normal, ascending."""
    return _levels()

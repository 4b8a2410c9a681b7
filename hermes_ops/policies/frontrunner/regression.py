"""Bayesian linear regression in closed form, and the regressions that extrapolate curves.

A sweep has one small regression per stage, from a depth to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from scipy.special import ndtri

from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.frontrunner.table import CurveTable

LEVELS = 12


@dataclass(frozen=True, slots=True, eq=False)
class RegressionPrior:
    """The prior of a linear regression.

    `mean` and `sd` (D each) of the first D coefficients; the coefficients after them have mean 0
    and the standard deviation `noise` times one of `scales`, which are weighed by the data.
    `noise` is the expected residual, worth 2 x `weight` observations.
    """

    mean: Floats
    sd: Floats
    scales: tuple[float, ...]
    noise: float
    weight: float


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """The posterior of a linear regression: a mixture of normal-inverse-gamma distributions.

    One component for each scale: `odds[G]`, `means[G, D]`, `roots[G, D, D]` (inverse Cholesky
    factors of the precisions), and of the residual variance `shape` and `rates[G]`.
    """

    odds: Floats
    means: Floats
    roots: Floats
    shape: float
    rates: Floats

    @property
    def mean(self) -> Floats:
        """The expected coefficients."""
        expected: Floats = self.odds @ self.means
        return expected

    @property
    def noise(self) -> float:
        """The typical residual."""
        return float(np.sqrt(self.odds @ self.rates / self.shape))


def fit(rows: Floats, values: Floats, prior: RegressionPrior) -> Posterior:
    """Return the posterior of `values` ~ `rows` @ coefficients; without rows it is the prior."""
    informed, width, scales = len(prior.mean), rows.shape[1], np.array(prior.scales)
    prior_mean = np.zeros(width)
    prior_mean[:informed] = prior.mean
    variance = np.empty((len(scales), width))
    variance[:, :informed] = (prior.sd / prior.noise) ** 2
    variance[:, informed:] = scales[:, None] ** 2 + 1e-9
    diagonal = np.arange(width)
    precision = np.repeat((rows.T @ rows)[None], len(scales), axis=0)
    precision[:, diagonal, diagonal] += 1.0 / variance
    roots: Floats = np.linalg.inv(np.linalg.cholesky(precision))
    residual = values - rows @ prior_mean
    explained = roots @ (rows.T @ residual)
    means = prior_mean + (explained[:, None, :] @ roots)[:, 0]
    residual_squares = np.maximum(residual @ residual - (explained**2).sum(axis=1), 0.0)
    shape = prior.weight + len(values) / 2
    rates = prior.weight * prior.noise**2 + residual_squares / 2
    evidence = np.log(roots[:, diagonal, diagonal]).sum(axis=1)
    evidence -= np.log(variance).sum(axis=1) / 2 + shape * np.log(rates)
    odds = np.exp(evidence - evidence.max())
    return Posterior(odds / odds.sum(), means, roots, shape, rates)


@lru_cache(maxsize=1)
def normal_levels() -> Floats:
    """Return LEVELS equally probable values of a standard normal, ascending."""
    levels: Floats = ndtri((np.arange(LEVELS) + 0.5) / LEVELS)
    return levels


FIRST_NOISE = 0.1  # of the first stage, over the spread of first losses
GROWTH = 1.2  # of the expected residual from one stage to the next
NOISE_RANGE = (0.02, 0.534)  # of that expectation
PRIOR_WEIGHT = 3.0
KEPT_OF_PRIOR = 0.5  # of earlier trials, at each stage those with the lower losses
# The prior means of the effects on a drop: each at depth 0, and what is added by the last depth.
LEVEL_EFFECT = (-0.0266, -0.08)  # of the loss above the mean
SLOPE_EFFECT = (0.9, -0.562)  # of the drop before
SLOW_EFFECT = (0.0133, 0.0333)  # of one deviation of slowness; multiplied by the gain
EFFECT_SDS = (1.0, 0.08, 0.375, 0.0426)  # prior sds: of a drop; of level, slope and slow effects


@dataclass(frozen=True, slots=True, eq=False)
class FinalLosses:
    """The final losses by the curves alone, on the scale of `scaled`.

    `mean[M]` and `variance[M]` for each trial (NaN for one that has not begun);
    `variance_by_depth[K]`: the variance of the final loss for a trial whose loss is known up to
    each depth; `spread`: the standard deviation of all final losses, propagated from the first
    losses through the stages. `path[M, K]`: the expected loss at each depth; `variance_to[K, K]`:
    the variance of the loss at the first depth for a trial known up to the second.
    """

    mean: Floats
    variance: Floats
    variance_by_depth: Floats
    spread: float
    path: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    variance_to: Floats = field(default_factory=lambda: np.zeros((0, 0)))


@dataclass(slots=True)
class StageRegressions:
    """The regressions of all stages of a sweep, in one scenario.

    The drop from a depth to the next depends on the level there, the slope so far and the slowness
    of the trial. `gain`: the prior of how much further slow trials fall, over the mean of two
    recorded families; the data of a stage correct it. `scaled[M, K]`: losses, spread about 1.
    """

    table: CurveTable
    scaled: Floats
    slowness: Floats
    gain: float
    fits: list[Posterior] = field(init=False, default_factory=list)
    mean_levels: list[float] = field(init=False, default_factory=list)
    spread: float = field(init=False, default=1.0)

    def __post_init__(self) -> None:
        noise, mean_level = FIRST_NOISE, 0.0
        for stage in range(1, self.scaled.shape[1]):
            before = self.scaled[:, stage - 1]
            has_value = ~np.isnan(before)
            mean_level = float(before[has_value].mean()) if has_value.any() else mean_level
            posterior = self._learn(stage, mean_level, noise)
            self.fits.append(posterior)
            self.mean_levels.append(mean_level)
            noise = float(np.clip(GROWTH * posterior.noise, *NOISE_RANGE))
            carried_spread = (1 + posterior.mean[1]) * self.spread
            self.spread = max(float(np.hypot(carried_spread, posterior.noise)), 0.02)
            mean_level += float(posterior.mean[0])

    def final_losses(self) -> FinalLosses:
        """Follow the regressions from each trial's depth to its last step."""
        variance_to = self._variance_to()
        variance_by_depth = variance_to[-1]
        reached = (~np.isnan(self.scaled)).sum(axis=1)
        lowest = np.fmin.reduce(self.scaled, axis=1)
        variance = np.where(reached > 0, variance_by_depth[np.maximum(reached, 1) - 1], np.nan)
        path = self._follow()
        mean = np.fmin(path[:, -1], lowest)
        return FinalLosses(mean, variance, variance_by_depth, self.spread, path, variance_to)

    def _ratio(self, stage: int) -> float:
        depths = self.table.depths
        return float(np.log(depths[stage] / depths[stage - 1]))

    def _learn(self, stage: int, mean_level: float, noise: float) -> Posterior:
        before, after = self.scaled[:, stage - 1], self.scaled[:, stage]
        is_chosen = ~np.isnan(after)
        earlier_trials = before[self.table.trial_count :]
        if len(earlier_trials):
            limit = np.quantile(earlier_trials, KEPT_OF_PRIOR)
            is_chosen[self.table.trial_count :] &= earlier_trials <= limit
        slope = np.zeros_like(before)
        if stage > 1:
            growth = self._ratio(stage) / self._ratio(stage - 1)
            slope = (before - self.scaled[:, stage - 2]) * growth
        regressors = (np.ones_like(before), before - mean_level, slope, self.slowness)
        rows, drops = np.stack(regressors, axis=1)[is_chosen], (after - before)[is_chosen]
        return fit(rows, drops, _prior(stage, self.table.depths, noise, self.gain))

    def _follow(self) -> Floats:
        """Return M x K: the expected loss at each depth; NaN for a trial that has not begun."""
        level = self.scaled[:, 0]
        path = [level]
        slope = np.zeros_like(level)
        for stage in range(1, self.scaled.shape[1]):
            mean, ratio = self.fits[stage - 1].mean, self._ratio(stage)
            above = level - self.mean_levels[stage - 1]
            drop = mean @ np.stack([np.ones_like(level), above, ratio * slope, self.slowness])
            seen = self.scaled[:, stage]
            after = np.where(np.isnan(seen), level + drop, seen)
            slope, level = (after - level) / ratio, after
            path.append(level)
        return np.stack(path, axis=1)

    def _variance_to(self) -> Floats:
        """Return K x K: the variance of the loss at each depth, by the depth that is known.

        It is that of a linear process of (level, slope).
        """
        stages = self.scaled.shape[1]
        covariance = np.zeros((stages, 2, 2))
        variance = np.zeros((stages, stages))
        for stage in range(1, stages):
            mean, noise = self.fits[stage - 1].mean, self.fits[stage - 1].noise
            ratio = self._ratio(stage)
            drop = np.array([mean[1], mean[2] * ratio])
            transition = np.stack([drop + np.array([1.0, 0.0]), drop / ratio])
            innovation = noise * np.array([1.0, 1 / ratio])
            added = np.outer(innovation, innovation)
            covariance[:stage] = transition @ covariance[:stage] @ transition.T + added
            variance[stage] = covariance[:, 0, 0]
        return variance


def _prior(stage: int, depths: tuple[int, ...], noise: float, gain: float) -> RegressionPrior:
    """Return the prior of a stage's drop, before any trial has passed the stage.

    The slope continues, a little weaker later; worse trials catch up a little; trials that are
    slower per step fall a little further. How much is learnt by bench/frontrunner_constants.py.
    """
    share, is_first = depths[stage] / depths[-1], stage == 1
    (level, later_level), (slope, later_slope) = LEVEL_EFFECT, SLOPE_EFFECT
    slow, later_slow = SLOW_EFFECT
    mean = np.array(
        [
            0.0,
            level + later_level * share**2,
            0.0 if is_first else slope + later_slope * share,
            -gain * (slow + later_slow * share),
        ]
    )
    drop_sd, level_sd, slope_sd, slow_sd = EFFECT_SDS
    sd = np.array([drop_sd, level_sd * (1 + share), 1e-3 if is_first else slope_sd, slow_sd])
    return RegressionPrior(mean, sd, (1.0,), noise, PRIOR_WEIGHT)

"""How curves go on: one small regression a stage, and what they say of all ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hermes_ops.policies.frontrunner_regression import Belief, Fit, fit
from hermes_ops.policies.frontrunner_table import Table

Floats = NDArray[np.float64]
FIRST_NOISE = 0.1  # of the first stage, over the spread of first losses
GROWTH = 1.2  # of the expected residual from one stage to the next
NOISE_RANGE = (0.02, 1.0)  # of that expectation
BELIEF_WEIGHT = 3.0
PERSISTENCE = (0.35, 20.0)  # of residuals from stage to stage: believed, worth so many pairs
KEPT_OF_PRIOR = 0.5  # of earlier trials, at each stage those with the lower losses


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """What curves alone say of the final losses, on the scale of `scaled`.

    `mean[M]` and `variance[M]` for each trial (NaN for one that has not begun); `ahead[K]`: the
    variance of the end for a trial whose loss is known up to each depth; `spread`: the standard
    deviation of final losses that the stages make of the first ones.
    """

    mean: Floats
    variance: Floats
    ahead: Floats
    spread: float


@dataclass(slots=True)
class Stages:
    """The regressions of all stages of a sweep, in one world.

    The drop from a depth to the next depends on the level there, the slope so far and the slowness
    of the trial. `gain`: how much further slow trials are believed to fall, over the mean of two
    recorded families; the data of a stage correct it. `scaled[M, K]`: losses, spread about 1.
    """

    table: Table
    scaled: Floats
    slowness: Floats
    gain: float
    fits: list[Fit] = field(init=False, default_factory=list)
    middles: list[float] = field(init=False, default_factory=list)
    residuals: Floats = field(init=False)
    spread: float = field(init=False, default=1.0)

    def __post_init__(self) -> None:
        self.residuals = np.full_like(self.scaled, np.nan)
        noise, middle = FIRST_NOISE, 0.0
        for stage in range(1, self.scaled.shape[1]):
            before = self.scaled[:, stage - 1]
            there = ~np.isnan(before)
            middle = float(before[there].mean()) if there.any() else middle
            found = self._learn(stage, middle, noise)
            self.fits.append(found)
            self.middles.append(middle)
            noise = float(np.clip(GROWTH * found.noise, *NOISE_RANGE))
            kept = (1 + found.mean[1]) * self.spread
            self.spread = max(float(np.hypot(kept, found.noise)), 0.02)
            middle += float(found.mean[0])

    def ends(self) -> Ends:
        """Follow the regressions from where each trial is to its end."""
        persistence = self._persistence()
        ahead = self._ahead(persistence)
        reached = (~np.isnan(self.scaled)).sum(axis=1)
        known = np.fmin.reduce(self.scaled, axis=1)
        variance = np.where(reached > 0, ahead[np.maximum(reached, 1) - 1], np.nan)
        return Ends(np.fmin(self._follow(persistence), known), variance, ahead, self.spread)

    def _ratio(self, stage: int) -> float:
        depths = self.table.depths
        return float(np.log(depths[stage] / depths[stage - 1]))

    def _learn(self, stage: int, middle: float, noise: float) -> Fit:
        before, after = self.scaled[:, stage - 1], self.scaled[:, stage]
        chosen = ~np.isnan(after)
        past = before[self.table.trials :]
        if len(past):
            chosen[self.table.trials :] &= past <= np.quantile(past, KEPT_OF_PRIOR)
        slope = np.zeros_like(before)
        if stage > 1:
            growth = self._ratio(stage) / self._ratio(stage - 1)
            slope = (before - self.scaled[:, stage - 2]) * growth
        parts = (np.ones_like(before), before - middle, slope, self.slowness)
        rows, drops = np.stack(parts, axis=1)[chosen], (after - before)[chosen]
        found = fit(rows, drops, _belief(stage, self.table.depths, noise, self.gain))
        left = drops - rows @ found.mean
        self.residuals[chosen, stage] = np.clip(left / max(found.noise, 1e-6), -3.0, 3.0)
        return found

    def _persistence(self) -> float:
        """How much of a stage's residual the next one repeats."""
        early, late = self.residuals[:, 2:-1], self.residuals[:, 3:]
        pairs = ~np.isnan(early) & ~np.isnan(late)
        a, b = early[pairs], late[pairs]
        believed, worth = PERSISTENCE
        found = (a @ b + believed * worth) / (np.sqrt((a @ a) * (b @ b)) + worth)
        return float(np.clip(found, 0.0, 0.9))

    def _follow(self, persistence: float) -> Floats:
        """The expected final loss of each trial; NaN for one that has not begun."""
        level = self.scaled[:, 0]
        slope, error = np.zeros_like(level), np.zeros_like(level)
        for stage in range(1, self.scaled.shape[1]):
            mean, ratio = self.fits[stage - 1].mean, self._ratio(stage)
            error = error * (persistence if stage > 2 else 0.0)
            drop = mean[0] + mean[1] * (level - self.middles[stage - 1]) + mean[2] * ratio * slope
            drop = drop + mean[3] * self.slowness + self.fits[stage - 1].noise * error
            seen = self.scaled[:, stage]
            after = np.where(np.isnan(seen), level + drop, seen)
            told = np.nan_to_num(self.residuals[:, stage])
            error = np.where(np.isnan(seen), error, told)
            slope, level = (after - level) / ratio, after
        return level

    def _ahead(self, persistence: float) -> Floats:
        """The variance of the end from each depth: (level, slope, error) is a linear process."""
        stages = self.scaled.shape[1]
        spread = np.zeros((stages, 3, 3))
        for stage in range(1, stages):
            mean, noise = self.fits[stage - 1].mean, self.fits[stage - 1].noise
            ratio, repeated = self._ratio(stage), persistence if stage > 2 else 0.0
            rest = np.sqrt(1 - repeated**2)
            drop = np.array([mean[1], mean[2] * ratio, noise * repeated])
            move = np.stack([drop + np.array([1.0, 0.0, 0.0]), drop / ratio, [0.0, 0.0, repeated]])
            fresh = rest * np.array([noise, noise / ratio, 1.0])
            spread[:stage] = move @ spread[:stage] @ move.T + np.outer(fresh, fresh)
        return spread[:, 0, 0]


def _belief(stage: int, depths: tuple[int, ...], noise: float, gain: float) -> Belief:
    """What is believed of a stage's drop before any trial has gone through it.

    The slope goes on, a little weaker later; what is worse catches up a little; what trains
    slower per step falls a little further. Read off two families of recorded curves, with room.
    """
    share = depths[stage] / depths[-1]
    later = stage > 1
    slope = 0.9 - 0.3 * share if later else 0.0
    mean = np.array([0.0, -0.05 - 0.15 * share**2, slope, -gain * (0.02 + 0.05 * share)])
    sd = np.array([1.0, 0.15 * (1 + share), 0.3 if later else 1e-3, 0.08])
    return Belief(mean, sd, (1.0,), noise, BELIEF_WEIGHT)

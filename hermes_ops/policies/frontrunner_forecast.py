"""How the trials of a sweep may end: samples of all their curves together, and the time left."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from hermes_ops.policies.frontrunner_pooling import Estimates, pooled
from hermes_ops.policies.frontrunner_regression import SAMPLES, Belief, Fit, draw, fit
from hermes_ops.policies.frontrunner_table import Table

Floats = NDArray[np.float64]
WARP = 0.25  # of the sweep's range of losses: below it the scale is nearly linear
CEILING = 8.0  # of that range: a loss beyond it, or none that is finite, counts as this
STAGE_SCALES = (0.03, 0.5, 1.5)  # of hyper-parameter effects, over the residual
FIRST_SCALES = (0.05, 0.5, 1.5)
PACE_SCALES = (0.3, 1.0, 3.0)
FIRST_NOISE = 0.1  # of the first stage, over the spread of first losses
GROWTH = 1.2  # of the expected residual from one stage to the next
BELIEF_WEIGHT = 3.0
PERSISTENCE = (0.35, 20.0)  # of residuals from stage to stage: believed, worth so many pairs
SPREADS = ((1.0, 0.9), (2.0, 0.06), (4.0, 0.03), (8.0, 0.01))  # inflation, chance
SLOW_GAIN = 3.0  # of a trial one deviation slower a step, over the mean of two recorded families
UNSEEN = 0.05  # samples that a trial is granted without having won them
KEPT_OF_PRIOR = 0.5  # of earlier trials, at each stage those with the lower losses


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """What is expected of N trials at K depths.

    `chance[N]`: to end as the best of those that are not over, given that one of them is;
    `left_s[N, K]`: training seconds until each depth, 0 where it has been; `insight[N, K]`: the
    correlation of the loss at each depth with the final one.
    """

    chance: Floats
    left_s: Floats
    insight: Floats


def forecast(table: Table) -> Forecast:
    """The forecast, without randomness of its own: the same table gives the same numbers."""
    count, stages = table.trials, len(table.depths)
    if not table.seen[:, 0].any():
        alone = np.where(table.over, 0.0, 1.0)
        steps = np.broadcast_to(np.array(table.depths, float), (count, stages))
        return Forecast(alone / max(alone.sum(), 1.0), steps, np.full((count, stages), 0.5))
    pace = _pace(table)
    lengths = np.diff(np.array(table.depths, float), prepend=0.0)
    ahead = np.where(table.seen[:count], 0.0, np.exp(pace[:count]) * lengths)
    return _Simulation(table, pace).run(np.cumsum(ahead, axis=1))


def _pace(table: Table) -> Floats:
    """M x K: log of the seconds a step in each stage, measured or expected."""
    lengths = np.diff(np.array(table.depths, float), prepend=0.0)
    with np.errstate(invalid="ignore"):
        spent = np.maximum(np.diff(table.seconds, axis=1, prepend=0.0), 1e-9)
        measured = np.log(spent / lengths)
    found = np.empty_like(measured)
    seen = table.seen[:, 0]
    rows = np.concatenate([np.ones((len(measured), 1)), table.features], axis=1)
    middle = measured[seen, 0].mean()
    belief = Belief(np.zeros(1), np.array([0.7]), PACE_SCALES, 0.4, 1.5)
    expected = rows @ fit(rows[seen], measured[seen, 0] - middle, belief).mean + middle
    found[:, 0] = np.where(seen, measured[:, 0], expected)
    for stage in range(1, measured.shape[1]):
        seen = table.seen[:, stage]
        before = found[:, stage - 1]
        found[:, stage] = np.where(seen, measured[:, stage], before)
        if seen.any():
            change, middle = measured[seen, stage] - before[seen], before[seen].mean()
            off = before[seen] - middle
            common = change.sum() / (len(change) + 0.1)
            slope = off @ (change - common) / (off @ off + 0.5)
            found[~seen, stage] += common + slope * (before[~seen] - middle)
    return found


def _scaled(table: Table) -> Floats:
    """Losses on a scale that no affine change of them moves; spread about 1, fine near the best."""
    losses, seen = table.losses, table.seen
    finite = losses[np.isfinite(losses)]
    if not len(finite):
        return np.where(seen, 0.0, np.nan)
    first = losses[seen[:, 0], 0]
    first = first[np.isfinite(first)]
    low, middle = float(finite.min()), float(np.median(first if len(first) else finite))
    reach = max(middle - low, 1e-9 * (1.0 + abs(low)))
    with np.errstate(invalid="ignore", over="ignore"):
        scaled: Floats = np.log(np.minimum((losses - low) / reach, CEILING) + WARP)
    starts = scaled[seen[:, 0], 0]
    spread = np.sqrt((starts.var() * len(starts) + 0.48) / (len(starts) + 3))
    return scaled / max(float(spread), 1e-3)


@lru_cache(maxsize=8)
def _errors(stages: int, count: int) -> NDArray[np.float32]:
    """Standard normal errors of each stage, sample and trial."""
    random = np.random.default_rng(1)
    return random.standard_normal((stages, SAMPLES, count), dtype=np.float32)


@dataclass(slots=True)
class _Simulation:
    """Samples of all curves, from the depth that each trial has reached to its end."""

    table: Table
    pace: Floats
    scaled: Floats = field(init=False)
    slowness: Floats = field(init=False)
    residuals: Floats = field(init=False)
    fits: list[Fit] = field(init=False)
    middles: list[float | None] = field(init=False)

    def __post_init__(self) -> None:
        self.scaled = _scaled(self.table)
        pace = self.pace[:, min(2, self.pace.shape[1] - 1)]
        self.slowness = (pace - pace.mean()) / max(float(pace.std()), 0.05)
        self.residuals = np.full_like(self.scaled, np.nan)
        self.fits, self.middles = [], []
        noise = FIRST_NOISE
        for stage in range(1, self.scaled.shape[1]):
            found, middle = self._stage(stage, noise)
            self.fits.append(found)
            self.middles.append(middle)
            noise = float(np.clip(GROWTH * found.noise, 0.02, 1.0))

    def run(self, left_s: Floats) -> Forecast:
        """Simulate all stages and count who ends as the best."""
        count, stages = self.table.trials, self.scaled.shape[1]
        paths = np.empty((stages, SAMPLES, count), np.float32)
        paths[0] = self._first()
        known = np.fmin.reduce(self.scaled[:count], axis=1)
        best = np.where(np.isnan(known), paths[0], known).astype(np.float32)
        error = np.zeros((SAMPLES, count), np.float32)
        slope = np.zeros((SAMPLES, count), np.float32)
        persistence = self._persistence()
        for stage in range(1, stages):
            error = self._error(stage, error, persistence)
            paths[stage] = self._next(stage, paths[stage - 1], slope, error)
            slope = (paths[stage] - paths[stage - 1]) / np.float32(self._ratio(stage))
            ahead = np.isnan(self.scaled[:count, stage]) & ~self.table.over
            np.minimum(best, paths[stage], out=best, where=ahead)
        insight = _insight(paths, best)
        return Forecast(_chance(self._corrected(best), self.table.over), left_s, insight)

    def _corrected(self, best: NDArray[np.float32]) -> NDArray[np.float32]:
        """The samples, moved and stretched to what similar configurations came to."""
        count = self.table.trials
        ends = np.fmin.reduce(self.scaled[count:], axis=1)
        before = Estimates(
            np.concatenate([best.mean(axis=0), ends]).astype(np.float64),
            np.concatenate([best.std(axis=0), np.zeros(len(ends))]).astype(np.float64),
        )
        after = pooled(before, self.table.seen[:, 0], self.table.kernels)
        runs = ~self.table.over
        stretch = np.ones(count)
        wide = runs & (before.sd[:count] > 1e-6)
        stretch[wide] = after.sd[:count][wide] / before.sd[:count][wide]
        centre = np.where(runs, after.mean[:count], before.mean[:count])
        moved: NDArray[np.float32] = (centre + (best - before.mean[:count]) * stretch).astype(
            np.float32
        )
        return moved

    def _ratio(self, stage: int) -> float:
        depths = self.table.depths
        return float(np.log(depths[stage] / depths[stage - 1]))

    def _rows(self, stage: int, middle: float) -> Floats:
        """What the drop in a stage may depend on: level, slope, slowness, hyper-parameters."""
        level = self.scaled[:, stage - 1]
        slope = np.zeros_like(level)
        if stage > 1:
            slope = (level - self.scaled[:, stage - 2]) * (
                self._ratio(stage) / self._ratio(stage - 1)
            )
        parts = (np.ones_like(level), level - middle, slope, self.slowness)
        return np.concatenate([np.stack(parts, axis=1), self.table.features], axis=1)

    def _stage(self, stage: int, noise: float) -> tuple[Fit, float | None]:
        level = self.scaled[:, stage - 1]
        there = ~np.isnan(level)
        middle = float(level[there].mean()) if there.any() else None
        rows = self._rows(stage, middle or 0.0)
        chosen = ~np.isnan(self.scaled[:, stage])
        past = level[self.table.trials :]
        if len(past):
            chosen[self.table.trials :] &= past <= np.quantile(past, KEPT_OF_PRIOR)
        drops = self.scaled[chosen, stage] - level[chosen]
        found = fit(rows[chosen], drops, _belief(stage, self.table.depths, noise))
        left = drops - rows[chosen] @ found.mean
        self.residuals[chosen, stage] = np.clip(left / max(found.noise, 1e-6), -3.0, 3.0)
        return found, middle

    def _persistence(self) -> float:
        """How much of a stage's residual the next one repeats."""
        early, late = self.residuals[:, 2:-1], self.residuals[:, 3:]
        pairs = ~np.isnan(early) & ~np.isnan(late)
        a, b = early[pairs], late[pairs]
        believed, worth = PERSISTENCE
        found = (a @ b + believed * worth) / (np.sqrt((a @ a) * (b @ b)) + worth)
        return float(np.clip(found, 0.0, 0.9))

    def _first(self) -> NDArray[np.float32]:
        """Samples of the first losses: those seen, else from the hyper-parameters."""
        first, features = self.scaled[:, 0], self.table.features
        seen = ~np.isnan(first)
        rows = np.concatenate([np.ones((len(first), 1)), features], axis=1)
        middle = first[seen].mean()
        belief = Belief(np.zeros(1), np.ones(1), FIRST_SCALES, 0.7, BELIEF_WEIGHT)
        made, size = draw(fit(rows[seen], first[seen] - middle, belief), 0)
        count = self.table.trials
        errors = _errors(self.scaled.shape[1], count)[0]
        guess = made @ rows[:count].T + middle + size[:, None] * errors
        return np.where(seen[:count], first[:count], guess).astype(np.float32)

    def _error(
        self, stage: int, before: NDArray[np.float32], persistence: float
    ) -> NDArray[np.float32]:
        """This stage's residuals, in units of its noise: seen ones, else going on from before."""
        count = self.table.trials
        fresh = _errors(self.scaled.shape[1], count)[stage]
        begun = stage > 2 or (stage == 2 and persistence > 0)
        went_on = persistence * before + np.sqrt(1 - persistence**2) * fresh if begun else fresh
        seen = self.residuals[:count, stage]
        return np.where(np.isnan(seen), went_on, seen).astype(np.float32)

    def _next(
        self,
        stage: int,
        before: NDArray[np.float32],
        slope: NDArray[np.float32],
        error: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """The losses at the end of a stage: seen ones, else samples."""
        count = self.table.trials
        middle = self.middles[stage - 1]
        centre = float(before.mean()) if middle is None else middle
        made, size = draw(self.fits[stage - 1], stage)
        part = made.astype(np.float32)
        fixed = np.concatenate(
            [np.ones((count, 1)), self.slowness[:count, None], self.table.features[:count]], axis=1
        ).astype(np.float32)
        drop = np.concatenate([part[:, :1], part[:, 3:]], axis=1) @ fixed.T
        drop += part[:, 1:2] * (before - np.float32(centre))
        drop += part[:, 2:3] * np.float32(self._ratio(stage)) * slope
        drop += size.astype(np.float32)[:, None] * error
        seen = self.scaled[:count, stage]
        return np.where(np.isnan(seen), before + drop, seen).astype(np.float32)


def _belief(stage: int, depths: tuple[int, ...], noise: float) -> Belief:
    """What is believed of a stage's drop before any trial has gone through it.

    The slope goes on, a little weaker later; what is worse catches up a little; what trains
    slower per step falls a little further. Read off two families of recorded curves, with room.
    """
    share = depths[stage] / depths[-1]
    later = stage > 1
    slope = 0.9 - 0.3 * share if later else 0.0
    mean = np.array([0.0, -0.05 - 0.15 * share**2, slope, -SLOW_GAIN * (0.02 + 0.05 * share)])
    sd = np.array([1.0, 0.15 * (1 + share), 0.3 if later else 1e-3, 0.08])
    return Belief(mean, sd, STAGE_SCALES, noise, BELIEF_WEIGHT)


def _chance(best: NDArray[np.float32], over: NDArray[np.bool_]) -> Floats:
    """Each trial's chance to end as the best of those that run on, given that one of them does.

    Half of it are shares of samples won, half the smoother chances of one trial's normal
    distribution against the best of the others. The model is least right about the very best, so
    some of the belief is in errors several times as large; where those who are over win nearly
    all samples, that is what is left.
    """
    centre = best.mean(axis=0)
    sd = np.maximum(best.std(axis=0), 1e-4)
    found = np.zeros(best.shape[1])
    for spread, odds in SPREADS:
        ends = centre + np.float32(spread) * (best - centre)
        winners = ends.argmin(axis=1)
        won = np.bincount(winners, minlength=len(found)) / len(best)
        found += odds * (won + _against_best(ends, winners, centre, spread * sd)) / 2
    found[over] = 0.0
    runs = ~over
    if found.sum() <= 0:
        found[runs] = 1.0
    found /= max(found.sum(), 1e-300)
    found[runs] = (found[runs] * SAMPLES + UNSEEN) / (SAMPLES + UNSEEN * runs.sum())
    return found


def _against_best(
    ends: NDArray[np.float32],
    winners: NDArray[np.intp],
    centre: NDArray[np.float32],
    sd: NDArray[np.float32],
) -> Floats:
    """The mean chance of each trial to end below the lowest of the others."""
    if len(centre) < 2:
        return np.ones(len(centre))
    first, second = np.partition(ends, 1, axis=1)[:, :2].T
    rows = np.arange(len(ends))
    lowest = np.broadcast_to(first[:, None], ends.shape).copy()
    lowest[rows, winners] = second
    shares = ndtr((lowest - centre) / sd).mean(axis=0)
    return np.asarray(shares, dtype=np.float64)


def _insight(paths: NDArray[np.float32], best: NDArray[np.float32]) -> Floats:
    """N x K: correlation of a depth's loss with the final one, over the samples; 0 if known."""
    moved = paths - paths.mean(axis=1, keepdims=True)
    final = best - best.mean(axis=0)
    spread = np.sqrt((moved**2).mean(axis=1) * (final**2).mean(axis=0))
    both = (moved * final).mean(axis=1)
    found: Floats = np.where(spread > 1e-6, both / np.maximum(spread, 1e-6), 0.0).T
    return np.minimum(np.maximum(found.astype(np.float64), 0.0), 0.99)

"""How the trials of a sweep may end, and the time left to them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hermes_ops.policies.frontrunner_chance import by_rank, chances
from hermes_ops.policies.frontrunner_pooling import Crowd, Outlook, pooled
from hermes_ops.policies.frontrunner_regression import Belief, fit
from hermes_ops.policies.frontrunner_stages import Ends, Stages
from hermes_ops.policies.frontrunner_table import Table

Floats = NDArray[np.float64]
KEPT = 64  # tables whose forecast is kept, for as many sweeps of a pool
WARP = 0.25  # of the sweep's range of losses: below it the scale is nearly linear
CEILING = 8.0  # of that range: a loss beyond it, or none that is finite, counts as this
PACE_SCALES = (0.3, 1.0, 3.0)
PACE_REACH = 2.0  # log units from the usual pace of a stage: a clock that stood still tells no more
SLOW_GAIN = 3.0  # of a trial one deviation slower a step, over the mean of two recorded families
SLOW_REACH = 2.0  # deviations: who is slower still is not believed to fall further still
WORLDS = ((1.0, 0.4), (0.0, 0.6))  # share of SLOW_GAIN, chance: slow trials may fall further or not


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


@lru_cache(maxsize=KEPT)
def forecast(table: Table) -> Forecast:
    """The forecast, without randomness of its own: the same table gives the same numbers.

    It is kept for the sweeps of which nothing new is known at the next decision.

    Curves are extended in two worlds, one in which slow trials fall further late, one in which they
    do not. Early depths cannot tell which is true, so both count, and who is best in either is
    looked at. Ranks have the last word (`by_rank`).
    """
    count, stages = table.trials, len(table.depths)
    if not table.seen[:, 0].any():
        alone = np.where(table.over, 0.0, 1.0)
        steps = np.broadcast_to(np.array(table.depths, float), (count, stages))
        return Forecast(alone / max(alone.sum(), 1.0), steps, np.full((count, stages), 0.5))
    pace = _pace(table)
    lengths = np.diff(np.array(table.depths, float), prepend=0.0)
    ahead = np.where(table.seen[:count], 0.0, np.exp(pace[:count]) * lengths)
    scaled, slowness = _scaled(table), _slowness(pace)
    gains, odds = zip(*WORLDS, strict=True)
    ends = [Stages(table, scaled, slowness, SLOW_GAIN * gain).ends() for gain in gains]
    outlooks = pooled(ends, gains, Crowd(table.kernels, slowness, count))
    known = np.fmin.reduce(scaled[:count], axis=1)
    record = float(np.fmin.reduce(known[table.over], initial=np.inf))
    chance, insight = np.zeros(count), np.zeros((count, stages))
    for share, end, outlook in zip(odds, ends, outlooks, strict=True):
        chance += share * chances(outlook.mean, outlook.sd, ~table.over, record)
        insight += share * _insight(table, end, outlook)
    told = by_rank(chance, table.losses[:count], table.reached)
    return Forecast(told, np.cumsum(ahead, axis=1), insight)


def _insight(table: Table, ends: Ends, outlook: Outlook) -> Floats:
    """N x K: correlation of what is known at a depth with the final loss; 0 where known today."""
    own = ends.variance[: table.trials, None]
    left = np.where(np.isnan(own), ends.ahead, np.fmin(ends.ahead, own))
    then = _together(left, outlook.alone[:, None])
    now = np.where(np.isnan(own), outlook.alone[:, None], _together(own, outlook.alone[:, None]))
    told = np.sqrt(np.clip(1 - then / now, 0.0, 1.0))
    return np.where(table.seen[: table.trials], 0.0, np.minimum(told, 0.99))


def _together(own: Floats, alone: Floats) -> Floats:
    """The variance that two independent tellers leave."""
    found: Floats = 1 / (1 / np.maximum(own, 1e-9) + 1 / alone)
    return found


def _slowness(pace: Floats) -> Floats:
    """Log seconds a step, early in training, in standard deviations of the sweep."""
    early = pace[:, min(2, pace.shape[1] - 1)]
    off = (early - early.mean()) / max(float(early.std()), 0.05)
    found: Floats = np.clip(off, -SLOW_REACH, SLOW_REACH)
    return found


def _pace(table: Table) -> Floats:
    """M x K: log of the seconds a step in each stage, measured or expected."""
    measured = _measured(table)
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


def _measured(table: Table) -> Floats:
    """M x K: log of the seconds a step measured in each stage, NaN where a trial has not been."""
    lengths = np.diff(np.array(table.depths, float), prepend=0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        spent = np.maximum(np.diff(table.seconds, axis=1, prepend=0.0), 0.0)
        found: Floats = np.log(spent / lengths)
    for stage in found.T:
        usual = stage[np.isfinite(stage)]
        middle = float(np.median(usual)) if len(usual) else 0.0
        np.clip(stage, middle - PACE_REACH, middle + PACE_REACH, out=stage)
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

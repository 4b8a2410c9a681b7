"""From what is expected of each final loss to the chance of ending as the best."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Floats = NDArray[np.float64]
DOUBTS = ((0.0, 0.4), (0.5, 0.2), (1.0, 0.2), (2.0, 0.2))  # error of the model, its chance
BINS = 48
UNSEEN = 3e-4  # the chance that a trial is granted whatever the model says
SURER = 0.85  # recorded ends lie so much nearer to their means than the forecasts' deviations say
RANKS = 2.5  # log odds from the first to the last of those that have been as deep
MIDDLE = 0.6  # the rank of a trial that has not begun


def chances(mean: Floats, sd: Floats, runs: NDArray[np.bool_], record: float) -> Floats:
    """Each trial's chance to end as the best of those that run, given that one of them is.

    `record`: the lowest loss of those that run no more. The model is least right about the very
    best, so part of the belief is in an error that all trials share alike, as large as DOUBTS times
    their usual standard deviation; the harder the record is to beat, the more that part counts.
    """
    found = np.zeros(len(mean))
    if not runs.any():
        return found
    centre, own = mean[runs], np.maximum(SURER * sd[runs], 1e-4)
    usual = np.sqrt((own**2).mean())
    wins = sum(odds * _wins(centre, np.hypot(own, doubt * usual), record) for doubt, odds in DOUBTS)
    total = float(np.sum(wins))
    share = wins / total if total > 1e-300 else np.full(len(centre), 1 / len(centre))
    found[runs] = (share + UNSEEN) / (1 + UNSEEN * len(centre))
    return found


def by_rank(chance: Floats, losses: Floats, reached: NDArray[np.intp]) -> Floats:
    """The chances with what a trial's rank tells, whatever shape its curve has; sum 1.

    A second opinion that no assumption about curves can spoil: the share of the trials that were
    better at the depth where this one is. `losses[N, K]` at each depth (NaN: not been there),
    `reached[N]`: depths passed. RANKS and MIDDLE are near the maximum of likelihood on seven of the
    recorded files of curves, and change little when any one of them is left out.
    """
    depth = np.maximum(reached - 1, 0)
    others = losses[:, depth].T
    own = np.diag(others)[:, None]
    below, upto = (others < own).sum(axis=1), (others <= own).sum(axis=1)
    there = np.maximum((~np.isnan(others)).sum(axis=1), 1)
    ranks = np.where(reached > 0, (below + upto - 1) / 2 / there, MIDDLE)
    told: Floats = chance * np.exp(-RANKS * ranks)
    total = float(told.sum())
    return told / total if total > 0 else told


def _wins(centre: Floats, sd: Floats, record: float) -> Floats:
    """The chance of each to end below the record and all others, by summing over the lowest."""
    low = float((centre - 4 * sd).min())
    high = min(float((centre + 3 * sd).min()), record)
    high = high if high > low else low + 1e-3
    edges = np.linspace(low, high, BINS + 1)
    below = ndtr((edges - centre[:, None]) / sd[:, None])
    above = np.maximum(1 - (below[:, 1:] + below[:, :-1]) / 2, 1e-6)
    others = np.exp(np.log(above).sum(axis=0))
    wins: Floats = (np.diff(below, axis=1) / above) @ others
    return wins

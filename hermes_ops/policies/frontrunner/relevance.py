"""The relevance of each hyper-parameter to the final loss, learnt from complete trials.

It is automatic relevance determination (MacKay 1994, Neal 1996): each hyper-parameter has a weight
in the distance of two configurations, and the weights are those with the largest evidence of a
Gaussian process. They are found by coordinate ascent on a grid of factors, which is deterministic
and takes some ten milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dtrtrs

from hermes_ops.policies.frontrunner.configurations import Configuration, columns_of, distances

Floats = NDArray[np.float64]
LEAST_TRIALS = 32  # complete ones; what fewer say misleads more than it helps
LEAST_A_PARAMETER = 4  # complete trials for each hyper-parameter, likewise
MOST_TRIALS = 64  # a limit of the time
FACTORS = (0.25, 4.0)  # of a weight that are tried, beside IRRELEVANT
IRRELEVANT = 0.02  # the weight of a hyper-parameter that changes nothing
PRICE = 0.5  # nats of evidence that a change of a weight must bring
ROUNDS = 2  # over all hyper-parameters
MOST_CHANGES = 40  # of a weight that are considered: a limit of the time
WIDTH = 0.7  # of the exponent, at the median squared distance
VARIANCES = ((0.5, 0.3), (1.2, 0.08))  # of signal and nugget, over that of the final losses
COMMON = 0.3  # variance of the level of all, likewise
WARP = 0.25  # of three times the median loss above the lowest: below it the scale is nearly linear
CEILING = 8.0  # of the same


@lru_cache(maxsize=64)
def relevances(
    configurations: tuple[Configuration, ...],
    complete: tuple[int, ...],
    final_losses: tuple[float, ...],
) -> tuple[float, ...]:
    """Return the weight of each hyper-parameter; none where it cannot be learnt.

    `complete` are the trials whose `final_losses` are known, which are finite.
    """
    columns = columns_of(configurations)
    count = max(columns.owners, default=-1) + 1
    if not count or len(complete) < max(LEAST_TRIALS, LEAST_A_PARAMETER * count):
        return ()
    chosen = np.unique(np.linspace(0, len(complete) - 1, MOST_TRIALS).astype(int))
    losses = np.array(final_losses)[chosen]
    with np.errstate(over="ignore"):
        above = losses - losses.min()
        scale = 3 * float(np.median(above))
        if not 0 < scale < inf:
            return ()
        targets = np.log(np.minimum(above / scale, CEILING) + WARP)
    values, owners = columns.values[np.array(complete)[chosen]], np.array(columns.owners)
    parts = [values[:, owners == owner] for owner in range(count)]
    evidence = RelevanceEvidence(
        squared=np.stack([distances(part, part) for part in parts]),
        linear=np.stack([part @ part.T for part in parts]),
        targets=targets - targets.mean(),
    )
    return tuple(_ascend(evidence, count).tolist())


@dataclass(frozen=True, slots=True, eq=False)
class RelevanceEvidence:
    """The evidence of C completed trials for weights of P hyper-parameters.

    `squared[P, C, C]` and `linear[P, C, C]`: the squared distances and the products of each one's
    columns; `targets[C]`: the final losses, centred.
    """

    squared: Floats
    linear: Floats
    targets: Floats

    def of(self, weights: Floats) -> float:
        """Return the log evidence up to a constant, with the better of VARIANCES."""
        squared = np.tensordot(weights, self.squared, 1)
        return self._of_sums(squared, np.tensordot(weights, self.linear, 1))

    def with_other(self, weights: Floats, parameter: int, weights_tried: Sequence[float]) -> Floats:
        """Return the log evidence for each of these weights of one hyper-parameter."""
        squared = np.tensordot(weights, self.squared, 1)
        linear = np.tensordot(weights, self.linear, 1)
        own_squared, own_linear = self.squared[parameter], self.linear[parameter]
        changes = [weight - weights[parameter] for weight in weights_tried]
        sums = ((squared + by * own_squared, linear + by * own_linear) for by in changes)
        return np.array([self._of_sums(*both) for both in sums])

    def _of_sums(self, squared: Floats, linear: Floats) -> float:
        median_squared = float(np.median(squared[np.triu_indices(len(squared), 1)]))
        usual = float(np.diag(linear).mean())
        if median_squared <= 0 or usual <= 0:
            return -inf
        kernel = (np.exp(-WIDTH * squared / median_squared) + linear / usual) / 2
        return max(self._log_evidence(kernel, *variances) for variances in VARIANCES)

    def _log_evidence(self, kernel: Floats, signal: float, nugget: float) -> float:
        covariance = signal * kernel + COMMON + nugget * np.eye(len(kernel))
        cholesky = np.linalg.cholesky(float(self.targets.var()) * covariance)
        whitened, _ = dtrtrs(cholesky, self.targets, lower=1)
        return float(-0.5 * whitened @ whitened - np.log(np.diag(cholesky)).sum())


def _ascend(evidence: RelevanceEvidence, count: int) -> Floats:
    """Return the weights that no change of a single one improves, as far as MOST_CHANGES reach."""
    weights = np.ones(count)
    best = evidence.of(weights)
    for change in range(min(MOST_CHANGES, ROUNDS * count)):
        parameter = change % count
        tried = (IRRELEVANT, *(float(weights[parameter]) * factor for factor in FACTORS))
        found = evidence.with_other(weights, parameter, tried) - PRICE
        if found.max() > best:
            best = float(found.max())
            weights[parameter] = tried[int(found.argmax())]
    return weights

"""The relevance of each hyper-parameter to the final loss, learnt from complete trials.

It is automatic relevance determination (MacKay 1994, Neal 1996): each hyper-parameter has a weight
in the distance of two configurations, and the weights are those with the largest evidence of a
Gaussian process. They are found by coordinate ascent on a grid of factors, which is deterministic
and takes some ten milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np
from scipy.linalg.lapack import dtrtrs

from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.frontrunner.configurations import (
    Configuration,
    columns_of,
    distances,
    mixed_kernels,
    similarities,
)
from hermes_ops.policies.frontrunner.table import CurveTable, log_losses

LEAST_TRIALS = 32  # complete ones; what fewer say misleads more than it helps
LEAST_A_PARAMETER = 4  # complete trials for each hyper-parameter, likewise: of 16 at most
MOST_TRIALS = 64  # a limit of the time
FACTORS = (0.25, 4.0)  # of a weight that are tried, beside IRRELEVANT
IRRELEVANT = 0.02  # the weight of a hyper-parameter that changes nothing
PRICE = 0.5  # nats of evidence that a change of a weight must bring
ROUNDS = 2  # over all hyper-parameters
WIDTH = 0.7  # of the exponent, at the median squared distance
VARIANCES = ((0.5, 0.3), (1.2, 0.08))  # of signal and nugget, over that of the final losses
COMMON = 0.3  # variance of the level of all, likewise


def kernel_families(table: CurveTable) -> tuple[Floats, ...]:
    """Return families of W x M x M similarities of the hyper-parameters of M trials.

    In the first family all hyper-parameters have the same weight. Once enough trials are complete,
    a second family weighs them by their relevance to the final loss.
    """
    complete = np.flatnonzero(np.isfinite(table.losses[:, -1]))
    final_losses = table.losses[complete, -1]
    relevance = relevances(
        table.configurations, tuple(complete.tolist()), tuple(final_losses.tolist())
    )
    alike = similarities(table.configurations)
    return (alike, similarities(table.configurations, relevance)) if relevance else (alike,)


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
    chosen = np.unique(np.linspace(0, len(complete) - 1, MOST_TRIALS).astype(int))
    if not count or len(chosen) < max(LEAST_TRIALS, LEAST_A_PARAMETER * count):
        return ()
    losses = np.array(final_losses)[chosen]
    with np.errstate(over="ignore"):
        scale = 3 * float(np.median(losses - losses.min()))
    if not 0 < scale < inf:
        return ()
    targets = log_losses(losses, float(losses.min()), scale)
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
        linear = np.tensordot(weights, self.linear, 1)
        return max(
            (
                self._log_evidence(kernel, *variances)
                for kernel in mixed_kernels(squared, linear, (WIDTH,))
                for variances in VARIANCES
            ),
            default=-inf,
        )

    def _log_evidence(self, kernel: Floats, signal: float, nugget: float) -> float:
        covariance = signal * kernel + COMMON + nugget * np.eye(len(kernel))
        cholesky = np.linalg.cholesky(float(self.targets.var()) * covariance)
        whitened, _ = dtrtrs(cholesky, self.targets, lower=1)
        return float(-0.5 * whitened @ whitened - np.log(np.diag(cholesky)).sum())


def _ascend(evidence: RelevanceEvidence, count: int) -> Floats:
    """Return the weights that no change of a single one improves, as far as ROUNDS reach."""
    weights = np.ones(count)
    best = evidence.of(weights)
    for parameter in [*range(count)] * ROUNDS:
        kept = float(weights[parameter])
        for tried in (IRRELEVANT, *(kept * factor for factor in FACTORS)):
            other = weights.copy()
            other[parameter] = tried
            score = evidence.of(other) - PRICE
            if score > best:
                weights, best = other, score
    return weights

"""The forecast of a sweep: each trial's chance to end as the best, and the time left to it.

The estimates of the final losses are pooled over trials with similar hyper-parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dtrtrs
from scipy.special import ndtr

from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.frontrunner.configuration_prior import prior_scores
from hermes_ops.policies.frontrunner.correction import Positions, corrected
from hermes_ops.policies.frontrunner.regression import (
    FinalLosses,
    RegressionPrior,
    StageRegressions,
    fit,
)
from hermes_ops.policies.frontrunner.relevance import COMMON, kernel_families
from hermes_ops.policies.frontrunner.table import CurveTable, log_losses

KEPT = 64  # tables whose forecast is kept, for as many sweeps of a pool
PACE_SCALES = (0.3, 1.0, 3.0)
PACE_REACH = 2.0  # log units from the usual pace of a stage: beyond it a clock has stood still
LARGEST = float(np.finfo(np.float64).max)  # a larger range of losses is clipped to it
SLOW_GAIN = 3.0  # of a trial one deviation slower a step, over the mean of two recorded families
SLOW_REACH = 2.0  # deviations: a slower trial still is not expected to fall further still
SPREAD_PRIOR = (0.107, 3.0)  # of the first losses: variance, and its weight in trials
SCENARIOS = ((1.0, 0.4), (0.0, 0.6))  # share of SLOW_GAIN, probability: slow trials fall further?


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """The expectations for N trials at K depths.

    `chance[N]`: to end as the best of those that are not over, given that one of them is;
    `left_s[N, K]`: training seconds until each depth, 0 where it has been; `correlation[N, K]`:
    that of the loss at each depth with the final one.
    """

    chance: Floats
    left_s: Floats
    correlation: Floats


@lru_cache(maxsize=KEPT)
def forecast_sweep(table: CurveTable) -> Forecast:
    """Forecast a sweep from its table: deterministic, so that equal tables are answered from cache.

    Curves are extended in two scenarios: in one slow trials fall further late in training, in the
    other they do not. Early depths cannot tell which is true, so the chances of both are averaged.
    Last, the chances are corrected by what recorded sweeps have taught (`correction`).
    """
    count, stages = table.trial_count, len(table.depths)
    if not is_timed(table):
        steps = np.broadcast_to(np.array(table.depths, float), (count, stages))
        return Forecast(_first_chances(table), steps, np.full((count, stages), 0.5))
    estimates = estimate_sweep(table)
    correlation = np.zeros((count, stages))
    for probability, final_losses, pooled in estimates.scenarios:
        correlation += probability * _correlation(table, final_losses, pooled)
    chance = corrected(table, estimates.at_the_end(table.over))
    return Forecast(chance, np.cumsum(estimates.stage_s, axis=1), correlation)


def _first_chances(table: CurveTable) -> Floats:
    """Return the chances before any report: equal, except for the prior over configurations."""
    scores = PRIOR_SLOPE * prior_scores(table.configurations)[: table.trial_count]
    return chances(scores, np.full(len(scores), PRIOR_RESIDUAL), ~table.over, np.inf)


def is_timed(table: CurveTable) -> bool:
    """Return whether a trial has been timed, so that `left_s` is in seconds, not in steps."""
    return bool(table.seen[:, 0].any())


@dataclass(frozen=True, slots=True, eq=False)
class SweepEstimates:
    """The estimates of a sweep for N trials, from which their chances are computed.

    `stage_s[N, K]`: training seconds of each stage, 0 where it has been; `scaled[N, K]`: the
    losses on the scale of the forecasts (NaN where a trial has not been), `lowest[N]`: the lowest
    of each (NaN before any); `slowness[N]`: log seconds a step, in deviations; `scenarios`: the
    probability of each, its final losses by the curves alone, and by all observations.
    """

    stage_s: Floats
    scaled: Floats
    lowest: Floats
    slowness: Floats
    scenarios: tuple[tuple[float, FinalLosses, LossForecast], ...]

    def at_the_end(self, over: NDArray[np.bool_]) -> Positions:
        """Return the chances to end as the best, of the trials that are not over."""
        record = float(np.fmin.reduce(self.lowest[over], initial=np.inf))
        return self.positions([pooled for *_, pooled in self.scenarios], ~over, record)

    def positions(
        self, forecasts: Sequence[LossForecast], is_running: NDArray[np.bool_], record: float
    ) -> Positions:
        """Return the chances of the trials that run, and their losses, over all scenarios.

        `forecasts`: of the losses that count, in each scenario; `record`: the loss to beat.
        """
        probabilities = np.array([probability for probability, *_ in self.scenarios])
        chance = [chances(each.mean, each.sd, is_running, record) for each in forecasts]
        mean, sd = np.array([each.mean for each in forecasts]), [each.sd for each in forecasts]
        without_curve = np.array([each.variance_without_curve for each in forecasts])
        expected = probabilities @ mean
        variance = probabilities @ (np.square(sd) + (mean - expected) ** 2)
        return Positions(
            chance=probabilities @ np.array(chance),
            mean=expected,
            sd=np.sqrt(variance),
            sd_without_curve=np.sqrt(probabilities @ without_curve),
            slowness=self.slowness,
            scaled=self.scaled,
        )


@lru_cache(maxsize=KEPT)
def estimate_sweep(table: CurveTable) -> SweepEstimates:
    """Return the estimates of a sweep of which a trial has been timed."""
    count = table.trial_count
    pace = _pace(table)
    lengths = np.diff(np.array(table.depths, float), prepend=0.0)
    stage_s = np.where(table.seen[:count], 0.0, np.exp(pace[:count]) * lengths)
    scaled, slowness = _scaled(table), _slowness(pace)
    gains, probabilities = zip(*SCENARIOS, strict=True)
    scenarios = [
        StageRegressions(table, scaled, slowness, SLOW_GAIN * gain).final_losses() for gain in gains
    ]
    scores = prior_scores(table.configurations)
    trial_set = TrialSet(kernel_families(table), slowness, scores, count)
    forecasts = pool_estimates(scenarios, gains, trial_set)
    lowest = np.fmin.reduce(scaled[:count], axis=1)
    return SweepEstimates(
        stage_s,
        scaled[:count],
        lowest,
        slowness[:count],
        tuple(zip(probabilities, scenarios, forecasts, strict=True)),
    )


def _correlation(table: CurveTable, final_losses: FinalLosses, pooled: LossForecast) -> Floats:
    """Return N x K: the correlation of the loss at a depth with the final one; 0 if known today."""
    curve_variance = final_losses.variance[: table.trial_count, None]
    by_depth, others_variance = (
        final_losses.variance_by_depth,
        pooled.variance_without_curve[:, None],
    )
    has_begun = ~np.isnan(curve_variance)
    reached = np.where(has_begun, np.fmin(by_depth, curve_variance), by_depth)
    later = _combined_variance(reached, others_variance)
    combined = _combined_variance(curve_variance, others_variance)
    current = np.where(has_begun, combined, others_variance)
    correlation = np.sqrt(np.clip(1 - later / current, 0.0, 1.0))
    return np.where(table.seen[: table.trial_count], 0.0, np.minimum(correlation, 0.99))


def _combined_variance(curve_variance: Floats, others_variance: Floats) -> Floats:
    """Return the variance that two independent estimators leave together."""
    combined: Floats = 1 / (1 / np.maximum(curve_variance, 1e-9) + 1 / others_variance)
    return combined


def _slowness(pace: Floats) -> Floats:
    """Return log seconds per step, early in training, in standard deviations of the sweep."""
    early = pace[:, min(2, pace.shape[1] - 1)]
    deviation = (early - early.mean()) / max(float(early.std()), 0.05)
    slowness: Floats = np.clip(deviation, -SLOW_REACH, SLOW_REACH)
    return slowness


def _pace(table: CurveTable) -> Floats:
    """Return M x K: log of the seconds per step in each stage, measured or expected."""
    measured = _measured(table)
    pace = np.empty_like(measured)
    seen = table.seen[:, 0]
    rows = np.concatenate([np.ones((len(measured), 1)), table.features], axis=1)
    mean_pace = measured[seen, 0].mean()
    prior = RegressionPrior(np.zeros(1), np.array([0.7]), PACE_SCALES, 0.4, 1.5)
    expected = rows @ fit(rows[seen], measured[seen, 0] - mean_pace, prior).mean + mean_pace
    pace[:, 0] = np.where(seen, measured[:, 0], expected)
    for stage in range(1, measured.shape[1]):
        seen = table.seen[:, stage]
        before = pace[:, stage - 1]
        pace[:, stage] = np.where(seen, measured[:, stage], before)
        if seen.any():
            change, mean_pace = measured[seen, stage] - before[seen], before[seen].mean()
            deviation = before[seen] - mean_pace
            common_change = change.sum() / (len(change) + 0.1)
            slope = deviation @ (change - common_change) / (deviation @ deviation + 0.5)
            pace[~seen, stage] += common_change + slope * (before[~seen] - mean_pace)
    return pace


def _measured(table: CurveTable) -> Floats:
    """Return M x K: log of the seconds per step measured in each stage, NaN where none was."""
    lengths = np.diff(np.array(table.depths, float), prepend=0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        stage_s = np.maximum(np.diff(table.seconds, axis=1, prepend=0.0), 0.0)
        measured: Floats = np.log(stage_s / lengths)
    for stage in measured.T:
        finite = stage[np.isfinite(stage)]
        median_pace = float(np.median(finite)) if len(finite) else 0.0
        np.clip(stage, median_pace - PACE_REACH, median_pace + PACE_REACH, out=stage)
    return measured


def _scaled(table: CurveTable) -> Floats:
    """Return the losses on a scale that is invariant to affine changes, with a spread about 1.

    It is logarithmic: finest near the best.
    """
    losses, seen = table.losses, table.seen
    finite = losses[np.isfinite(losses)]
    if not len(finite):
        return np.where(seen, 0.0, np.nan)
    first_losses = losses[seen[:, 0], 0]
    first_losses = first_losses[np.isfinite(first_losses)]
    lowest = float(finite.min())
    with np.errstate(over="ignore"):
        median_first = float(np.median(first_losses if len(first_losses) else finite))
    loss_range = min(max(median_first - lowest, 1e-9 * (1.0 + abs(lowest))), LARGEST)
    scaled = log_losses(losses, lowest, loss_range)
    first_scaled = scaled[seen[:, 0], 0]
    variance, trials = SPREAD_PRIOR
    total = first_scaled.var() * len(first_scaled) + variance * trials
    spread = np.sqrt(total / (len(first_scaled) + trials))
    return scaled / max(float(spread), 1e-3)


MODEL_ERRORS = ((0.0, 0.6), (0.5, 0.2), (1.0, 0.2), (3.0, 0.133))  # of the model: size, weight
BINS = 48
UNSEEN = 3e-4  # the least chance of a trial, whatever the model says
SURER = 0.85  # recorded final losses, over the forecasts' standard deviations


def chances(mean: Floats, sd: Floats, is_running: NDArray[np.bool_], record: float) -> Floats:
    """Return each trial's chance to end as the best of those that run, given that one of them is.

    `record` is the lowest loss of ended trials. The model is least accurate for the best trials, so
    part of the probability is given to an error that all trials share, of MODEL_ERRORS times their
    usual standard deviation. The harder the record is to beat, the more that part matters.
    """
    chance = np.zeros(len(mean))
    if not is_running.any():
        return chance
    expected, error_sd = mean[is_running], np.maximum(SURER * sd[is_running], 1e-4)
    usual_sd = np.sqrt((error_sd**2).mean())
    wins = sum(
        weight * _wins(expected, np.hypot(error_sd, error * usual_sd), record)
        for error, weight in MODEL_ERRORS
    )
    total = float(np.sum(wins))
    win_share = wins / total if total > 1e-300 else np.full(len(expected), 1 / len(expected))
    chance[is_running] = (win_share + UNSEEN) / (1 + UNSEEN * len(expected))
    return chance


def _wins(mean: Floats, sd: Floats, record: float) -> Floats:
    """Return each one's chance to end below the record and all others, by numerical integration."""
    lowest = float((mean - 4 * sd).min())
    highest = min(float((mean + 3 * sd).min()), record)
    highest = highest if highest > lowest else lowest + 1e-3
    edges = np.linspace(lowest, highest, BINS + 1)
    cdf = ndtr((edges - mean[:, None]) / sd[:, None])
    survival = np.maximum(1 - (cdf[:, 1:] + cdf[:, :-1]) / 2, 1e-6)
    all_survive = np.exp(np.log(survival).sum(axis=0))
    wins: Floats = (np.diff(cdf, axis=1) / survival) @ all_survive
    return wins


SIGNAL = 0.938  # variance explained by hyper-parameters, over that of the estimates
NUGGET = 0.3  # variance that no other trial explains, over that of the estimates
LEAST_BETWEEN = 0.02  # added to the variance of the final losses between trials
SPREAD_WEIGHT = 2.0  # trials that the spread of the regressions is worth in that variance
SLOW = 0.16  # mean and sd of the drop for one deviation of slowness, over sd of the estimates
PRIOR_SLOPE = 1.0  # of the final losses, over the sd of the estimates, on the prior's scores
PRIOR_SLOPE_SD = 0.3  # of that slope, between tasks
PRIOR_RESIDUAL = 0.7  # sd of the final losses that these scores leave


@dataclass(frozen=True, slots=True, eq=False)
class LossForecast:
    """The final loss of each of N trials of the sweep.

    `mean` and `sd`: from all observations; `variance_without_curve`: the variance that is left when
    the other trials alone are used, not the trial's own curve.
    """

    mean: Floats
    sd: Floats
    variance_without_curve: Floats


@dataclass(frozen=True, slots=True, eq=False)
class TrialSet:
    """The features of M trials; the first `trial_count` are the sweep's.

    `kernels`: families of them, each W x M x M, of their hyper-parameters; `slowness[M]`;
    `scores[M]`: by the learned prior over configurations.
    """

    kernels: tuple[Floats, ...]
    slowness: Floats
    scores: Floats
    trial_count: int


@dataclass(frozen=True, slots=True, eq=False)
class Observations:
    """The evidence of the curves in W scenarios.

    `has_begun`: which of M trials have a curve. For R of these: `offsets[W, R]` from the line of
    slowness, and their `noise[R]`. For N trials: that line `baseline[W, N]`, `final_losses[W, N]`
    by their own curves, and the `variance[N]` of these (infinite: no weight). `signal_variance`: of
    the final losses, the unit of the variances of the process.
    """

    has_begun: NDArray[np.bool_]
    offsets: Floats
    noise: Floats
    baseline: Floats
    final_losses: Floats
    variance: Floats
    signal_variance: float


def pool_estimates(
    scenarios: Sequence[FinalLosses], gains: Sequence[float], trial_set: TrialSet
) -> list[LossForecast]:
    """Forecast the final losses in each scenario, by a Gaussian process.

    Its inputs are the hyper-parameters and the slowness; trials that have begun are its data. The
    kernels of a family are averaged by their evidence. The families count alike, whatever their
    evidence: weights of hyper-parameters that were chosen by it are too sure. `gains`, 0 to 1: how
    much lower slow trials end in each scenario. The scenarios share one covariance, from their mean
    variances.
    """
    observations = _observe(scenarios, gains, trial_set)
    slowness = trial_set.slowness
    none = np.zeros((1, *2 * slowness.shape))
    families = [family if len(family) else none for family in trial_set.kernels]
    scores = PRIOR_SLOPE_SD * trial_set.scores
    common_covariance = SLOW**2 * np.outer(slowness, slowness) + np.outer(scores, scores) + COMMON
    unit = observations.signal_variance
    posteriors = [
        _posterior(observations, unit * (SIGNAL * kernel + common_covariance), unit * NUGGET)
        for kernel in chain(*families)
    ]
    columns = zip(*posteriors, strict=True)
    evidence, mean, variance, without_curve = (np.array(column) for column in columns)
    of_families = np.split(evidence, len(families))
    probabilities = np.concatenate([_probabilities(of) for of in of_families]) / len(families)
    forecasts = []
    for scenario in range(len(scenarios)):
        weights = probabilities[:, scenario]
        pooled_mean = weights @ mean[:, scenario]
        pooled_variance = weights @ (variance + mean[:, scenario] ** 2) - pooled_mean**2
        sd = np.sqrt(np.maximum(pooled_variance, 1e-8))
        forecasts.append(LossForecast(pooled_mean, sd, weights @ without_curve))
    return forecasts


def _probabilities(evidence: Floats) -> Floats:
    """Return the probabilities by log evidence, along the first axis."""
    likelihood = np.exp(evidence - evidence.max(axis=0))
    probabilities: Floats = likelihood / likelihood.sum(axis=0)
    return probabilities


def _observe(
    scenarios: Sequence[FinalLosses], gains: Sequence[float], trial_set: TrialSet
) -> Observations:
    has_begun = ~np.isnan(scenarios[0].variance)
    variance = np.mean([scenario.variance for scenario in scenarios], axis=0)
    means = np.stack([scenario.mean for scenario in scenarios])
    levels = np.array([_level_and_variance(scenario, has_begun) for scenario in scenarios])
    signal_variance = float(levels[:, 1].mean())
    unit = np.sqrt(signal_variance)
    by_prior = PRIOR_SLOPE * unit * trial_set.scores
    level = levels[:, :1] - by_prior[has_begun].mean()
    baseline = level + by_prior - SLOW * unit * np.outer(gains, trial_set.slowness)
    of_sweep = slice(trial_set.trial_count)
    return Observations(
        has_begun=has_begun,
        offsets=(means - baseline)[:, has_begun],
        noise=variance[has_begun] + 1e-6,
        baseline=baseline[:, of_sweep],
        final_losses=np.where(has_begun[of_sweep], means[:, of_sweep], 0.0),
        variance=np.where(has_begun[of_sweep], variance[of_sweep], np.inf),
        signal_variance=signal_variance,
    )


def _level_and_variance(scenario: FinalLosses, has_begun: NDArray[np.bool_]) -> tuple[float, float]:
    """Return the mean level of the final losses and their variance, from the curves alone."""
    mean, noise = scenario.mean[has_begun], scenario.variance[has_begun]
    between_variance = float(mean.var()) + LEAST_BETWEEN
    weight = 1 / (noise + between_variance)
    level = float(weight @ mean / weight.sum())
    weight = 1 / (noise + COMMON * between_variance)
    observed_variance = float(weight @ (mean - level) ** 2 / weight.sum())
    prior = SPREAD_WEIGHT * scenario.spread**2
    return level, (observed_variance * len(mean) + prior) / (len(mean) + SPREAD_WEIGHT)


def _posterior(
    observations: Observations, signal: Floats, nugget: float
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the evidence, the mean and the variances of the final losses for one kernel.

    That is: log evidence of each scenario up to a constant, mean[W, N], variance[N], and the
    variance without the trial's own curve.
    """
    has_begun, count = observations.has_begun, observations.baseline.shape[1]
    covariance = signal[np.ix_(has_begun, has_begun)] + np.diag(observations.noise + nugget)
    cholesky = np.linalg.cholesky(covariance)
    right_sides = np.concatenate([observations.offsets.T, signal[has_begun, :count]], axis=1)
    solved, _ = dtrtrs(cholesky, right_sides, lower=1)
    whitened_offsets, whitened_covariance = np.split(solved, [len(observations.offsets)], axis=1)
    evidence = -0.5 * (whitened_offsets**2).sum(axis=0) - np.log(np.diag(cholesky)).sum()
    mean = observations.baseline + whitened_offsets.T @ whitened_covariance
    explained = (whitened_covariance**2).sum(axis=0)
    residual_variance = np.maximum(np.diag(signal)[:count] - explained, 1e-8)
    weight = nugget / (nugget + observations.variance)
    mean = mean + weight * (observations.final_losses - mean)
    variance = (1 - weight) ** 2 * residual_variance + nugget * (1 - weight)
    return evidence, mean, variance, residual_variance + nugget

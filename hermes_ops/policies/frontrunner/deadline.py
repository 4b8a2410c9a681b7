"""A sweep with a deadline: the value of a trial is what it reaches by then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.model import Job, Snapshot
from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.frontrunner.correction import corrected
from hermes_ops.policies.frontrunner.forecast import (
    Forecast,
    LossForecast,
    estimate_sweep,
    is_timed,
)
from hermes_ops.policies.frontrunner.regression import FinalLosses
from hermes_ops.policies.frontrunner.table import CurveTable

STEPS_OF_STAGE = 4
"""A horizon is rounded down to such a part of a stage: forecasts are answered from cache."""


def time_left_s(jobs: Iterable[Job], now_s: float) -> float:
    """Return the seconds until the sweep's deadline; inf without one, and after it."""
    deadline_s = min((j.deadline_s for j in jobs if j.deadline_s is not None), default=inf)
    return deadline_s - now_s if deadline_s > now_s else inf


def next_deadline_s(snapshot: Snapshot) -> float | None:
    """Return the next deadline of any job: where none ends its sweep, its trials start then."""
    deadlines = (job.deadline_s for job in snapshot.jobs)
    return min((d for d in deadlines if d is not None and d > snapshot.time_s), default=None)


@dataclass(frozen=True, slots=True, eq=False)
class DeadlineForecast:
    """The forecast of a sweep by its deadline.

    `reports[N]`: whether a trial that gets a GPU now reports a value by then.
    """

    forecast: Forecast
    reports: NDArray[np.bool_]


def forecast_by_deadline(
    table: CurveTable, forecast: Forecast, left_s: float, costs_s: Floats
) -> DeadlineForecast:
    """Return the forecast of what N trials reach in `left_s`, each after its switch of `costs_s`.

    A trial that ends by then is judged by its end, any other by its expected loss at the deadline.
    The best trial is the one with the lowest loss of all, ended trials included. A trial that
    reports nothing by then has no chance. Where all trials can end in time, or none has been timed,
    the forecast is returned as it is.
    """
    count = table.trial_count
    every = np.ones(count, dtype=np.bool_)
    if left_s == inf or not is_timed(table):
        return DeadlineForecast(forecast, every)
    own_s = np.maximum(left_s - costs_s, 0.0)
    ends_in_time = table.over | (forecast.left_s[:, -1] <= own_s)
    if ends_in_time.all():
        return DeadlineForecast(forecast, every)
    reports = ends_in_time | (report_s(table) <= own_s)
    horizons = np.where(ends_in_time, len(table.depths) - 1.0, _horizons(table, forecast, own_s))
    chance = _chance_by(table, tuple(horizons.tolist()), tuple(reports.tolist()))
    until_s = np.where(ends_in_time[:, None], forecast.left_s, own_s[:, None])
    stages = np.arange(len(table.depths))
    correlation = np.where(stages < horizons[:, None], forecast.correlation, 0.0)
    reached_s = np.minimum(forecast.left_s, until_s)
    return DeadlineForecast(replace(forecast, chance=chance, left_s=reached_s,
                                    correlation=correlation), reports)  # fmt: skip


def report_s(table: CurveTable) -> Floats:
    """Return the seconds of training until each trial's next report: its pace is its stage's."""
    stage_s = estimate_sweep(table).stage_s
    rows, stage = np.arange(len(stage_s)), np.minimum(table.reached, len(table.depths) - 1)
    lengths = np.diff(np.array(table.depths, float), prepend=0.0)
    seconds: Floats = stage_s[rows, stage] / lengths[stage] * table.depths[0]
    return seconds


def _horizons(table: CurveTable, forecast: Forecast, own_s: Floats) -> Floats:
    """Return the stage up to which each trial trains in its time, in parts by log steps."""
    rows = np.arange(table.trial_count)
    stage = np.minimum((forecast.left_s <= own_s[:, None]).sum(axis=1), len(table.depths) - 1)
    depths = np.array(table.depths, float)
    begin, end = np.where(stage > 0, depths[stage - 1], 0.0), depths[stage]
    before_s = np.where(stage > 0, forecast.left_s[rows, stage - 1], 0.0)
    stage_s = np.maximum(forecast.left_s[rows, stage] - before_s, 1e-9)
    steps = begin + np.clip((own_s - before_s) / stage_s, 0.0, 1.0) * (end - begin)
    first = np.maximum(begin, 1.0)
    part = np.log(np.maximum(steps, first) / first) / np.log(np.maximum(end / first, 1 + 1e-9))
    horizons = stage - 1 + np.floor(np.clip(part, 0.0, 1.0) * STEPS_OF_STAGE) / STEPS_OF_STAGE
    at_least: Floats = np.maximum(horizons, np.maximum(table.reached - 1, 0))
    return at_least


@lru_cache(maxsize=64)
def _chance_by(table: CurveTable, horizons: tuple[float, ...], reports: tuple[bool, ...]) -> Floats:
    estimates = estimate_sweep(table)
    horizon = np.array(horizons)
    is_running = ~table.over & np.array(reports)
    record = float(np.fmin.reduce(estimates.lowest, initial=np.inf))
    by_then = [
        replace(losses, mean=np.fmin(losses.mean, estimates.lowest))
        for _, final_losses, pooled in estimates.scenarios
        for losses in (_losses_at(table, final_losses, pooled, horizon),)
    ]
    return corrected(table, estimates.positions(by_then, is_running, record))


def _losses_at(
    table: CurveTable, final_losses: FinalLosses, pooled: LossForecast, horizon: Floats
) -> LossForecast:
    """Return the losses at the horizons, from those at the end.

    A trial that has begun has the loss of its curve at the horizon; the correction by other trials
    and the standard deviation are scaled by the part of the uncertainty that falls before the
    horizon. A trial that has not begun is above its final loss by the mean difference of the
    others.
    """
    count = table.trial_count
    path = final_losses.path[:count]
    there = _between(path, horizon)
    has_begun = table.reached > 0
    above = _between(np.broadcast_to(_mean_path(final_losses.path), path.shape), horizon)
    last_depth = np.maximum(table.reached - 1, 0)
    uncertain = final_losses.variance_to[:, last_depth].T
    whole = np.maximum(uncertain[:, -1], 1e-12)
    left = np.where(has_begun, np.sqrt(np.clip(_between(uncertain, horizon) / whole, 0, 1)), 1.0)
    corrected = there + left * (pooled.mean - path[:, -1])
    mean = np.where(has_begun, corrected, pooled.mean + above)
    return LossForecast(mean, left * pooled.sd, pooled.variance_without_curve)


def _mean_path(path: Floats) -> Floats:
    """Return K: how far the usual trial is above its end at each depth."""
    begun = path[~np.isnan(path[:, -1])]
    fall: Floats = (begun - begun[:, -1:]).mean(axis=0)
    return fall


def _between(columns: Floats, horizon: Floats) -> Floats:
    """Return each row's value at its horizon, a fraction of a column."""
    rows, low = np.arange(len(columns)), np.floor(horizon).astype(int)
    high = np.minimum(low + 1, columns.shape[1] - 1)
    part = horizon - low
    value: Floats = columns[rows, low] * (1 - part) + columns[rows, high] * part
    return value

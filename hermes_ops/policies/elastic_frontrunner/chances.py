"""The value of each size of a sweep's trials, by their chance to end as the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nlargest
from math import log2

import numpy as np

from hermes_ops.core.model import Job, JobId, PastTrial, Snapshot, SweepId
from hermes_ops.core.order import by_submission, submission
from hermes_ops.policies.elastic_frontrunner.trial_speeds import (
    SearchMemory,
    TrialSpeeds,
    at_one_size,
)
from hermes_ops.policies.frontrunner import (
    ROUNDING,
    contenders,
    index,
    next_goal,
    pinned_jobs,
    usual_switch_s,
)
from hermes_ops.policies.frontrunner.forecast import Floats, forecast_sweep
from hermes_ops.policies.frontrunner.table import CurveTable, is_over, tabulate
from hermes_ops.policies.toolbox.knapsack import knapsack, option_table
from hermes_ops.policies.toolbox.sized_grants import SizingProblem
from hermes_ops.policies.toolbox.sweep_queues import by_sweep
from hermes_ops.policies.toolbox.whole_nodes import node_size, size_options

UNRANKED = 1e-12
"""The value of a trial that is not compared: less than that of any other, more than nothing."""
LEAST_EXPONENT, MOST_EXPONENT = 0.1, 0.9
"""Of the speed-up as a power of the number of GPUs, when trials are weighed against each other."""

TIE = 1e-6
"""Relative: of trials with equal weights the one with the greater index comes first."""


def searches(snapshot: Snapshot) -> dict[SweepId, list[Job]]:
    """Return the trials of each sweep that searches for the best one, ended ones too.

    Those are jobs with hyper-parameters and without the name of a model; a trial that has none yet
    belongs to the others of its sweep.
    """
    if not any(job.configuration and job.model_name is None for job in snapshot.jobs):
        return {}
    found = {}
    for sweep, jobs in by_sweep(snapshot).items():
        trials = [job for job in jobs if job.model_name is None]
        if any(job.configuration for job in trials):
            found[sweep] = trials
    return found


class Indices:
    """The index of each trial of a table by the seconds that it pays before it trains."""

    def __init__(self, curves: CurveTable) -> None:
        self.curves, self.forecast = curves, forecast_sweep(curves)
        self._known: dict[float, list[float]] = {}

    def after(self, cost_s: float) -> list[float]:
        """Return the index of each row; those that differ by rounding alone are equal."""
        if cost_s not in self._known:
            costs = np.full(self.curves.trial_count, cost_s)
            values = index(self.forecast, self.curves, costs)
            self._known[cost_s] = _levelled(values).tolist()
        return self._known[cost_s]


_indices = lru_cache(maxsize=64)(Indices)


@dataclass(frozen=True, slots=True)
class TrialSearch:
    """One sweep at one decision.

    `open` are the trials that are decided about, `pinned` those of them that keep GPUs for their
    slice, `speeds` relative to one size, at which the curves of `indices` would have been measured;
    `rows` of the trials that are compared now.
    """

    problem: SizingProblem
    jobs: Sequence[Job]
    open: Sequence[Job]
    pinned: frozenset[JobId]
    speeds: TrialSpeeds
    indices: Indices
    rows: Mapping[JobId, int]
    switch_s: float
    each: int
    weights: Mapping[JobId, tuple[float, float]]

    @classmethod
    def from_trials(
        cls,
        problem: SizingProblem,
        jobs: Sequence[Job],
        memory: SearchMemory,
        prior: Sequence[PastTrial],
    ) -> TrialSearch:
        """Forecast the trials of a sweep."""
        goals, stretches = dict(memory.goals), dict(memory.stretches)
        ours = {job.id for job in jobs}
        open_jobs = [job for job in problem.jobs if job.id in ours]
        pinned = {job.id for job in pinned_jobs(problem.snapshot, open_jobs, goals)}
        speeds = TrialSpeeds.from_trials(jobs)
        compared = [at_one_size(j, stretches.get(j.id, ()), speeds) for j in contenders(jobs)]
        curves = tabulate(compared, prior)
        rows = {job.id: row for row, job in enumerate(compared) if not curves.over[row]}
        indices, switch_s = _indices(curves), usual_switch_s(jobs)
        held = {job.id for job in open_jobs if problem.held(job)}
        now = {
            job.id: indices.after(0.0 if job.id in held else switch_s)[rows[job.id]]
            for job in by_submission(open_jobs)
            if job.id in rows
        }
        chance = {job: float(indices.forecast.chance[rows[job]]) for job in now}
        weights = _weights(now, chance, _exponent(speeds, open_jobs))
        return cls(
            problem, jobs, open_jobs, frozenset(pinned), speeds, indices, rows,
            switch_s, node_size(problem), {job: (weights[job], now[job]) for job in now},
        )  # fmt: skip

    def value(self, job: Job, size: int) -> float:
        """Return the value of a trial on that many GPUs: its weight x its speed there.

        A trial that starts or changes its size pays the sweep's usual switch first: its weight is
        multiplied by what its index then is, over that of the trial as it is now.
        """
        row, held = self.rows.get(job.id), self.problem.held(job)
        if row is None:
            return UNRANKED if size <= max(job.min_gpus, held) else 0.0
        speed, (weight, now) = self.speeds.speed(size), self.weights[job.id]
        if size == held or now <= 0:
            return weight * speed
        return weight * speed * self.indices.after(self.switch_s * speed)[row] / now

    def best_sizes(self, gpus: int) -> dict[JobId, int]:
        """Return the size of each open trial in the solution of the greatest sum of values.

        A pinned trial gets at least its least size. All of them must fit on so many GPUs.
        """
        sizes = dict.fromkeys((job.id for job in self.open), 0)
        rivals = self._rivals(gpus)
        if not rivals:
            return sizes
        options = [self._options(job) for job in rivals]
        table, values = option_table(options, 0.0)
        for row, (job, numbers) in enumerate(zip(rivals, options, strict=True)):
            values[row, 1 : len(numbers) + 1] = [self.value(job, size) for size in numbers]
            if job.id in self.pinned:
                values[row, 0] = -np.inf
        columns = knapsack(table, values, gpus)
        chosen = {j.id: int(table[row, columns[row]]) for row, j in enumerate(rivals)}
        return sizes | chosen

    def ranked(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the trials by the value of their least size, the greatest first."""
        return sorted(jobs, key=lambda job: (-self.value(job, job.min_gpus), submission(job)))

    def _rivals(self, gpus: int) -> list[Job]:
        """Return those that may be in the best solution, in order.

        Of trials without GPUs those are for each size the best as many as there are GPUs.
        """
        holding = [job for job in self.open if self.problem.held(job)]
        idle = [job for job in self.open if not self.problem.held(job)]
        if len(idle) > gpus:
            best: set[JobId] = set()
            for size in {size for job in idle for size in self._options(job)}:
                able = [job for job in idle if job.takes(size)]
                best |= {
                    job.id for job in nlargest(gpus, able, key=lambda job: self.value(job, size))
                }
            idle = [job for job in idle if job.id in best]
        return self.ranked([*holding, *idle])

    def _options(self, job: Job) -> tuple[int, ...]:
        """Return the sizes that a trial may take now: at most twice the largest that was tried."""
        held = self.problem.held(job)
        if job.id in self.pinned and is_over(job):
            return (held,)
        limit = min(self.problem.gpus, max(2 * self.speeds.largest, job.min_gpus, held))
        return size_options(job, limit, self.each, held)

    def forecast(self, job: Job) -> tuple[float, float, float] | None:
        """Return the chance to end as the best, and at a speed of 1 the seconds left and the index.

        None for a trial that is not compared now.
        """
        row = self.rows.get(job.id)
        if row is None:
            return None
        found = self.indices.forecast
        index_now = self.indices.after(0.0)[row]
        return float(found.chance[row]), float(found.left_s[row, -1]), index_now

    def goal(self, job: Job) -> int | None:
        """Return the step at which a trial is judged next; None if it is not compared now."""
        row = self.rows.get(job.id)
        if row is None:
            return None
        left_s = self.indices.forecast.left_s[row]
        return next_goal(job, self.indices.curves, left_s, self.switch_s)


def _levelled(values: Floats) -> Floats:
    """Return the values, those that differ by rounding alone made equal."""
    order = np.argsort(-values, kind="stable")
    level = np.inf
    result = values.copy()
    for row in order:
        if values[row] < level * (1 - ROUNDING):
            level = values[row]
        result[row] = level
    return result


def _exponent(speeds: TrialSpeeds, jobs: Sequence[Job]) -> float:
    """Return p of the speed-up as GPUs^p, by the doubling of the least size of these trials."""
    least = min((job.min_gpus for job in jobs), default=1)
    doubled = speeds.speed(2 * least) / speeds.speed(least)
    return min(max(log2(max(doubled, 1.0)), LEAST_EXPONENT), MOST_EXPONENT)


def _weights(
    values: Mapping[JobId, float], chance: Mapping[JobId, float], exponent: float
) -> dict[JobId, float]:
    """Return what a second of training of each trial is worth, by its chance and all others'.

    `values`: the indices, by submission. Trials end in the order of their index, each with its
    chance to be the best. With z the chance of a trial and of all behind it, and z' without its
    own, the weight is (z^q - z'^q)^(1/q), q = 1 / (1 - exponent): with these weights the greatest
    sum of weight x GPUs^exponent is the division that ends the best one soonest in the mean, if
    chances and lengths are known and those that are ahead also are shorter. No trial weighs less
    than one behind it.

    Source: Berg, Vesilo and Harchol-Balter, "heSRPT", Performance 2020, whose shares of the GPUs
    follow from these weights; chances in place of their weights are our choice.
    """
    order = sorted(values, key=lambda job: -values[job])  # of equals as they come
    reached = np.cumsum([chance[job] for job in reversed(order)])[::-1]
    below = np.append(reached[1:], 0.0)
    power = 1 / (1 - exponent)
    weights = np.maximum(reached**power - below**power, 0.0) ** (1 / power)
    weights = np.maximum.accumulate(weights[::-1])[::-1]
    most = max(values.values(), default=0.0) or 1.0
    return {
        job: max(float(weight), UNRANKED) * (1 + TIE * values[job] / most)
        for job, weight in zip(order, weights, strict=True)
    }

"""The sweeps of one decision: their shares of the GPUs, the sizes of their trials, the reasons.

A size of a trial is worth what it adds to the trial's chance to end as the best of its sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nlargest
from math import inf, log2

import numpy as np

from hermes_ops.core.amounts import figure, short_duration
from hermes_ops.core.model import Job, JobId, PastTrial, Phase, Plan, Reason, SweepId, Term
from hermes_ops.core.order import by_submission, submission
from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.elastic_frontrunner.trial_speeds import (
    SearchMemory,
    Stretch,
    TrialSpeeds,
    at_one_size,
)
from hermes_ops.policies.frontrunner import (
    ROUNDING,
    contenders,
    index,
    next_depth,
    next_goal,
    pinned_jobs,
    usual_switch_s,
)
from hermes_ops.policies.frontrunner.deadline import forecast_by_deadline, report_s, time_left_s
from hermes_ops.policies.frontrunner.forecast import Forecast, forecast_sweep, is_timed
from hermes_ops.policies.frontrunner.table import CurveTable, is_over, tabulate
from hermes_ops.policies.toolbox.answer import Explain
from hermes_ops.policies.toolbox.knapsack import knapsack, option_table
from hermes_ops.policies.toolbox.sized_grants import SizingProblem
from hermes_ops.policies.toolbox.sweep_queues import searches
from hermes_ops.policies.toolbox.whole_nodes import size_options

_FALLS_BACK = "a trial ahead of it falling back, or more free GPUs"

UNRANKED = 1e-12
"""The value of a trial that is not compared: less than that of any other, more than nothing."""
LEAST_EXPONENT, MOST_EXPONENT = 0.1, 0.9
"""The exponent of the speed-up, as a power of the number of GPUs, in the weights of trials."""

TIE = 1e-6
"""Relative: of trials with equal weights the one with the greater index comes first."""


class Indices:
    """The index of each trial of a table by the seconds that it pays before it trains."""

    def __init__(self, curves: CurveTable, forecast: Forecast | None = None) -> None:
        self.curves = curves
        self.forecast = forecast_sweep(curves) if forecast is None else forecast
        self._levels_of: dict[float, list[float]] = {}

    def after(self, cost_s: float) -> list[float]:
        """Return the index of each row; values that differ by rounding only are made equal."""
        if cost_s not in self._levels_of:
            costs = np.full(self.curves.trial_count, cost_s)
            values = index(self.forecast, self.curves, costs)
            self._levels_of[cost_s] = _levelled(values).tolist()
        return self._levels_of[cost_s]


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
    judged: Mapping[JobId, int]  # the size that counts at the deadline; less is of no use
    weights: Mapping[JobId, tuple[float, float]]
    late: frozenset[JobId] = frozenset()  # without GPUs, and report nothing before the deadline

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
        switch_s = usual_switch_s(jobs)
        left_s = time_left_s(compared, problem.snapshot.time_s)
        judged = _judged_sizes(problem, compared, curves, speeds, left_s - switch_s)
        speed = np.array([speeds.speed(judged[job.id]) for job in compared])
        lost_s = np.array([0.0 if problem.held(job) else switch_s for job in compared])
        indices, in_time = _by_deadline(curves, left_s, (left_s - lost_s) * speed)
        held = {job.id for job in open_jobs if problem.held(job)}
        silent = {job for job, row in rows.items() if not in_time[row]}
        late = _late(open_jobs, held, rows, silent)
        now = {
            job.id: indices.after(0.0 if job.id in held else switch_s)[rows[job.id]]
            for job in by_submission(open_jobs)
            if job.id in rows
        }
        chance = {job: float(indices.forecast.chance[rows[job]]) for job in now}
        weights = _weights(now, chance, _exponent(speeds, open_jobs))
        return cls(
            problem, jobs, open_jobs, frozenset(pinned), speeds, indices, rows,
            switch_s, judged, {job: (weights[job], now[job]) for job in now}, late,
        )  # fmt: skip

    def value(self, job: Job, size: int) -> float:
        """Return the value of a trial on that many GPUs: its weight x its speed there.

        A trial that starts or changes its size pays the sweep's usual switch first: its weight is
        multiplied by the ratio of its index after that switch to its present one. A trial that has
        lost its GPUs after its last step only has to end: it comes before all others.
        """
        row, held = self.rows.get(job.id), self.problem.held(job)
        if row is None:
            value = self.problem.gpus + 1.0 if is_over(job) and not held else UNRANKED
            return value if size <= max(job.min_gpus, held) else 0.0
        speed, (weight, now) = self.speeds.speed(size), self.weights[job.id]
        if size == held or now <= 0:
            return weight * speed
        return weight * speed * self.indices.after(self.switch_s * speed)[row] / now

    def best_sizes(self, gpus: int) -> dict[JobId, int]:
        """Return the size of each open trial in the solution of the greatest sum of values.

        A pinned trial gets at least its least size; the pinned trials must fit on `gpus` GPUs.
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
        """Return the trials that may be in the best solution, in order.

        Among trials without GPUs these are, for each size, at most as many as there are GPUs: those
        of the greatest value.
        """
        holding = [job for job in self.open if self.problem.held(job)]
        idle = [j for j in self.open if not self.problem.held(j) and j.id not in self.late]
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
        """Return the sizes that a trial may take now, and on which it reports in time."""
        held = self.problem.held(job)
        if job.id in self.pinned and is_over(job):
            return (held,)
        sizes = _sizes_now(self.problem, self.speeds, job)
        least = 0 if held else self.judged.get(job.id, 0)
        return tuple(size for size in sizes if size >= least)

    def forecast(self, job: Job) -> tuple[float, float, float] | None:
        """Return the chance to end as the best, and at a speed of 1 the seconds left and the index.

        None for a trial that is not compared now.
        """
        row = self.rows.get(job.id)
        if row is None:
            return None
        forecasts = self.indices.forecast
        index_now = self.indices.after(0.0)[row]
        return float(forecasts.chance[row]), float(forecasts.left_s[row, -1]), index_now

    def goal(self, job: Job) -> int | None:
        """Return the step at which a trial is judged next; None if it is not compared now."""
        row = self.rows.get(job.id)
        if row is None:
            return None
        left_s = self.indices.forecast.left_s[row]
        return next_goal(job, self.indices.curves, left_s, self.switch_s)


def _sizes_now(problem: SizingProblem, speeds: TrialSpeeds, job: Job) -> tuple[int, ...]:
    """Return the sizes that a trial may take now: at most twice the largest that was tried."""
    held = problem.held(job)
    limit = min(problem.gpus, max(2 * speeds.largest, job.min_gpus, held))
    return size_options(job, limit, problem.gpus_a_node, held)


def _judged_sizes(
    problem: SizingProblem,
    jobs: Sequence[Job],
    curves: CurveTable,
    speeds: TrialSpeeds,
    left_s: float,
) -> dict[JobId, int]:
    """Return the size by which each trial, a row of the curves, is judged before its deadline.

    That is what it holds. A trial without GPUs is judged by its least size, or by the least on
    which it reports in `left_s` if there is one.
    """
    size_of = {job.id: problem.held(job) or job.min_gpus for job in jobs}
    if left_s == inf or not is_timed(curves):
        return size_of
    for job, needed_s in zip(jobs, report_s(curves).tolist(), strict=True):
        if not problem.held(job) and needed_s > left_s * speeds.speed(job.min_gpus):
            sizes = _sizes_now(problem, speeds, job)
            in_time = (size for size in sizes if needed_s <= left_s * speeds.speed(size))
            size_of[job.id] = min(in_time, default=job.min_gpus)
    return size_of


def _by_deadline(
    curves: CurveTable, left_s: float, own_s: Floats
) -> tuple[Indices, Sequence[bool]]:
    """Return the indices of these trials, and whether each reports in the `left_s` to the deadline.

    As `frontrunner` has them, where each still trains `own_s` at a speed of 1 by then.
    """
    if left_s == inf:
        return _indices(curves), [True] * curves.trial_count
    by_deadline = forecast_by_deadline(curves, forecast_sweep(curves), left_s, left_s - own_s)
    return Indices(curves, by_deadline.forecast), by_deadline.reports.tolist()


def _late(
    jobs: Sequence[Job],
    held: Collection[JobId],
    compared: Collection[JobId],
    silent: Collection[JobId],
) -> frozenset[JobId]:
    """Return the trials that are not to start: those without GPUs that would report nothing.

    `silent` are such trials among the compared ones. New trials that are not compared start only if
    some compared new trial can report in time.
    """
    if not silent:
        return frozenset()
    new = {job.id for job in jobs if job.phase is Phase.PENDING}
    is_hopeless = new.intersection(compared) <= set(silent)
    return frozenset(silent).union(new if is_hopeless else ()).difference(held)


def _levelled(values: Floats) -> Floats:
    """Return the values; those that differ by rounding only are made equal."""
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


@dataclass(frozen=True, slots=True)
class SizedSweeps:
    """The sweeps that search for a best trial, at one decision; `search_of`: that of each trial."""

    problem: SizingProblem
    sweeps: Mapping[SweepId, TrialSearch]
    search_of: Mapping[JobId, TrialSearch]

    @classmethod
    def from_problem(
        cls, problem: SizingProblem, memory: SearchMemory, prior: Sequence[PastTrial]
    ) -> SizedSweeps:
        """Forecast the trials of all sweeps that have open ones."""
        sweeps = {
            sweep: TrialSearch.from_trials(problem, jobs, memory, prior)
            for sweep, jobs in searches(problem.snapshot).items()
        }
        search_of = {job.id: search for search in sweeps.values() for job in search.jobs}
        return cls(problem, sweeps, search_of)

    def __contains__(self, job: object) -> bool:
        return job in self.search_of

    def waiting(self) -> list[Job]:
        """Return the trials without GPUs, sweep by sweep, those of the greatest value first."""
        return [
            job
            for search in self.sweeps.values()
            for job in search.ranked([j for j in search.open if not j.holds_gpus])
        ]

    def sizes(
        self, others: Sequence[Job], best_of_others: Callable[[int], dict[JobId, int]]
    ) -> dict[JobId, int]:
        """Return the sizes of all trials on the sweeps' shares, and of the other jobs on the rest.

        What a sweep leaves free goes to the other jobs, and what these leave to the sweeps in turn.
        """
        if not self.sweeps:
            return best_of_others(self.problem.gpus)
        shares = divide(self._claims(others), self.problem.gpus)
        left, sizes = self.problem.gpus, dict[JobId, int]()
        for sweep, search in self.sweeps.items():
            chosen = search.best_sizes(shares[sweep])
            left -= sum(chosen.values())
            sizes |= chosen
        of_others = best_of_others(left)
        left -= sum(of_others.values())
        for search in self.sweeps.values() if others or len(self.sweeps) > 1 else ():
            had = sum(sizes[job.id] for job in search.open)
            chosen = search.best_sizes(had + left)
            left += had - sum(chosen.values())
            sizes |= chosen
        return self._with_kept(sizes | of_others, left)

    def _with_kept(self, sizes: dict[JobId, int], left: int) -> dict[JobId, int]:
        """Return the sizes; a job keeps GPUs that it would lose if no other job takes them."""
        for job in self.problem.jobs if left > 0 else ():
            held = self.problem.held(job)
            if not sizes[job.id] and 0 < held <= left:
                sizes[job.id] = held
                left -= held
        return sizes

    def _claims(self, others: Sequence[Job]) -> dict[SweepId, GpuClaim]:
        fixed: dict[SweepId, int] = {}
        for grant in self.problem.fixed:
            sweep = self.problem.snapshot.index[grant.job].sweep
            fixed[sweep] = fixed.get(sweep, 0) + len(grant.gpus)
        claims = {}
        for sweep, search in self.sweeps.items():
            pinned = sum(self.problem.held(j) for j in search.open if j.id in search.pinned)
            claims[sweep] = GpuClaim(search.open, fixed.get(sweep, 0), pinned)
        plain: dict[SweepId, list[Job]] = {}
        for job in others:
            plain.setdefault(job.sweep, []).append(job)
        for sweep, jobs in plain.items():
            name = SweepId(f"{sweep}, other jobs") if sweep in claims else sweep
            claims[name] = GpuClaim(jobs, 0 if sweep in claims else fixed.get(sweep, 0))
        return claims

    def explanation(
        self, sizes: Mapping[JobId, int], waiting: Sequence[Job], others: Explain
    ) -> Explain:
        """Return the reasons of one decision; `others` has those of the other jobs."""

        def explain(job: Job, is_granted: bool) -> Reason:
            search = self.search_of.get(job.id)
            if search is None:
                return others(job, is_granted)
            runner_up = next((other.id for other in waiting if other.id != job.id), None)
            return _reason(
                search, job, sizes.get(job.id, 0) if is_granted else 0, is_granted, runner_up
            )

        return explain

    def after(self, plan: Plan, memory: SearchMemory) -> SearchMemory:
        """Return the memory with the goals and the sizes of this plan."""
        held, before = self.problem.snapshot.held, dict(memory.goals)
        stretches = {job: s for job, s in dict(memory.stretches).items() if job in self.search_of}
        goals: dict[JobId, int] = {}
        for grant in plan.grants:
            job, search = self.problem.snapshot.index[grant.job], self.search_of.get(grant.job)
            if search is None:
                continue
            goal = before.get(job.id, 0)
            if job.id not in held or (goal <= job.last_step and job.preemptible):
                goal = search.goal(job) or next_depth(job, search.jobs)
            goals[job.id] = goal
            stretches[job.id] = _extended(stretches.get(job.id, ()), job.last_step, len(grant.gpus))
        return SearchMemory(tuple(sorted(goals.items())), tuple(sorted(stretches.items())))


def _extended(stretches: tuple[Stretch, ...], step: int, gpus: int) -> tuple[Stretch, ...]:
    earlier = tuple(stretch for stretch in stretches if stretch.begin < step)
    if earlier and earlier[-1].gpus == gpus:
        return earlier
    return (*earlier, Stretch(step, gpus))


def _reason(
    search: TrialSearch, job: Job, size: int, is_granted: bool, runner_up: JobId | None
) -> Reason:
    verb = ("runs" if job.holds_gpus else "starts") if is_granted else "waits"
    place = f" on {size} GPUs" if size > 1 else ""
    change = "what it shows next" if is_granted else _FALLS_BACK
    forecast = search.forecast(job)
    if job.id in search.late:
        text = "waits: on its least GPUs it can report nothing before the deadline of its sweep"
        return Reason(text, (), runner_up, "a later deadline")
    if forecast is None:
        return Reason(f"{verb}{place}: not compared now", (), runner_up, change)
    chance, left_s, chance_per_s = forecast
    speed = search.speeds.speed(size or job.min_gpus)
    left_s /= speed
    terms = (
        Term("chance_to_be_best", chance),
        Term("seconds_left", left_s),
        Term("chance_per_second", chance_per_s * speed),
    )
    text = f"{verb}{place}: best with chance {figure(chance)}"
    return Reason(f"{text}, {short_duration(left_s)} from its end", terms, runner_up, change)


@dataclass(frozen=True, slots=True)
class GpuClaim:
    """The GPUs that the open jobs of one sweep could use.

    `fixed` GPUs are held by jobs that must not be changed: they count, but are not shared out.
    `pinned` ones it keeps in any case.
    """

    jobs: Sequence[Job]
    fixed: int = 0
    pinned: int = 0

    @property
    def weight(self) -> float:
        """The weight of the first job."""
        return self.jobs[0].weight if self.jobs else 1.0

    def units(self) -> Iterator[int]:
        """Yield by how many GPUs it grows, in turn: by the least size of each job, then one by one.

        The least sizes that make up the pinned GPUs are left out.
        """
        covered = self.pinned
        for job in self.jobs:
            if covered >= job.min_gpus:
                covered -= job.min_gpus
            else:
                yield job.min_gpus
        more = sum(job.max_gpus - job.min_gpus for job in self.jobs)
        yield from (1 for _ in range(more - covered))


def divide(claims: Mapping[SweepId, GpuClaim], gpus: int) -> dict[SweepId, int]:
    """Return the number of GPUs of each claim, its pinned ones among them: at most `gpus` in all.

    By turns: the claim with the smallest (GPUs + 1) / weight takes its next unit, of equals the
    first one; a unit that does not fit is passed over. So `frontrunner` shares GPUs as well.
    """
    share = {sweep: claim.pinned for sweep, claim in claims.items()}
    left = gpus - sum(share.values())
    units = {sweep: claim.units() for sweep, claim in claims.items()}
    while left > 0 and units:
        sweep = min(units, key=lambda s: (share[s] + claims[s].fixed + 1) / claims[s].weight)
        unit = next(units[sweep], None)
        if unit is None:
            del units[sweep]
        elif unit <= left:
            share[sweep] += unit
            left -= unit
    return share

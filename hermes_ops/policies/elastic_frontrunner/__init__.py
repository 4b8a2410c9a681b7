"""Elastic frontrunner: the sizes with the greatest sum of speed-ups, short work weighted most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hermes_ops.core.amounts import figure, short_duration
from hermes_ops.core.model import Job, JobId, Phase, Plan, Reason, Snapshot, Term
from hermes_ops.policies.elastic_frontrunner.kinds import (
    Kind,
    Knowledge,
    Progress,
    Rates,
    expected_work,
    learn_kinds,
)
from hermes_ops.policies.toolbox.job_speeds import KindKey, kind_key
from hermes_ops.policies.toolbox.knapsack import knapsack, option_table
from hermes_ops.policies.toolbox.sized_grants import SizingProblem
from hermes_ops.policies.toolbox.whole_nodes import node_size, packing_sizes

HOUR_S = 3600.0
LEAST_LEFT_S = 60.0
"""Seconds on one GPU: work that is left counts as at least so much."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The sizes that one job may take now, ascending from 0, and the value of each."""

    job: Job
    sizes: tuple[int, ...]
    values: tuple[float, ...]
    rates: tuple[float, ...]  # work a second
    nodes: tuple[int, ...]  # on which these rates are expected
    left_s: float  # on one GPU


@dataclass(frozen=True, slots=True)
class ElasticFrontrunner:
    """Maximise the sum over jobs of speed-up x (hours left on one GPU)^-weight, exactly.

    The speed-up of a size is its goodput over that of one GPU: the speed by a model fitted to the
    steps that all jobs of the kind (`model_name`, else the sweep) have measured, times the
    statistical efficiency of the best batch by the last measured noise scale. A size is at most
    twice the largest that the kind has tried. The work of a job is that of ended jobs of its kind,
    or follows from the steps that it has done and has in all; while nothing tells it, as much is
    taken to be left as it has had. A job that would change its GPUs gains T / (T + patience x
    switch) of its speed-up, with T the seconds until its end there: no short work is moved.

    Own rule. `weight`: 0 is pure throughput, 1 the shortest first.
    """

    weight: float = 0.35
    patience: float = 4.0
    default_switch_s: float = 30.0
    name: ClassVar[str] = "elastic-frontrunner"
    preempts: ClassVar[bool] = True
    sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (0 <= self.weight <= 1 and self.patience >= 0 and self.default_switch_s >= 0):
            raise ValueError("weight is from 0 to 1, patience and default_switch_s from 0")

    def initial(self) -> Knowledge:
        """Return no knowledge."""
        return Knowledge()

    def decide(self, snapshot: Snapshot, memory: Knowledge) -> tuple[Plan, Knowledge]:
        """Return the plan of the greatest value, and what is known from now on."""
        now_s, before = snapshot.time_s, dict(memory.progress)
        done = {job: progress.until(now_s) for job, progress in before.items()}
        kinds = learn_kinds(snapshot, dict(memory.kinds), done)
        problem = SizingProblem.from_snapshot(snapshot)
        rates = Rates(kinds, node_size(problem), len(set(snapshot.node_of.values())))
        choices = [self._choice(problem, job, kinds, rates, done) for job in problem.jobs]
        sizes = _best(choices, problem.gpus)
        grants = problem.grants(sizes, nodes_wanted=_nodes(choices, sizes))
        order = sorted(choices, key=lambda choice: choice.left_s)
        waiting = [choice.job for choice in order if not choice.job.holds_gpus]
        plan = problem.plan(grants, _explanation(choices, sizes), waiting)
        after = self._progress(snapshot, plan, {c.job.id: c for c in choices}, before)
        return plan, Knowledge(tuple(sorted(kinds.items())), tuple(sorted(after.items())))

    def _choice(
        self,
        problem: SizingProblem,
        job: Job,
        kinds: Mapping[KindKey, Kind],
        rates: Rates,
        done: Mapping[JobId, float],
    ) -> Choice:
        kind = kinds[kind_key(job)]
        held = problem.held(job)
        limit = min(problem.gpus, max(2 * kind.largest, job.min_gpus, held))
        sizes = _options(job, limit, node_size(problem), held)
        gpus = problem.snapshot.held.get(job.id, ())
        places = (len(gpus), len({problem.snapshot.node_of[gpu] for gpu in gpus}))
        of_sizes = rates.of(job, (1, *sizes), places)
        found, nodes = of_sizes.rate, of_sizes.nodes[1:]
        alone = float(found[0]) or float(found.max()) or 1.0
        work = expected_work(job, kind, done.get(job.id, 0.0))
        attained_s = job.attained_gpu_s(problem.snapshot.time_s)
        left_s = attained_s if work is None else (work - done.get(job.id, 0.0)) / alone
        left_s = max(left_s, LEAST_LEFT_S)
        until_end_s = left_s * alone / np.maximum(found[1:], 1e-12)
        switch_s = self.patience * self._switch_s(job)
        moves = np.array([size != held for size in sizes])
        factors = np.where(moves, until_end_s / (until_end_s + switch_s), 1.0)
        values = found[1:] / alone * (left_s / HOUR_S) ** -self.weight * factors
        return Choice(
            job,
            (0, *sizes),
            (0.0, *values.tolist()),
            (0.0, *found[1:].tolist()),
            (0, *nodes.tolist()),
            left_s,
        )

    def _switch_s(self, job: Job) -> float:
        return self.default_switch_s if job.switch_s is None else job.switch_s

    def _progress(
        self,
        snapshot: Snapshot,
        plan: Plan,
        choices: Mapping[JobId, Choice],
        before: Mapping[JobId, Progress],
    ) -> dict[JobId, Progress]:
        """Return the progress of all jobs that have begun and not ended, from now on."""
        now_s = snapshot.time_s
        ended = {job.id for job in snapshot.others if job.phase is Phase.ENDED}
        after = {
            job: Progress(progress.until(now_s), now_s)
            for job, progress in before.items()
            if job in snapshot.index and job not in ended
        }
        for grant in plan.grants:
            job, choice = snapshot.index[grant.job], choices.get(grant.job)
            known, size = before.get(job.id, Progress()), len(grant.gpus)
            rate = known.rate
            if choice is not None and size in choice.sizes:
                rate = choice.rates[choice.sizes.index(size)]
            stays = snapshot.held.get(job.id) == grant.gpus
            since_s = known.since_s if stays else now_s + self._switch_s(job)
            after[job.id] = Progress(known.until(now_s), now_s, rate, since_s)
        return after


def _best(choices: Sequence[Choice], gpus: int) -> dict[JobId, int]:
    """Return the size of each job in the solution of the greatest value."""
    if not choices:
        return {}
    sizes, values = option_table([choice.sizes[1:] for choice in choices], 0.0)
    for row, choice in enumerate(choices):
        values[row, : len(choice.values)] = choice.values
    columns = knapsack(sizes, values, gpus)
    return {c.job.id: int(sizes[row, columns[row]]) for row, c in enumerate(choices)}


def _nodes(choices: Sequence[Choice], sizes: Mapping[JobId, int]) -> dict[JobId, int]:
    """Return on how many nodes each job's size is to be."""
    return {c.job.id: c.nodes[c.sizes.index(sizes[c.job.id])] for c in choices if not c.job.nodes}


def _options(job: Job, limit: int, each: int, held: int) -> tuple[int, ...]:
    """Return the sizes that pack well, the one that is held, and the least one.

    Of a job that is bound to a node those that fit there.
    """
    most = min(limit, each) if job.nodes else limit
    always = (n for n in (held, job.min_gpus) if 0 < n <= most and job.takes(n))
    return tuple(sorted({*packing_sizes(job, most, each), *always}))


def _explanation(
    choices: Sequence[Choice], sizes: Mapping[JobId, int]
) -> Callable[[Job, bool], Reason]:
    """Return the reasons of one decision."""
    known = {choice.job.id: choice for choice in choices}

    def explain(job: Job, on: bool) -> Reason:
        choice = known.get(job.id)
        if choice is None:
            return Reason("runs: it must not be stopped" if on else "waits: it does not fit")
        left = short_duration(choice.left_s)
        size = sizes.get(job.id, 0)
        terms = [Term("seconds_left_on_one_gpu", choice.left_s)]
        if not on:
            text = f"waits: about {left} left on one GPU, others gain more"
            return Reason(text, tuple(terms), would_change="shorter work, or a free GPU")
        place = choice.sizes.index(size) if size in choice.sizes else 0
        alone = choice.rates[1] if len(choice.rates) > 1 else 0.0
        gain = choice.rates[place] / alone if alone > 0 else float(size)
        terms.append(Term("speed_up", gain))
        text = f"runs on {size} GPUs: {figure(gain)} times as fast as on {choice.sizes[1]}"
        change = "a job with less work left, or another speed-up on more GPUs"
        return Reason(f"{text}, about {left} left on one GPU", tuple(terms), would_change=change)

    return explain

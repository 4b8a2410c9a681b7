"""Elastic frontrunner: the sizes with the greatest sum of weighted speed-ups.

The trials of a sweep are weighted by their chance to end as the best (`sized_sweeps`), other jobs
by the work that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hermes_ops.core.amounts import figure, short_duration
from hermes_ops.core.model import Grant, Job, JobId, Phase, Plan, Reason, Snapshot, Term
from hermes_ops.core.oracle import Oracle
from hermes_ops.core.past_trials import PastTrial
from hermes_ops.policies.elastic_frontrunner.finish_guard import FinishGuard, with_crowd
from hermes_ops.policies.elastic_frontrunner.kinds import (
    Kind,
    Knowledge,
    Progress,
    Rates,
    expected_work,
    learn_kinds,
)
from hermes_ops.policies.elastic_frontrunner.paces import Paces, has_one_size
from hermes_ops.policies.elastic_frontrunner.size_options import size_options
from hermes_ops.policies.elastic_frontrunner.sized_sweeps import SizedSweeps
from hermes_ops.policies.toolbox.job_speeds import KindKey, kind_key
from hermes_ops.policies.toolbox.knapsack import knapsack, option_table
from hermes_ops.policies.toolbox.sized_grants import SizingProblem
from hermes_ops.policies.toolbox.whole_nodes import node_size

HOUR_S = 3600.0
LEAST_LEFT_S = 60.0
"""Seconds on one GPU: work that is left counts as at least so much."""

SETTLED = 0.5
"""The part of its whole work that counts as left too, where a job has no range of batches.

Its speed-up stays the same until its end; that of others grows with the noise of their gradients,
which is why these are given most GPUs late.
"""

TRIAL_S = 60.0
"""Seconds of training after which a size counts as tried, though it is not measured yet."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The sizes that one job may take now, ascending from 0, and the value of each."""

    job: Job
    sizes: tuple[int, ...]
    values: tuple[float, ...]
    rates: tuple[float, ...]  # work a second
    nodes: tuple[int, ...]  # on which these rates are expected
    left_s: float  # on one GPU
    alone_s: float | None = None  # of a job of one size, all of its training there
    batches: tuple[int, ...] = ()  # by size; 0: as the job chooses


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

    Jobs of one size that would end last, or later than on their fair share of the GPUs, come
    before all others (`FinishGuard`); the seconds that they have left follow from their steps, at a
    pace that changes over the training as it did with others of the kind (`Paces`).

    Jobs with hyper-parameters and no model's name are trials of a sweep: of these the sum of
    weight x speed-up is maximised, with weights from the chances to end as the best that
    `frontrunner` forecasts (`chances`), and slices pinned as there. Each sweep, and the other jobs
    of each sweep's name, share the GPUs by (GPUs + 1) / weight (`shares`); what one leaves free
    goes to the others.

    Own rule. `weight`: 0 is pure throughput, 1 the shortest first; for other jobs alone. `tail`,
    above 1 for none, and `near_s`: see `predicted_finish_order`. `prior`: trials of earlier sweeps,
    as of `frontrunner`. With `known` an oracle tells the work that is left, for a comparison in a
    simulation.
    """

    oracle: Oracle | None = None
    prior: tuple[PastTrial, ...] = ()
    known: bool = False
    weight: float = 0.35
    patience: float = 4.0
    default_switch_s: float = 30.0
    tail: float = 0.93
    near_s: float = 300.0
    name: ClassVar[str] = "elastic-frontrunner"
    preempts: ClassVar[bool] = True
    sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (0 <= self.weight <= 1 and self.patience >= 0 and self.default_switch_s >= 0):
            raise ValueError("weight is from 0 to 1, patience and default_switch_s from 0")
        if not isinstance(self.known, bool):
            raise ValueError("known is true or false")
        if not (self.tail > 0 and self.near_s >= 0):
            raise ValueError("tail is above 0, near_s from 0")

    def initial(self) -> Knowledge:
        """Return no knowledge."""
        return Knowledge()

    def decide(self, snapshot: Snapshot, memory: Knowledge) -> tuple[Plan, Knowledge]:
        """Return the plan of the greatest value, and what is known from now on."""
        now_s, index = snapshot.time_s, snapshot.index
        before = {
            job: progress.seen_in(index[job], now_s) if job in index else progress
            for job, progress in memory.progress
        }
        done = {job: progress.until(now_s) for job, progress in before.items()}
        kinds = learn_kinds(snapshot, dict(memory.kinds), done)
        problem = SizingProblem.from_snapshot(snapshot)
        rates = Rates(kinds, node_size(problem), len(set(snapshot.node_of.values())))
        paces = Paces.from_snapshot(snapshot)
        sweeps = SizedSweeps.from_problem(problem, memory.search, self.prior)
        others = [job for job in problem.jobs if job.id not in sweeps]
        choices = [
            self._choice_of_one_size(problem, job, paces, rates.gpus_a_node)
            or self._choice(problem, job, kinds, rates, before)
            for job in others
        ]
        guard = self._guard(snapshot, memory)
        sizes = sweeps.sizes(others, lambda gpus: guard.sizes(choices, gpus, _best))
        batches = _batches(problem, choices, sizes)
        grants = problem.grants(sizes, batches, nodes_wanted=_nodes(choices, sizes))
        order = sorted(choices, key=lambda choice: choice.left_s)
        waiting = [choice.job for choice in order if not choice.job.holds_gpus]
        trials = sweeps.waiting()
        by_job = {choice.job.id: choice for choice in choices}
        after = self._progress(snapshot, grants, by_job, before)
        review_s = _review_s(snapshot, grants, kinds, after)
        explain = sweeps.explanation(sizes, trials, _explanation(choices, sizes, guard))
        plan = problem.plan(grants, explain, [*trials, *waiting], review_s)
        search = sweeps.after(plan, memory.search)
        learnt, progress = tuple(sorted(kinds.items())), tuple(sorted(after.items()))
        return plan, Knowledge(learnt, progress, guard.crowds, search)

    def _guard(self, snapshot: Snapshot, memory: Knowledge) -> FinishGuard:
        jobs = (*snapshot.holding, *snapshot.queue)
        oldest_s = min((job.submitted_s for job in jobs), default=snapshot.time_s)
        crowds = with_crowd(memory.crowds, snapshot.time_s, len(jobs), oldest_s)
        return FinishGuard(self.tail, self.near_s, snapshot.time_s, len(snapshot.gpus), crowds)

    def _choice(
        self,
        problem: SizingProblem,
        job: Job,
        kinds: Mapping[KindKey, Kind],
        rates: Rates,
        before: Mapping[JobId, Progress],
    ) -> Choice:
        kind, now_s = kinds[kind_key(job)], problem.snapshot.time_s
        held, progress = problem.held(job), before.get(job.id, Progress())
        done = progress.until(now_s)
        tried = max(kind.largest, held if now_s >= progress.since_s + TRIAL_S else 0)
        limit = min(problem.gpus, max(2 * tried, job.min_gpus, held))
        sizes = size_options(job, limit, rates.gpus_a_node, held)
        gpus = problem.snapshot.held.get(job.id, ())
        places = (len(gpus), len({problem.snapshot.node_of[gpu] for gpu in gpus}))
        of_sizes = rates.of(job, (1, *sizes), places)
        found, nodes = of_sizes.rate, of_sizes.nodes[1:]
        alone = float(found[0]) or float(found.max()) or 1.0
        work = expected_work(job, kind, done)
        left_s = job.attained_gpu_s(now_s) if work is None else (work - done) / alone
        left_s = max(left_s, LEAST_LEFT_S)
        until_end_s = left_s * alone / np.maximum(found[1:], 1e-12)
        switch_s = self.patience * self._switch_s(job)
        moves = np.array([size != held for size in sizes])
        factors = np.where(moves, until_end_s / (until_end_s + switch_s), 1.0)
        weighed_s = left_s
        if job.batch_range is None and work is not None:
            weighed_s += SETTLED * work / alone
        values = found[1:] / alone * (weighed_s / HOUR_S) ** -self.weight * factors
        return Choice(
            job,
            (0, *sizes),
            (0.0, *values.tolist()),
            (0.0, *found[1:].tolist()),
            (0, *nodes.tolist()),
            left_s,
            batches=(0, *of_sizes.batch[1:].tolist()),
        )

    def _choice_of_one_size(
        self, problem: SizingProblem, job: Job, paces: Paces, gpus_a_node: int
    ) -> Choice | None:
        """Return the choice between the job's one size and none: its speed-up is its size.

        None: it has several sizes, or nothing tells how long it still trains.
        """
        if not has_one_size(job):
            return None
        left_s = paces.left_s(job)
        if self.known and self.oracle is not None:
            left_s = self.oracle.remaining_s(job, problem.snapshot.time_s)
        if left_s is None:
            return None
        size = job.min_gpus
        left_s = max(left_s, LEAST_LEFT_S / size)
        switch_s = self.patience * self._switch_s(job)
        factor = 1.0 if problem.held(job) == size else left_s / (left_s + switch_s)
        value = size * (left_s * size / HOUR_S) ** -self.weight * factor
        trained_s = job.curve[-1].seconds if job.curve else 0.0
        nodes = -(-size // gpus_a_node)
        return Choice(
            job, (0, size), (0.0, value), (0.0, float(size)), (0, nodes), left_s * size,
            trained_s + left_s,
        )  # fmt: skip

    def _switch_s(self, job: Job) -> float:
        return self.default_switch_s if job.switch_s is None else job.switch_s

    def _progress(
        self,
        snapshot: Snapshot,
        grants: Sequence[Grant],
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
        for grant in grants:
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


def _review_s(
    snapshot: Snapshot,
    grants: Sequence[Grant],
    kinds: Mapping[KindKey, Kind],
    progress: Mapping[JobId, Progress],
) -> float | None:
    """Return when the first size that is not measured yet counts as tried; None: none will."""
    times = []
    for grant in grants:
        job = snapshot.index[grant.job]
        at_s = progress[job.id].since_s + TRIAL_S
        grows = job.size_above(len(grant.gpus)) is not None
        if grows and len(grant.gpus) > kinds[kind_key(job)].largest and at_s > snapshot.time_s:
            times.append(at_s)
    return min(times, default=None)


def _batches(
    problem: SizingProblem, choices: Sequence[Choice], sizes: Mapping[JobId, int]
) -> dict[JobId, int | None]:
    """Return the batches of the jobs that do not choose theirs; at the same size it stays."""
    batches: dict[JobId, int | None] = {}
    for choice in choices:
        job, size = choice.job.id, sizes.get(choice.job.id, 0)
        batch = choice.batches[choice.sizes.index(size)] if choice.batches else 0
        if size and batch:
            stays = size == problem.held(choice.job)
            batches[job] = problem.snapshot.retained[job].batch or batch if stays else batch
    return batches


def _nodes(choices: Sequence[Choice], sizes: Mapping[JobId, int]) -> dict[JobId, int]:
    """Return on how many nodes each job's size is to be."""
    return {c.job.id: c.nodes[c.sizes.index(sizes[c.job.id])] for c in choices if not c.job.nodes}


def _explanation(
    choices: Sequence[Choice], sizes: Mapping[JobId, int], guard: FinishGuard
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
        if choice.alone_s is not None:
            terms.append(Term("slack_seconds", guard.slack_s(job, choice.left_s, choice.alone_s)))
        if not on:
            text = f"waits: about {left} left on one GPU, others gain more"
            return Reason(text, tuple(terms), would_change="shorter work, or a free GPU")
        if choice.alone_s is not None:
            text = f"runs on the {job.min_gpus} GPUs that it takes, about {left} left on one GPU"
            change = "shorter work, or a job that would end last or late"
            return Reason(text, tuple(terms), would_change=change)
        place = choice.sizes.index(size) if size in choice.sizes else 0
        alone = choice.rates[1] if len(choice.rates) > 1 else 0.0
        gain = choice.rates[place] / alone if alone > 0 else float(size)
        terms.append(Term("speed_up", gain))
        text = f"runs on {size} GPUs: {figure(gain)} times as fast as on {choice.sizes[1]}"
        change = "a job with less work left, or another speed-up on more GPUs"
        return Reason(f"{text}, about {left} left on one GPU", tuple(terms), would_change=change)

    return explain

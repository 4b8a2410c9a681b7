"""Elastic frontrunner: the sizes with the greatest sum of weighted speed-ups.

The trials of a sweep are weighted by their chance to end as the best (`sized_sweeps`), other jobs
by the work that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import ClassVar

from hermes_ops.core.amounts import figure, short_duration
from hermes_ops.core.model import Grant, Job, JobId, PastTrial, Phase, Plan, Reason, Snapshot, Term
from hermes_ops.core.oracle import Oracle
from hermes_ops.policies.elastic_frontrunner.choices import (
    TRIAL_S,
    Choice,
    Choices,
    Valuation,
    switch_seconds,
)
from hermes_ops.policies.elastic_frontrunner.finish_guard import FinishGuard, Paces, with_crowd
from hermes_ops.policies.elastic_frontrunner.kinds import Kind, Knowledge, Progress, learn_kinds
from hermes_ops.policies.elastic_frontrunner.sized_sweeps import SizedSweeps
from hermes_ops.policies.frontrunner.deadline import next_deadline_s
from hermes_ops.policies.toolbox.job_speeds import KindKey, kept_kinds, kind_key
from hermes_ops.policies.toolbox.sized_grants import SizingProblem


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
    compares: ClassVar[bool] = True
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
        kinds = learn_kinds(snapshot, kept_kinds(dict(memory.kinds), snapshot), done)
        guard = self._guard(snapshot, memory)
        narrowed: SizingProblem | None = SizingProblem.from_snapshot(snapshot)
        while narrowed is not None:  # jobs that cannot be placed get smaller sizes
            problem = narrowed
            sweeps = SizedSweeps.from_problem(problem, memory.search, self.prior)
            others = [job for job in problem.jobs if job.id not in sweeps.search_of]
            choices = self._choices(problem, others, kinds, before)
            value = partial(guard.sizes, choices.of_jobs, best=choices.best)
            sizes = sweeps.sizes(others, value)
            narrowed = problem.narrowed(sizes)
        chosen = [choice for choice in choices.of_jobs if sizes.get(choice.job.id)]
        batches = _batches(problem, choices, chosen, sizes)
        grants = problem.grants(sizes, batches, nodes_wanted=_nodes(choices, chosen, sizes))
        sizes = {**sizes, **{grant.job: len(grant.gpus) for grant in grants}}
        waiting = (choice.job for choice in choices.by_left() if not choice.job.holds_gpus)
        trials = sweeps.waiting()
        by_job = {choice.job.id: choice for choice in choices.of_jobs}
        after = self._progress(snapshot, grants, choices, by_job, before)
        review_s = _review_s(snapshot, grants, kinds, after)
        if any(search.late for search in sweeps.sweeps.values()):
            times_s = (review_s, next_deadline_s(snapshot))
            review_s = min((at_s for at_s in times_s if at_s is not None), default=None)
        explain = sweeps.explanation(sizes, trials, _explanation(choices, by_job, sizes, guard))
        plan = problem.plan(grants, explain, chain(trials, waiting), review_s)
        search = sweeps.after(plan, memory.search)
        learnt, progress = tuple(sorted(kinds.items())), tuple(sorted(after.items()))
        return plan, Knowledge(learnt, progress, guard.crowds, search)

    def _choices(
        self,
        problem: SizingProblem,
        jobs: Sequence[Job],
        kinds: Mapping[KindKey, Kind],
        before: Mapping[JobId, Progress],
    ) -> Choices:
        paces, now_s = Paces.from_snapshot(problem.snapshot), problem.snapshot.time_s
        oracle = self.oracle

        def left_s(job: Job) -> float | None:
            if self.known and oracle is not None:
                return oracle.remaining_s(job, now_s)
            return paces.left_s(job)

        parameters = self.weight, self.patience, self.default_switch_s
        return Valuation(problem, kinds, before, left_s, *parameters).choices(jobs)

    def _guard(self, snapshot: Snapshot, memory: Knowledge) -> FinishGuard:
        jobs = (*snapshot.holding, *snapshot.queue)
        oldest_s = min((job.submitted_s for job in jobs), default=snapshot.time_s)
        crowds = with_crowd(memory.crowds, snapshot.time_s, len(jobs), oldest_s)
        return FinishGuard(self.tail, self.near_s, snapshot.time_s, len(snapshot.gpus), crowds)

    def _progress(
        self,
        snapshot: Snapshot,
        grants: Sequence[Grant],
        choices: Choices,
        by_job: Mapping[JobId, Choice],
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
            job, choice = snapshot.index[grant.job], by_job.get(grant.job)
            earlier, size = before.get(job.id, Progress()), len(grant.gpus)
            rate = earlier.rate
            if choice is not None and size in choice.sizes:
                rate = choices.rate(choice, size)
            stays = snapshot.held.get(job.id) == grant.gpus
            since_s = (
                earlier.since_s if stays else now_s + switch_seconds(job, self.default_switch_s)
            )
            after[job.id] = Progress(earlier.until(now_s), now_s, rate, since_s)
        return after


def _review_s(
    snapshot: Snapshot,
    grants: Sequence[Grant],
    kinds: Mapping[KindKey, Kind],
    progress: Mapping[JobId, Progress],
) -> float | None:
    """Return when the first size that is not measured yet counts as tried; None: none will."""
    times = []
    for grant in grants:
        at_s = progress[grant.job].since_s + TRIAL_S
        if at_s <= snapshot.time_s:
            continue
        job, size = snapshot.index[grant.job], len(grant.gpus)
        if size > kinds[kind_key(job)].largest and job.size_above(size) is not None:
            times.append(at_s)
    return min(times, default=None)


def _batches(
    problem: SizingProblem, choices: Choices, chosen: Sequence[Choice], sizes: Mapping[JobId, int]
) -> dict[JobId, int | None]:
    """Return the batches of the jobs that do not choose theirs; at the same size it stays."""
    batches: dict[JobId, int | None] = {}
    for choice in chosen:
        job = choice.job.id
        size = sizes[job]
        batch = choices.batch(choice, size)
        if batch:
            stays = size == problem.held(choice.job)
            batches[job] = problem.snapshot.retained[job].batch or batch if stays else batch
    return batches


def _nodes(
    choices: Choices, chosen: Sequence[Choice], sizes: Mapping[JobId, int]
) -> dict[JobId, int]:
    """Return on how many nodes each job's size is to be."""
    return {
        choice.job.id: choices.nodes_of(choice, sizes[choice.job.id])
        for choice in chosen
        if not choice.job.nodes
    }


def _explanation(
    choices: Choices, by_job: Mapping[JobId, Choice], sizes: Mapping[JobId, int], guard: FinishGuard
) -> Callable[[Job, bool], Reason]:
    """Return the reasons of one decision."""

    def explain(job: Job, is_granted: bool) -> Reason:
        choice = by_job.get(job.id)
        if choice is None:
            return Reason(
                "runs: it must not be stopped" if is_granted else "waits: it does not fit"
            )
        left = short_duration(choice.left_s)
        size = sizes.get(job.id, 0)
        terms = [Term("seconds_left_on_one_gpu", choice.left_s)]
        if choice.alone_s is not None:
            terms.append(Term("slack_seconds", guard.slack_s(job, choice.left_s, choice.alone_s)))
        if not is_granted:
            text = f"waits: about {left} left on one GPU, others gain more"
            return Reason(text, tuple(terms), would_change="shorter work, or a free GPU")
        if choice.alone_s is not None:
            text = f"runs on the {job.min_gpus} GPUs that it takes, about {left} left on one GPU"
            change = "shorter work, or a job that would end last or late"
            return Reason(text, tuple(terms), would_change=change)
        alone = choices.rate(choice, choice.sizes[1]) if len(choice.sizes) > 1 else 0.0
        rate = choices.rate(choice, size) if size in choice.sizes else 0.0
        gain = rate / alone if alone > 0 else float(size)
        terms.append(Term("speed_up", gain))
        text = f"runs on {size} GPUs: {figure(gain)} times as fast as on {choice.sizes[1]}"
        change = "a job with less work left, or another speed-up on more GPUs"
        return Reason(f"{text}, about {left} left on one GPU", tuple(terms), would_change=change)

    return explain

"""Frontrunner: the GPU goes where the best trial of the sweep is likely to be finished soonest.

The decision is made here, in these steps:

1. `table` reads the curves into a table of losses by depth, `configurations` the hyper-parameters,
   and `relevance` learns from complete trials which of them matter.
2. `regression` extrapolates each curve to its final loss.
3. `forecast` combines this with the final losses of trials with similar hyper-parameters and with
   what recorded tasks say of these (`configuration_prior`), turns it into each trial's chance to
   end as the best, and adds the training time that is left.
4. `correction` corrects the chances by what recorded sweeps have taught.
5. Here an index values each trial by chance per second; the GPUs go to the highest values.
6. With a deadline before some trials' end, `deadline` forecasts what each reaches by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from statistics import median
from typing import ClassVar

import numpy as np
from scipy.special import ndtr, ndtri

from hermes_ops.core.amounts import figure, short_duration
from hermes_ops.core.curves import best
from hermes_ops.core.model import (
    Job,
    JobId,
    PastTrial,
    Phase,
    Plan,
    Reason,
    Snapshot,
    SweepId,
    Term,
)
from hermes_ops.core.order import submission
from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.frontrunner.configuration_prior import prior_scores
from hermes_ops.policies.frontrunner.deadline import (
    forecast_by_deadline,
    next_deadline_s,
    time_left_s,
)
from hermes_ops.policies.frontrunner.forecast import Forecast, forecast_sweep
from hermes_ops.policies.frontrunner.regression import normal_levels
from hermes_ops.policies.frontrunner.table import CurveTable, is_over, judging_depths, tabulate
from hermes_ops.policies.toolbox.sweep_queues import (
    SweepQueue,
    by_sweep,
    holding,
    in_turn,
    queued,
    serve,
)

ROUNDING = 1e-9  # relative: the difference that another order of summation may make
CONTENDERS = 128  # trials of a sweep that are compared: a decision costs the cube of it

_FALLS_BACK = "a trial ahead of it falling back, or a free GPU"


@dataclass(frozen=True, slots=True)
class Commitments:
    """The step that each running trial was given its GPUs for."""

    goals: tuple[tuple[JobId, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Prospect:
    """A trial's chance to end as the best, its training seconds left, its value and next goal.

    `reports`: False for a trial that can report nothing before the deadline of its sweep.
    """

    chance: float
    left_s: float
    value: float
    goal: int
    reports: bool = True


@dataclass(frozen=True, slots=True)
class Frontrunner:
    """Run the trials with the largest chance to end as the best per second spent on them.

    All curves of a sweep are extrapolated together (`forecast`): drops between depths that grow
    geometrically, learnt from the trials that are deeper; final losses also from hyper-parameters.
    The index of a trial is a Gittins index: the best ratio, over all plans "train to that depth,
    continue only if the loss there is low enough", of the chance that this finishes the best trial
    to its expected seconds. A trial that gets a GPU keeps it to the next depth, and at least as
    long as a stop and resume costs; after its last step to its end. One that has lost its GPU in
    between comes before all others.

    Where a sweep has a deadline (the earliest `Job.deadline_s`) before the end of some trial, its
    trials are valued by what they reach by then, and none is started that can report nothing
    before it. Ours; HyperSched's aim (Liaw et al., SoCC 2019): the best value at the deadline.

    `prior`: trials of earlier sweeps of the same space; those with complete curves are learnt
    from. Own rule, measured on recorded sweeps. A sweep of more than CONTENDERS trials compares its
    best begun ones and its best expected new ones; sweeps share the GPUs by (GPUs + 1) / weight.
    """

    prior: tuple[PastTrial, ...] = ()
    name: ClassVar[str] = "frontrunner"
    preempts: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def initial(self) -> Commitments:
        """Return no commitments."""
        return Commitments()

    def decide(self, snapshot: Snapshot, memory: Commitments) -> tuple[Plan, Commitments]:
        """Keep trials that are within their slice, then serve the sweeps' trials by value."""
        goals = dict(memory.goals)
        sweeps = by_sweep(snapshot)
        pinned = {sweep: pinned_jobs(snapshot, jobs, goals) for sweep, jobs in sweeps.items()}
        gpus_pinned = sum(len(job.gpus_held) for jobs in pinned.values() for job in jobs)
        prospects: dict[JobId, Prospect] = {}
        queues: dict[SweepId, SweepQueue] = {}
        for sweep, jobs in sweeps.items():
            waiting = _candidates(snapshot, jobs, pinned[sweep])
            if waiting and gpus_pinned < len(snapshot.gpus):
                compared = self._prospects(snapshot, jobs)
                prospects |= compared
                waiting = _in_time(snapshot, _in_order(waiting, compared), compared)
            queues[sweep] = SweepQueue(tuple(pinned[sweep]), tuple(waiting))
        ranked = [job.id for queue in queues.values() for job in queue.candidates]
        explain = _explanation(prospects, goals, ranked)
        plan = serve(snapshot, in_turn(queues), explain)
        if not all(prospect.reports for prospect in prospects.values()):
            plan = replace(plan, review_at_s=next_deadline_s(snapshot))
        return plan, _commit(snapshot, plan, goals, prospects, sweeps)

    def _prospects(self, snapshot: Snapshot, jobs: Sequence[Job]) -> dict[JobId, Prospect]:
        compared = contenders(jobs)
        curves = tabulate(compared, self.prior)
        forecast = forecast_sweep(curves)
        switch_s = usual_switch_s(jobs)
        costs = np.array([0.0 if job.id in snapshot.held else switch_s for job in compared])
        left_s = time_left_s(jobs, snapshot.time_s)
        by_deadline = forecast_by_deadline(curves, forecast, left_s, costs)
        forecast = by_deadline.forecast
        values = index(forecast, curves, costs)
        return {
            job.id: Prospect(
                float(forecast.chance[row]),
                float(forecast.left_s[row, -1]),
                float(values[row]),
                next_goal(job, curves, forecast.left_s[row], switch_s),
                bool(by_deadline.reports[row]),
            )
            for row, job in enumerate(compared)
            if not curves.over[row]
        }


def index(forecast: Forecast, curves: CurveTable, costs_s: Floats) -> Floats:
    """Return N values: the chance per second to finish the best trial, by each one's best plan.

    A plan trains to a depth and continues only with the best share q of the losses there. The
    loss at the depth and the final one are taken as bivariate normal, with their correlation.
    """
    chance, end_s = forecast.chance, forecast.left_s[:, -1]
    values: Floats = chance / (end_s + costs_s + 1e-9)
    threshold = ndtri(np.clip(chance, 1e-6, 1 - 1e-6))
    levels = normal_levels()
    share = np.arange(1, len(levels) + 1) / len(levels)
    for stage in range(len(curves.depths) - 1):
        rows = np.flatnonzero(curves.reached <= stage)
        r, until_s = forecast.correlation[rows, stage, None], forecast.left_s[rows, stage, None]
        win_probability = ndtr((threshold[rows, None] - r * levels) / np.sqrt(1 - r**2))
        wins = win_probability.cumsum(axis=1) / len(levels)
        expected_s = until_s + share * (end_s[rows, None] - until_s) + costs_s[rows, None] + 1e-9
        values[rows] = np.maximum(values[rows], (wins / expected_s).max(axis=1))
    return values


def pinned_jobs(snapshot: Snapshot, jobs: Sequence[Job], goals: Mapping[JobId, int]) -> list[Job]:
    """Return the jobs that keep their GPUs: within their slice, or trained to their last step.

    What a job does after its last step takes less time than a switch. A job without a known goal
    runs to its next report.
    """
    return [
        job
        for job in holding(snapshot, jobs)
        if is_over(job) or job.last_step < goals.get(job.id, job.steps_at_start + 1)
    ]


def _candidates(snapshot: Snapshot, jobs: Sequence[Job], pinned: Sequence[Job]) -> list[Job]:
    pinned_ids = {job.id for job in pinned}
    preemptible = [job for job in holding(snapshot, jobs) if job.id not in pinned_ids]
    return [*preemptible, *queued(jobs, Phase.WAITING), *queued(jobs, Phase.PENDING)]


def _in_order(waiting: Sequence[Job], compared: Mapping[JobId, Prospect]) -> list[Job]:
    """Return the candidates by value, the greatest first.

    Trials that have trained to their last step come before all others: they only have to end.
    Trials that are not compared now come last.
    """
    ranks = _ranks(compared)
    return sorted(
        waiting, key=lambda j: (not is_over(j), ranks.get(j.id, len(ranks)), submission(j))
    )


def _in_time(
    snapshot: Snapshot, waiting: Sequence[Job], compared: Mapping[JobId, Prospect]
) -> list[Job]:
    """Return the candidates without those that would report nothing before the deadline.

    Candidates that hold GPUs stay. New trials that are not compared stay if some compared new trial
    can report in time.
    """
    late = {job for job, prospect in compared.items() if not prospect.reports}
    if not late:
        return list(waiting)
    new = {job.id for job in waiting if job.phase is Phase.PENDING}
    if not (new & compared.keys()) - late:
        late |= new
    return [job for job in waiting if job.id not in late or job.id in snapshot.held]


def contenders(jobs: Sequence[Job]) -> list[Job]:
    """Return the trials that are compared: the best begun and the best expected new ones, in order.

    New trials are ranked by the prior over configurations; where it is equal, by submission. Trials
    that have ended without a report (they failed) are not compared.
    """
    if len(jobs) <= CONTENDERS:
        return list(jobs)
    scores = prior_scores(tuple(tuple(job.configuration) for job in jobs))
    silent = (row for row in np.argsort(scores, kind="stable") if not jobs[row].curve)
    rows = (row for row in silent if jobs[row].phase is not Phase.ENDED)
    compared = {job.id for job in _best_begun(jobs, CONTENDERS * 3 // 4)}
    compared.update(jobs[row].id for row in islice(rows, CONTENDERS - len(compared)))
    return [job for job in jobs if job.id in compared]


def _best_begun(jobs: Sequence[Job], places: int) -> list[Job]:
    """Return the best trials that have reported; two thirds of the places are for open ones.

    Ended trials would take all places otherwise: their losses are those of the last steps.
    """
    begun = sorted((job for job in jobs if job.curve), key=lambda j: (best(j.curve), submission(j)))
    running = [job for job in begun if job.phase is not Phase.ENDED]
    ended = [job for job in begun if job.phase is Phase.ENDED]
    first = running[: places * 2 // 3]
    ended = ended[: places - len(first)]
    return [*first, *ended, *running[len(first) : places - len(ended)]]


def usual_switch_s(jobs: Sequence[Job]) -> float:
    """Return the median of the measured seconds of a stop and resume; 0 before any."""
    measured = [seconds for job in jobs if (seconds := job.switch_s) is not None]
    return median(measured) if measured else 0.0


def next_goal(job: Job, curves: CurveTable, left_s: Floats, switch_s: float) -> int:
    """Return the step at which the trial is judged next: the next depth worth a switch."""
    deeper = [k for k, depth in enumerate(curves.depths) if depth > job.last_step]
    if not deeper:
        return job.last_step + 1
    worthwhile = [k for k in deeper if left_s[k] >= switch_s] or deeper[-1:]
    return curves.depths[worthwhile[0]]


def _ranks(prospects: Mapping[JobId, Prospect]) -> dict[JobId, int]:
    """Rank the trials by value, 0 the best; values that differ by rounding alone share a rank.

    Trials without a report have equal values, but the rows of a matrix are summed in another
    order.
    """
    ranks: dict[JobId, int] = {}
    rank, group_value = -1, inf
    for job, prospect in sorted(prospects.items(), key=lambda entry: -entry[1].value):
        if prospect.value < group_value * (1 - ROUNDING):
            rank, group_value = rank + 1, prospect.value
        ranks[job] = rank
    return ranks


def _commit(
    snapshot: Snapshot,
    plan: Plan,
    goals: Mapping[JobId, int],
    prospects: Mapping[JobId, Prospect],
    sweeps: Mapping[SweepId, Sequence[Job]],
) -> Commitments:
    """Return the goals of all jobs with GPUs; a goal that is reached is replaced by the next."""
    commitments: list[tuple[JobId, int]] = []
    for grant in plan.grants:
        job = snapshot.index[grant.job]
        goal = goals.get(job.id, 0)
        if job.id not in snapshot.held or (goal <= job.last_step and job.preemptible):
            prospect = prospects.get(job.id)
            goal = prospect.goal if prospect else next_depth(job, sweeps[job.sweep])
        commitments.append((job.id, goal))
    return Commitments(tuple(sorted(commitments)))


def next_depth(job: Job, jobs: Sequence[Job]) -> int:
    """Return the next step at which the trials of the job's sweep are judged."""
    return next(
        (depth for depth in judging_depths(jobs) if depth > job.last_step), job.last_step + 1
    )


def _explanation(
    prospects: Mapping[JobId, Prospect], goals: Mapping[JobId, int], ranked: Sequence[JobId]
) -> Callable[[Job, bool], Reason]:
    """Return the reasons of one decision; the runner-up is the best candidate but the job."""

    def explain(job: Job, is_granted: bool) -> Reason:
        prospect = prospects.get(job.id)
        runner_up = next((other for other in ranked if other != job.id), None)
        if prospect is None:
            goal = goals.get(job.id)
            verb = "runs" if is_granted else "waits"
            text = f"runs to step {goal}" if is_granted and goal else verb
            why = "trained to its last step" if is_over(job) else "not compared now"
            return Reason(
                f"{text}: {why}",
                (),
                runner_up,
                "the end of its slice" if is_granted else _FALLS_BACK,
            )
        terms = (
            Term("chance_to_be_best", prospect.chance),
            Term("seconds_left", prospect.left_s),
            Term("chance_per_second", prospect.value),
        )
        if not is_granted and not prospect.reports:
            text = "waits: it can report nothing before the deadline of its sweep"
            return Reason(text, terms, runner_up, "a later deadline")
        time_left = short_duration(prospect.left_s)
        verb = ("runs" if job.holds_gpus else "starts") if is_granted else "waits"
        text = f"{verb}: best with chance {figure(prospect.chance)}, {time_left} from its end"
        if is_granted:
            return Reason(
                f"{text}; judged at step {prospect.goal}", terms, runner_up, "what it shows then"
            )
        return Reason(text, terms, runner_up, _FALLS_BACK)

    return explain

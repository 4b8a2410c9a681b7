"""Frontrunner: the GPU goes where the best trial of the sweep is likely to be finished soonest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from statistics import median
from typing import ClassVar

import numpy as np
from scipy.special import ndtr, ndtri

from hermes_ops.core.amounts import figure, short_duration
from hermes_ops.core.curves import best
from hermes_ops.core.history import PastTrial
from hermes_ops.core.lines import Line, by_sweep, in_turn, queued, seated, serve
from hermes_ops.core.model import Job, JobId, Phase, Plan, Reason, Snapshot, SweepId, Term
from hermes_ops.core.order import submission
from hermes_ops.policies.frontrunner_forecast import Forecast, forecast
from hermes_ops.policies.frontrunner_regression import Floats, normal_levels
from hermes_ops.policies.frontrunner_table import Table, depths, is_over, table

ROUNDING = 1e-9  # of a value: what sums in another order may differ by
CONTENDERS = 128  # trials of a sweep that are compared: a decision costs the cube of it

_FALLS_BACK = "a trial ahead of it falling back, or a free GPU"


@dataclass(frozen=True, slots=True)
class Commitments:
    """The step that each running trial was given its GPUs for."""

    goals: tuple[tuple[JobId, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Prospect:
    """A trial's chance to end as the best, the seconds to its end and its value per second."""

    chance: float
    left_s: float
    value: float
    goal: int


@dataclass(frozen=True, slots=True)
class Frontrunner:
    """Run the trials with the largest chance to end as the best per second spent on them.

    All curves of a sweep are extended together (`frontrunner_forecast`): drops between depths that
    grow geometrically, learnt from the trials that are further; ends also from hyper-parameters.
    The index of a trial is the best ratio, over all plans "train to that depth, go on only if it
    then looks well enough", of the chance that this finishes the best trial to the seconds it
    takes on average (Gittins). Whoever gets a GPU keeps it to the next depth, and at least as long
    as a stop and resume costs; after its last step to its end.

    `prior`: trials of earlier sweeps of the same space; those with whole curves are learnt from.
    Own rule, measured on recorded sweeps. A sweep of more than CONTENDERS trials compares its
    best begun ones and its first new ones; sweeps share the GPUs by (GPUs + 1) / weight.
    """

    prior: tuple[PastTrial, ...] = ()
    name: ClassVar[str] = "frontrunner"
    preempts: ClassVar[bool] = True

    def initial(self) -> Commitments:
        """Nobody is committed to."""
        return Commitments()

    def decide(self, snapshot: Snapshot, memory: Commitments) -> tuple[Plan, Commitments]:
        """Let slices end, then serve the sweeps' trials by value."""
        goals = dict(memory.goals)
        sweeps = by_sweep(snapshot)
        firm = {sweep: _firm(snapshot, jobs, goals) for sweep, jobs in sweeps.items()}
        taken = sum(len(job.gpus_held) for jobs in firm.values() for job in jobs)
        prospects: dict[JobId, Prospect] = {}
        lines: dict[SweepId, Line] = {}
        for sweep, jobs in sweeps.items():
            waiting = _candidates(snapshot, jobs, firm[sweep])
            if waiting and taken < len(snapshot.gpus):
                found = self._prospects(snapshot, jobs)
                prospects |= found
                places = _places(found)
                waiting.sort(key=lambda j: (places.get(j.id, len(places)), submission(j)))
            lines[sweep] = Line(tuple(firm[sweep]), tuple(waiting))
        ranked = [job.id for line in lines.values() for job in line.candidates]
        explain = _explanation(prospects, goals, ranked)
        plan = serve(snapshot, in_turn(lines), explain)
        return plan, _commit(snapshot, plan, goals, prospects, sweeps)

    def _prospects(self, snapshot: Snapshot, jobs: Sequence[Job]) -> dict[JobId, Prospect]:
        compared = contenders(jobs)
        made = table(compared, self.prior)
        found = forecast(made)
        switch_s = _switch_s(jobs)
        costs = np.array([0.0 if job.id in snapshot.held else switch_s for job in compared])
        values = index(found, made, costs)
        return {
            job.id: Prospect(
                float(found.chance[row]),
                float(found.left_s[row, -1]),
                float(values[row]),
                _goal(job, made, found.left_s[row], switch_s),
            )
            for row, job in enumerate(compared)
            if not made.over[row]
        }


def index(found: Forecast, made: Table, costs_s: Floats) -> Floats:
    """N values: the chance to finish the best trial per second, by each trial's best plan.

    A plan trains to a depth and goes on only with the best share q of what may be seen there. A
    loss there tells of the end by its correlation with it, as in a bivariate normal distribution.
    """
    chance, end_s = found.chance, found.left_s[:, -1]
    values: Floats = chance / (end_s + costs_s + 1e-9)
    threshold = ndtri(np.clip(chance, 1e-6, 1 - 1e-6))
    levels = normal_levels()
    share = np.arange(1, len(levels) + 1) / len(levels)
    for stage in range(len(made.depths) - 1):
        rows = np.flatnonzero(made.reached <= stage)
        told, until_s = found.insight[rows, stage, None], found.left_s[rows, stage, None]
        kept = ndtr((threshold[rows, None] - told * levels) / np.sqrt(1 - told**2))
        wins = kept.cumsum(axis=1) / len(levels)
        spent = until_s + share * (end_s[rows, None] - until_s) + costs_s[rows, None] + 1e-9
        values[rows] = np.maximum(values[rows], (wins / spent).max(axis=1))
    return values


def _firm(snapshot: Snapshot, jobs: Sequence[Job], goals: Mapping[JobId, int]) -> list[Job]:
    """Who is within its slice, or has trained to its end: its last lines take less than a switch.

    A job whose goal is not known runs to its next report.
    """
    return [
        job
        for job in seated(snapshot, jobs)
        if is_over(job) or job.last_step < goals.get(job.id, job.steps_at_start + 1)
    ]


def _candidates(snapshot: Snapshot, jobs: Sequence[Job], firm: Sequence[Job]) -> list[Job]:
    ids = {job.id for job in firm}
    held = [job for job in seated(snapshot, jobs) if job.id not in ids]
    return [*held, *queued(jobs, Phase.WAITING), *queued(jobs, Phase.PENDING)]


def contenders(jobs: Sequence[Job]) -> list[Job]:
    """The trials that are compared: the best begun ones and the first new ones, in their order."""
    if len(jobs) <= CONTENDERS:
        return list(jobs)
    begun = sorted((job for job in jobs if job.curve), key=lambda j: (best(j.curve), submission(j)))
    new = (job for job in jobs if not job.curve)
    chosen = {job.id for job in begun[: CONTENDERS * 3 // 4]}
    chosen.update(job.id for job in islice(new, CONTENDERS - len(chosen)))
    return [job for job in jobs if job.id in chosen]


def _switch_s(jobs: Sequence[Job]) -> float:
    known = [seconds for job in jobs if (seconds := job.switch_s) is not None]
    return median(known) if known else 0.0


def _goal(job: Job, made: Table, left_s: Floats, switch_s: float) -> int:
    """The step at which the trial is judged next: the next depth that is worth a switch."""
    ahead = [k for k, depth in enumerate(made.depths) if depth > job.last_step]
    if not ahead:
        return job.last_step + 1
    worth = [k for k in ahead if left_s[k] >= switch_s] or ahead[-1:]
    return made.depths[worth[0]]


def _places(prospects: Mapping[JobId, Prospect]) -> dict[JobId, int]:
    """Each trial's place by value, 0 the best; those that only rounding tells apart share one.

    Trials of which nothing is known yet are alike, but rows of a matrix are not summed alike.
    """
    places: dict[JobId, int] = {}
    place, leader = -1, inf
    for job, prospect in sorted(prospects.items(), key=lambda found: -found[1].value):
        if prospect.value < leader * (1 - ROUNDING):
            place, leader = place + 1, prospect.value
        places[job] = place
    return places


def _commit(
    snapshot: Snapshot,
    plan: Plan,
    goals: Mapping[JobId, int],
    prospects: Mapping[JobId, Prospect],
    sweeps: Mapping[SweepId, Sequence[Job]],
) -> Commitments:
    """The goals of all who have GPUs now; a goal that is reached gives way to the next."""
    kept: list[tuple[JobId, int]] = []
    for grant in plan.grants:
        job = snapshot.index[grant.job]
        goal = goals.get(job.id, 0)
        if job.id not in snapshot.held or (goal <= job.last_step and job.preemptible):
            known = prospects.get(job.id)
            goal = known.goal if known else _next_depth(job, sweeps[job.sweep])
        kept.append((job.id, goal))
    return Commitments(tuple(sorted(kept)))


def _next_depth(job: Job, jobs: Sequence[Job]) -> int:
    return next((depth for depth in depths(jobs) if depth > job.last_step), job.last_step + 1)


def _explanation(
    prospects: Mapping[JobId, Prospect], goals: Mapping[JobId, int], ranked: Sequence[JobId]
) -> Callable[[Job, bool], Reason]:
    """The reasons of one decision; the runner-up is the best candidate other than the job."""

    def explain(job: Job, on: bool) -> Reason:
        known = prospects.get(job.id)
        rival = next((other for other in ranked if other != job.id), None)
        if known is None:
            goal = goals.get(job.id)
            text = f"runs to step {goal}" if on and goal else "runs" if on else "waits"
            return Reason(
                f"{text}: not compared now",
                (),
                rival,
                "the end of its slice" if on else _FALLS_BACK,
            )
        terms = (
            Term("chance_to_be_best", known.chance),
            Term("seconds_left", known.left_s),
            Term("chance_per_second", known.value),
        )
        left = short_duration(known.left_s)
        verb = ("runs" if job.holds_gpus else "starts") if on else "waits"
        text = f"{verb}: best with chance {figure(known.chance)}, {left} from its end"
        if on:
            return Reason(
                f"{text}; judged at step {known.goal}", terms, rival, "what it shows then"
            )
        return Reason(text, terms, rival, _FALLS_BACK)

    return explain

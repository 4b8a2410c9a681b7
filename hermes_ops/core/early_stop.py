"""Early stopping: which trials of a sweep are not worth continuing.

A sweep names its rule (`RULES`); `EarlyStop` applies the rules on top of any policy. An
end is for good (STOPPED_EARLY). Only open jobs are ended: a pending one has shown nothing yet,
one that is stopping is judged once it waits, and one that has trained to its last step ends by
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from hermes_ops.core.amounts import figure
from hermes_ops.core.curves import best_by, mean_by
from hermes_ops.core.model import Job, JobId, Plan, Reason, Snapshot, SweepId, Term
from hermes_ops.core.order import by_submission
from hermes_ops.core.plan import overlay
from hermes_ops.core.wrapper import Wrapper

M = TypeVar("M")
Ends = dict[JobId, Reason]
Rule = Callable[[Sequence[Job]], Ends]

MEDIAN_GRACE_STEPS = 3
MEDIAN_MIN_OTHERS = 4
ASHA_ETA = 3
ASHA_FIRST_RUNG_STEPS = 1


def none_rule(jobs: Sequence[Job]) -> Ends:  # noqa: ARG001 - the interface of a rule
    """End nothing early."""
    return {}


def median_rule(jobs: Sequence[Job]) -> Ends:
    """End a trial whose best loss by its step s is worse than the median of the others'.

    The others' figure is the running average of their losses up to step s, of all trials of the
    sweep that have reached it. No trial is judged before step 3, nor against fewer than 4 others.

    Source: Golovin et al., "Google Vizier", KDD 2017, section 3.2.2, where only completed trials
    are the others; with few trials at a time that would judge too late (a choice).
    """
    ends: Ends = {}
    means: dict[int, dict[JobId, float]] = {}  # by step: many trials stand at the same one
    for job in filter(_is_judged, jobs):
        step = job.last_step
        if step not in means:
            means[step] = {o.id: mean_by(o.curve, step) for o in jobs if o.last_step >= step}
        others = [mean for other, mean in means[step].items() if other != job.id]
        if step < MEDIAN_GRACE_STEPS or len(others) < MEDIAN_MIN_OTHERS:
            continue
        best, limit = best_by(job.curve, step), median(others)
        if best > limit:
            text = f"stopped early: best loss {figure(best, 4)} at step {step} is over the median"
            terms = Term.several(best_loss=best, median_loss=limit, step=step, others=len(others))
            ends[job.id] = Reason(text, terms, None, f"a best loss of {figure(limit, 4)} or less")
    return ends


def asha_rule(jobs: Sequence[Job]) -> Ends:
    """End a trial that is not in the best third at the newest rung it has reached.

    Rungs are at steps 1, 3, 9, 27, ... (reduction factor 3); the figure at a rung is the best loss
    by then, ties pass. With fewer than 3 trials at a rung none is judged. A trial past a rung is
    judged again as others arrive there, until it reaches the next. A rung at or beyond the
    last step judges no trial.

    Source: Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, in
    the variant that stops a trial where the paper would leave it paused.
    """
    ends: Ends = {}
    rungs: dict[int, list[tuple[float, JobId]]] = {}
    for job in filter(_is_judged, jobs):
        rung = _rung(job)
        if rung is None:
            continue
        if rung not in rungs:
            there = (o for o in jobs if o.last_step >= rung)
            rungs[rung] = sorted((best_by(o.curve, rung), o.id) for o in there)
        at_rung = rungs[rung]
        places = len(at_rung) // ASHA_ETA
        mine = best_by(job.curve, rung)
        if places and mine > at_rung[places - 1][0]:
            limit, rival = at_rung[places - 1]
            text = f"stopped early: loss {figure(mine, 4)} at rung {rung} is not in the best third"
            terms = Term.several(best_loss=mine, limit_loss=limit, rung=rung, trials=len(at_rung))
            ends[job.id] = Reason(text, terms, rival, f"a loss of {figure(limit, 4)} or less")
    return ends


RULES: dict[str, Rule] = {"none": none_rule, "median": median_rule, "asha": asha_rule}


def early_ends(snapshot: Snapshot, rules: Mapping[SweepId, str]) -> Ends:
    """Return the jobs to end now, by the rule of each sweep; sweeps without one have "none".

    KeyError for a rule that is not in RULES.
    """
    rule_of = {sweep: RULES[rule] for sweep, rule in sorted(rules.items())}
    judged: dict[SweepId, list[Job]] = {s: [] for s, rule in rule_of.items() if rule != none_rule}
    for job in snapshot.jobs if judged else ():
        if job.sweep in judged:
            judged[job.sweep].append(job)
    ends: Ends = {}
    for sweep, jobs in judged.items():
        ends |= rule_of[sweep](by_submission(jobs))
    return ends


@dataclass(frozen=True, slots=True)
class EarlyStop(Wrapper[M]):
    """Any policy with early stopping by the sweeps' rules; put it outside of the guards.

    The policy plans as if the ended jobs were leaving, so their GPUs have new users at once.
    """

    rules: tuple[tuple[SweepId, str], ...]

    def decide(self, snapshot: Snapshot, memory: M) -> tuple[Plan, M]:
        """Return the inner policy's plan for the jobs that continue, and the ends."""
        ends = early_ends(snapshot, dict(self.rules))
        if not ends:
            return self.policy.decide(snapshot, memory)
        plan, memory = self.policy.decide(snapshot.with_stopping(ends), memory)
        all_ends = tuple(dict.fromkeys((*plan.ends, *ends)))
        return replace(plan, ends=all_ends, reasons=overlay(plan.reasons, ends)), memory


def _is_judged(job: Job) -> bool:
    return job.may_end and (job.total_steps is None or job.last_step < job.total_steps)


def _rung(job: Job) -> int | None:
    """Return the newest rung that the job has reached; None before the first."""
    if job.last_step < ASHA_FIRST_RUNG_STEPS:
        return None
    rung = ASHA_FIRST_RUNG_STEPS
    while rung * ASHA_ETA <= job.last_step:
        rung *= ASHA_ETA
    return rung

"""Median stopping as a scheduling policy: who is worse than the median pauses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isinf
from typing import ClassVar

import numpy as np

from hermes_ops.core.amounts import figure
from hermes_ops.core.curves import best, best_by, mean_by
from hermes_ops.core.model import Job, JobId, Phase, Plan, Reason, Snapshot, Term
from hermes_ops.core.order import submission
from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.toolbox.parameter_checks import whole
from hermes_ops.policies.toolbox.sweep_queues import (
    SweepQueue,
    by_sweep,
    holding,
    in_turn,
    queued,
    serve,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A trial's best loss by its step against the median of the others' running averages."""

    step: int
    best: float
    median: float
    others: int


@dataclass(frozen=True, slots=True)
class Median:
    """Run trials in order of submission; pause those whose best loss is worse than the median.

    At a trial's newest step s its best loss is compared with the median of the running averages,
    up to s, of the other trials of its sweep that have reached s. Nobody is judged before
    `grace_steps` or against fewer than `min_others` others.

    Source: Golovin et al., "Google Vizier", KDD 2017, section 3.2.2, which ends the trial; there
    only completed trials are the others. Ours: all that have reached s count, as in the early
    stopping rule `median`; a trial pauses (`kill` ends it) and goes on when the median has moved
    past it, else once nothing else is left to run, the lowest loss first; sweeps share the GPUs by
    (GPUs + 1) / weight.
    """

    grace_steps: int = 3
    min_others: int = 4
    kill: bool = False
    name: ClassVar[str] = "median"
    preempts: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole("grace_steps", self.grace_steps, 1)
        whole("min_others", self.min_others, 1)

    def initial(self) -> None:
        """Return None: everything is read off the curves."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Judge all open trials, then serve those that are not worse than the median."""
        bad: dict[JobId, Verdict] = {}
        queues = {}
        for sweep, jobs in by_sweep(snapshot).items():
            bad |= self._bad(jobs)
            queues[sweep] = _queue(snapshot, jobs, bad)
        ends = {job: _ended(verdict) for job, verdict in bad.items()} if self.kill else {}
        plan = serve(
            snapshot, in_turn(queues), lambda job, is_granted: _why(job, is_granted, bad), ends
        )
        return plan, memory

    def _bad(self, jobs: Sequence[Job]) -> dict[JobId, Verdict]:
        """Return the waiting and running trials that are worse than the median."""
        judged = [j for j in jobs if _is_judged(j) and j.last_step >= self.grace_steps]
        verdicts: dict[JobId, Verdict] = {}
        for step in sorted({job.last_step for job in judged}):
            there = {j.id: n for n, j in enumerate(k for k in jobs if k.last_step >= step)}
            others = len(there) - 1
            if others < self.min_others:
                break
            means = np.array([mean_by(j.curve, step) for j in jobs if j.last_step >= step])
            for job in (j for j in judged if j.last_step == step):
                limit = float(_median(np.delete(means, there[job.id])))
                mine = best_by(job.curve, step)
                if mine > limit:
                    verdicts[job.id] = Verdict(step, mine, limit, others)
        return verdicts


def _is_judged(job: Job) -> bool:
    """Return True for a trial that waits, or runs and has reported since it was started."""
    return job.phase is Phase.WAITING or (job.phase is Phase.RUNNING and job.has_finished_slice)


def _queue(snapshot: Snapshot, jobs: Sequence[Job], bad: Mapping[JobId, Verdict]) -> SweepQueue:
    on_gpus = holding(snapshot, jobs)
    waiting = queued(jobs, Phase.WAITING)
    paused = [job for job in (*on_gpus, *waiting) if job.id in bad]
    paused.sort(key=lambda job: (best(job.curve), submission(job)))
    goes_on = tuple(job for job in on_gpus if job.id not in bad)
    good = [job for job in waiting if job.id not in bad]
    return SweepQueue(goes_on, (*good, *queued(jobs, Phase.PENDING), *paused))


def _median(means: Floats) -> float:
    """Return the median, also of infinite values (which numpy subtracts from each other)."""
    ordered = np.sort(means)
    middle = len(ordered) // 2
    low, high = float(ordered[(len(ordered) - 1) // 2]), float(ordered[middle])
    return low if isinf(low) or low == high else (low + high) / 2


def _why(job: Job, is_granted: bool, bad: Mapping[JobId, Verdict]) -> Reason:
    verdict = bad.get(job.id)
    if verdict is None:
        change = (
            "its best loss becoming worse than the median" if is_granted else "a GPU becoming free"
        )
        text = "runs: not worse than the median" if is_granted else "waits in order of submission"
        return Reason(text, (Term("best_loss", best(job.curve)),), None, change)
    text = "runs, as nothing better waits" if is_granted else "paused"
    change = (
        f"a median over {figure(verdict.best, 4)}"
        if is_granted
        else f"a median of {figure(verdict.best, 4)}"
    )
    if is_granted and job.holds_gpus and not job.preemptible:
        text = "runs, as it cannot be stopped without losing work"
    return Reason(f"{text}: {_compared(verdict)}", _terms(verdict), None, change)


def _ended(verdict: Verdict) -> Reason:
    change = f"a best loss of {figure(verdict.median, 4)} or less"
    return Reason(f"ended: {_compared(verdict)}", _terms(verdict), None, change)


def _compared(verdict: Verdict) -> str:
    at = f"at step {verdict.step}, median {figure(verdict.median, 4)} of {verdict.others} others"
    return f"best loss {figure(verdict.best, 4)} {at}"


def _terms(verdict: Verdict) -> tuple[Term, ...]:
    return Term.several(
        best_loss=verdict.best,
        median_loss=verdict.median,
        step=verdict.step,
        others=verdict.others,
    )

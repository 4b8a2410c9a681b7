"""Successive halving: all trials reach a rung, then the best third goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.curves import best
from hermes_ops.core.model import Job, JobId, Phase, Plan, Reason, Snapshot, Term
from hermes_ops.policies.toolbox.parameter_checks import whole
from hermes_ops.policies.toolbox.rungs import Bracket, bracket, rung_steps
from hermes_ops.policies.toolbox.sweep_queues import SweepQueue, by_sweep, holding, in_turn, serve

Deal = Callable[[Sequence[Job]], Sequence[tuple[Sequence[Job], Sequence[int]]]]
"""A sweep's jobs, in order of submission, divided into the (trials, rungs) of its brackets."""


@dataclass(frozen=True, slots=True)
class SuccessiveHalving:
    """Bring all trials of a sweep to a rung, then the best 1/eta of them to the next.

    Rungs are at `first_rung`, times `eta`, times `eta`² ... steps; those that are left after the
    last one run to their ends.

    Source: Jamieson and Talwalkar, AISTATS 2016, keeping floor(n/eta) as Hyperband (JMLR 2018)
    does. Ours: at least one is kept; while stragglers leave a GPU idle, and when the best have
    ended, the trials that rest at the rung, then those that were left behind, are resumed, the last
    to be left behind first (they give way again), so that all finish and no GPU idles; `kill` ends
    those that were left behind instead; a trial that has ended counts as having reached each rung;
    a sweep's trials are those that it has now, so one that arrives late is waited for; sweeps share
    the GPUs by (GPUs + 1) / weight.
    """

    eta: int = 3
    first_rung: int = 1
    kill: bool = False
    name: ClassVar[str] = "successive-halving"
    preempts: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole("eta", self.eta, 2)
        whole("first_rung", self.first_rung, 1)

    def initial(self) -> None:
        """Return None: rungs are read off the curves."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Serve the trials that have still to reach the current rung."""
        return serve_brackets(snapshot, self.deal, self.eta, kill=self.kill), memory

    def deal(self, jobs: Sequence[Job]) -> list[tuple[Sequence[Job], tuple[int, ...]]]:
        """Return one bracket of all trials, with its rungs."""
        totals = [job.total_steps for job in jobs if job.total_steps is not None]
        deepest = max((job.last_step for job in jobs), default=0)
        last = max(totals) - 1 if len(totals) == len(jobs) else max(deepest, 1) * self.eta
        return [(jobs, tuple(rung_steps(self.first_rung, self.eta, last)))]


def serve_brackets(snapshot: Snapshot, deal: Deal, eta: int, *, kill: bool) -> Plan:
    """Return the plan that serves each sweep's brackets; `kill` ends the eliminated trials."""
    of: dict[JobId, Bracket] = {}
    every: list[Bracket] = []
    queues = {}
    for sweep, jobs in by_sweep(snapshot).items():
        brackets = []
        for trials, rungs in deal(jobs):
            brackets.append(bracket(trials, rungs, eta))
            of.update(dict.fromkeys((job.id for job in trials), brackets[-1]))
        queues[sweep] = brackets_queue(snapshot, brackets)
        every += brackets
    return serve(snapshot, in_turn(queues), BracketReasons(of), ends_of(every) if kill else {})


def brackets_queue(snapshot: Snapshot, brackets: Sequence[Bracket]) -> SweepQueue:
    """Order a sweep's trials: bracket after bracket, then resting and eliminated trials.

    Of the latter those that have a GPU come first, so that they do not take turns.
    """
    goes_on: list[Job] = []
    first: list[Job] = []
    behind: list[Job] = []
    for current in brackets:
        goes_on += holding(snapshot, current.runs)
        first += [j for j in current.runs if j.phase is Phase.WAITING]
        first += [j for j in current.runs if j.phase is Phase.PENDING]
        behind += current.rests
    behind += [job for current in brackets for job, *_ in current.cut]
    on_gpus = holding(snapshot, behind)
    waiting = [job for job in behind if job.phase in (Phase.WAITING, Phase.PENDING)]
    starting = tuple(job for job in on_gpus if job.phase is Phase.STARTING)
    running = (job for job in on_gpus if job.phase is not Phase.STARTING)
    return SweepQueue((*goes_on, *starting), (*first, *running, *waiting))


def ends_of(brackets: Iterable[Bracket]) -> dict[JobId, Reason]:
    """Return the open trials that were eliminated, with the reason for their end."""
    return {
        job.id: Reason(
            f"ended: number {rank} of {size} at rung {rung}",
            _terms(rung, rank, size),
            would_change="a better loss at that rung",
        )
        for current in brackets
        for job, rung, rank, size in current.cut
        if job.may_end
    }


@dataclass(frozen=True, slots=True)
class BracketReasons:
    """The reasons of a decision: each job by its bracket."""

    brackets: dict[JobId, Bracket]

    def __call__(self, job: Job, is_granted: bool) -> Reason:
        """Return the reason why the job has GPUs (`is_granted`) or has none."""
        current = self.brackets[job.id]
        goal = f"rung {current.rung}" if current.rung else "its end"
        if any(other.id == job.id for other in current.runs):
            return self._running_reason(job, is_granted, current, goal)
        for other, rung, rank, size in current.cut:
            if other.id == job.id:
                text = "resumed on a GPU that nobody before it needs" if is_granted else "paused"
                change = "a trial before it needing the GPU" if is_granted else "a GPU staying idle"
                shown = f"{text}: number {rank} of {size} at rung {rung}"
                return Reason(shown, _terms(rung, rank, size), None, change)
        terms = (Term("loss", best(job.curve)), Term("still_to_come", len(current.runs)))
        text = "runs on an idle GPU" if is_granted else "waits"
        return Reason(
            f"{text}: {len(current.runs)} have still to reach {goal}",
            terms,
            None,
            f"their reaching {goal}",
        )

    def _running_reason(self, job: Job, is_granted: bool, current: Bracket, goal: str) -> Reason:
        terms = (Term("step", job.last_step), Term("still_to_come", len(current.runs)))
        if is_granted:
            text = f"runs to {goal}, with {len(current.runs)} of {current.size}"
            return Reason(text, terms, None, f"reaching {goal}")
        return Reason(f"waits to run to {goal}", terms, None, "a GPU becoming free")


def _terms(rung: int, rank: int, size: int) -> tuple[Term, ...]:
    return Term.several(rung=rung, rank=rank, trials_at_rung=size)

"""Successive halving: all trials reach a rung, then the best third goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.checks import whole
from hermes_ops.core.curves import best
from hermes_ops.core.lines import Line, by_sweep, in_turn, seated, serve
from hermes_ops.core.model import Job, JobId, Phase, Plan, Reason, Snapshot, Term
from hermes_ops.core.rungs import Bracket, bracket, levels

Deal = Callable[[Sequence[Job]], Sequence[tuple[Sequence[Job], Sequence[int]]]]
"""A sweep's jobs, in order of submission, as the (trials, rungs) of its brackets."""


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

    def __post_init__(self) -> None:
        whole("eta", self.eta, 2)
        whole("first_rung", self.first_rung, 1)

    def initial(self) -> None:
        """None: rungs are read off the curves."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Serve those that have still to reach the present rung."""
        return serve_brackets(snapshot, self.deal, self.eta, kill=self.kill), memory

    def deal(self, jobs: Sequence[Job]) -> list[tuple[Sequence[Job], tuple[int, ...]]]:
        """One bracket of all trials, with its rungs."""
        known = [job.total_steps for job in jobs if job.total_steps is not None]
        deepest = max((job.last_step for job in jobs), default=0)
        last = max(known) - 1 if len(known) == len(jobs) else max(deepest, 1) * self.eta
        return [(jobs, tuple(levels(self.first_rung, self.eta, last)))]


def serve_brackets(snapshot: Snapshot, deal: Deal, eta: int, *, kill: bool) -> Plan:
    """The plan that serves each sweep's brackets; `kill` ends who was left behind in them."""
    of: dict[JobId, Bracket] = {}
    every: list[Bracket] = []
    lines = {}
    for sweep, jobs in by_sweep(snapshot).items():
        found = []
        for trials, rungs in deal(jobs):
            found.append(bracket(trials, rungs, eta))
            of.update(dict.fromkeys((job.id for job in trials), found[-1]))
        lines[sweep] = brackets_line(snapshot, found)
        every += found
    return serve(snapshot, in_turn(lines), Because(of), ends_of(every) if kill else {})


def brackets_line(snapshot: Snapshot, brackets: Sequence[Bracket]) -> Line:
    """The brackets one after the other; who rests or was left behind comes after all of them.

    Among these, those that have a GPU come first, so that they do not take turns.
    """
    goes_on: list[Job] = []
    first: list[Job] = []
    behind: list[Job] = []
    for found in brackets:
        goes_on += seated(snapshot, found.runs)
        first += [j for j in found.runs if j.phase is Phase.WAITING]
        first += [j for j in found.runs if j.phase is Phase.PENDING]
        behind += found.rests
    behind += [job for found in brackets for job, *_ in found.cut]
    on_gpus = seated(snapshot, behind)
    waiting = [job for job in behind if job.phase in (Phase.WAITING, Phase.PENDING)]
    starting = tuple(job for job in on_gpus if job.phase is Phase.STARTING)
    running = (job for job in on_gpus if job.phase is not Phase.STARTING)
    return Line((*goes_on, *starting), (*first, *running, *waiting))


def ends_of(brackets: Iterable[Bracket]) -> dict[JobId, Reason]:
    """The open trials that were left behind, with the reason for their end."""
    return {
        job.id: Reason(
            f"ended: number {rank} of {size} at rung {rung}",
            _terms(rung, rank, size),
            would_change="a better loss at that rung",
        )
        for found in brackets
        for job, rung, rank, size in found.cut
        if job.may_end
    }


@dataclass(frozen=True, slots=True)
class Because:
    """Explains a job by its bracket."""

    brackets: dict[JobId, Bracket]

    def __call__(self, job: Job, on: bool) -> Reason:
        """The reason for a job that has GPUs (`on`), or has none."""
        found = self.brackets[job.id]
        goal = f"rung {found.rung}" if found.rung else "its end"
        if any(other.id == job.id for other in found.runs):
            return self._runs(job, on, found, goal)
        for other, rung, rank, size in found.cut:
            if other.id == job.id:
                text = "resumed on a GPU that nobody before it needs" if on else "paused"
                change = "a trial before it needing the GPU" if on else "a GPU staying idle"
                shown = f"{text}: number {rank} of {size} at rung {rung}"
                return Reason(shown, _terms(rung, rank, size), None, change)
        terms = (Term("loss", best(job.curve)), Term("still_to_come", len(found.runs)))
        text = "runs on an idle GPU" if on else "waits"
        return Reason(
            f"{text}: {len(found.runs)} have still to reach {goal}",
            terms,
            None,
            f"their reaching {goal}",
        )

    def _runs(self, job: Job, on: bool, found: Bracket, goal: str) -> Reason:
        terms = (Term("step", job.last_step), Term("still_to_come", len(found.runs)))
        if on:
            text = f"runs to {goal}, with {len(found.runs)} of {found.size}"
            return Reason(text, terms, None, f"reaching {goal}")
        return Reason(f"waits to run to {goal}", terms, None, "a GPU becoming free")


def _terms(rung: int, rank: int, size: int) -> tuple[Term, ...]:
    named = {"rung": rung, "rank": rank, "trials_at_rung": size}
    return tuple(Term(name, float(value)) for name, value in named.items())

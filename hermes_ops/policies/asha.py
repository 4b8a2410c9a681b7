"""ASHA: at each rung the best third of the trials goes on, the others pause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan
from typing import ClassVar

from hermes_ops.core.amounts import figure
from hermes_ops.core.model import Job, JobId, Phase, Plan, Reason, Snapshot, Term
from hermes_ops.policies.toolbox.parameter_checks import whole
from hermes_ops.policies.toolbox.rungs import RungRank, rung_ranks
from hermes_ops.policies.toolbox.sweep_queues import (
    SweepQueue,
    by_sweep,
    holding,
    in_turn,
    queued,
    serve,
)


@dataclass(frozen=True, slots=True)
class Asha:
    """Promote the best promotable trial, else open a new one, else resume the best paused one.

    A trial that reaches a rung (`first_rung`, times `eta`, times `eta`² ... steps) leaves its GPU
    unless it is among the first 1/eta of all that have reached it. A paused trial is promoted as
    soon as it is among them, the highest rung first, there the lowest loss. The figure at a rung
    is the lowest loss up to its step; a trial without a finite one is never promoted.

    Source: Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020. Ours:
    when nothing is promotable and nothing new is left, the best paused trial of the highest rung
    is resumed, so that all finish; `kill` ends instead of pausing, but judges nobody at a rung
    with fewer than `eta` trials; the promotion of a running trial holds from its first report
    after the rung, until then a better one can still take its place; rungs belong to a sweep, and
    sweeps share the GPUs by (GPUs + 1) / weight.
    """

    eta: int = 3
    first_rung: int = 1
    kill: bool = False
    name: ClassVar[str] = "asha"
    preempts: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole("eta", self.eta, 2)
        whole("first_rung", self.first_rung, 1)

    def initial(self) -> None:
        """Return None: rungs are read off the curves."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Rank the trials at their rungs, then serve the sweeps."""
        ranks: dict[JobId, RungRank] = {}
        queues = {}
        for sweep, jobs in by_sweep(snapshot).items():
            sweep_ranks = rung_ranks(jobs, self.first_rung, self.eta)
            ranks |= sweep_ranks
            queues[sweep] = asha_queue(snapshot, jobs, sweep_ranks)
        ends = _ends(snapshot.jobs, ranks) if self.kill else {}
        order = in_turn(queues)
        plan = serve(
            snapshot, order, lambda job, is_granted: why(job, is_granted, ranks[job.id]), ends
        )
        return plan, memory


def asha_queue(
    snapshot: Snapshot, jobs: Sequence[Job], ranks: Mapping[JobId, RungRank], opens: bool = True
) -> SweepQueue:
    """Order a sweep's trials: promotable, new, paused; new ones last when not `opens`."""
    on_gpus = holding(snapshot, jobs)
    goes_on = tuple(job for job in on_gpus if not ranks[job.id].is_waiting)
    waiting = queued(jobs, Phase.WAITING)
    cut_off = [job for job in waiting if not ranks[job.id].is_waiting]
    at_rung = [job for job in (*on_gpus, *waiting) if ranks[job.id].is_waiting]
    at_rung.sort(key=lambda job: (-ranks[job.id].rung, ranks[job.id].rank))
    promoted = [job for job in at_rung if ranks[job.id].is_promoted]
    paused = [job for job in at_rung if not ranks[job.id].is_promoted]
    paused.sort(key=lambda job: not isfinite(ranks[job.id].loss))
    new = queued(jobs, Phase.PENDING)
    last = (*new, *paused) if opens else (*paused, *new)
    return SweepQueue(goes_on, (*cut_off, *promoted, *last))


def why(job: Job, is_granted: bool, at: RungRank) -> Reason:
    """Return the reason why a job with this rank in its rung has GPUs or none."""
    if job.phase is Phase.PENDING:
        text = (
            "starts: no trial of its sweep is promotable" if is_granted else "waits: not begun yet"
        )
        return Reason(
            text, would_change="a promotable trial" if is_granted else "a GPU becoming free"
        )
    goal = f"step {at.following}" if at.following else "its end"
    terms = _terms(at)
    if not at.is_waiting:
        if is_granted:
            return Reason(f"runs to {goal}", terms, None, f"reaching {goal}")
        return Reason(f"waits on its way to {goal}", terms, None, "a GPU becoming free")
    place = f"number {at.rank} of {at.size} at rung {at.rung}, {at.places} go on"
    if at.is_promoted:
        text = f"promoted to {goal}" if is_granted else "promotable, waits for a GPU"
        change = f"falling behind {at.places} trials at rung {at.rung}"
        return Reason(
            f"{text}: {place}", terms, None, change if is_granted else "a GPU becoming free"
        )
    if is_granted and not job.preemptible and job.holds_gpus:
        return Reason(
            f"runs: it cannot be stopped without losing work; {place}", terms, None, "its end"
        )
    text = "resumed, as nothing is promotable or new" if is_granted else "paused"
    return Reason(f"{text}: {place}", terms, None, _needs(at))


def _needs(at: RungRank) -> str:
    more = "more trials at the rung"
    return more if isnan(at.limit) else f"a loss of {figure(at.limit, 4)} or less, or {more}"


def _terms(at: RungRank) -> tuple[Term, ...]:
    if not at.rung:
        return ()
    return Term.several(
        rung=at.rung,
        rank=at.rank,
        trials_at_rung=at.size,
        places=at.places,
        loss_at_rung=at.loss,
        limit_loss=at.limit,
    )


def _ends(jobs: Iterable[Job], ranks: Mapping[JobId, RungRank]) -> dict[JobId, Reason]:
    """End the trials at a rung that are not among its promoted ones."""
    ends = {}
    for job in jobs:
        at = ranks.get(job.id, RungRank(loss=-inf))
        if job.may_end and at.is_waiting and at.places and not at.is_promoted:
            text = f"ended: number {at.rank} of {at.size} at rung {at.rung}, {at.places} go on"
            ends[job.id] = Reason(text, _terms(at), None, _needs(at))
    return ends

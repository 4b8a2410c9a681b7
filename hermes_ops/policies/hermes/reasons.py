"""The reasons of the Hermes policy, as `hermes explain` prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf, isinf

from hermes_ops.core.amounts import figure
from hermes_ops.core.model import Job, JobId, Phase, Reason, Snapshot, Term
from hermes_ops.policies.toolbox.answer import forced_reason

_NO_ROOM = Reason(
    "waits: the queue of each GPU is full",
    would_change="an open trial ending, or its sweep's weight or the threshold being raised",
)


@dataclass(frozen=True)
class HermesDecision:
    """A decision with its inputs.

    What several reasons share is computed with the first of them.
    """

    snapshot: Snapshot
    scores: Mapping[JobId, float]
    places: Mapping[JobId, tuple[int, ...]]
    assigned: Mapping[JobId, tuple[int, ...]]
    displaced: Mapping[JobId, JobId]
    waiting: tuple[JobId, ...]  # left without GPUs, best first
    threshold: int

    @cached_property
    def rivals(self) -> Mapping[int, JobId]:
        """The best waiting job of each GPU's queue."""
        worst_first = ((job, self.places.get(job, ())) for job in reversed(self.waiting))
        return {gpu: job for job, gpus in worst_first for gpu in gpus}

    @cached_property
    def owners(self) -> Mapping[int, JobId]:
        """The job of each GPU from now on."""
        return {gpu: job for job, gpus in self.assigned.items() for gpu in gpus}

    @cached_property
    def load(self) -> Mapping[int, int]:
        """The number of jobs in each GPU's queue."""
        return Counter(gpu for gpus in self.places.values() for gpu in gpus)

    @cached_property
    def victims(self) -> Mapping[JobId, JobId]:
        """For each job that takes over, the job that it replaces; of several the least id."""
        return {self.displaced[job]: job for job in sorted(self.displaced, reverse=True)}

    def explain(self, job_id: JobId) -> Reason:
        """Return why this job, which has not ended, runs, waits or is stopped."""
        job = self.snapshot.index[job_id]
        return forced_reason(self.snapshot, job) or self._chosen(job)

    def _chosen(self, job: Job) -> Reason:
        terms = _terms(self, job)
        if job.id in self.displaced:
            return _stopped(self, job, self.displaced[job.id], terms)
        if job.id in self.assigned:
            rival = _best(self, {self.rivals[g] for g in self.assigned[job.id] if g in self.rivals})
            return (_kept if job.holds_gpus else _started)(self, job, rival, terms)
        if job.id not in self.places:
            return _NO_ROOM
        ahead = {self.owners[g] for g in self.places[job.id] if g in self.owners}
        return _waits(self, job, _best(self, ahead), terms)


def _kept(view: HermesDecision, job: Job, rival: JobId | None, terms: tuple[Term, ...]) -> Reason:
    if rival is None:
        return Reason("runs: nobody waits for its GPU", terms, None, "a job waiting for its GPU")
    rival_text = f"{rival} ({_rate(view.scores[rival])})"
    if view.scores[rival] <= view.scores[job.id]:
        text = f"runs: it converges at {_rate(view.scores[job.id])}, next is {rival_text}"
        change = f"its own convergence falling below {_rate(view.scores[rival])}"
        return Reason(text, terms, rival, change)
    if not job.preemptible:
        return Reason("runs: it cannot be stopped without losing work", terms, rival, "its end")
    text = f"runs: its first slice of this segment is not finished; then {rival_text}"
    if not job.has_finished_slice:
        return Reason(text, terms, rival, "its next reported step")
    text = f"runs: {rival_text} has not won all GPUs it needs"
    return Reason(text, terms, rival, f"{rival} winning the others too")


def _started(
    view: HermesDecision, job: Job, rival: JobId | None, terms: tuple[Term, ...]
) -> Reason:
    victim = view.victims.get(job.id)
    rate = _rate(view.scores[job.id])
    verb = "starts" if job.phase is Phase.PENDING else "resumes"
    if victim is None:
        change = f"{rival} being faster" if rival else "a faster job waiting for that GPU"
        return Reason(f"{verb} on an idle GPU: {rate}", terms, rival, change)
    beaten = f"{victim} ({_rate(view.scores[victim])})"
    return Reason(f"{verb}: {rate}, faster than {beaten}", terms, victim, f"{victim} being faster")


def _stopped(view: HermesDecision, job: Job, winner: JobId, terms: tuple[Term, ...]) -> Reason:
    mine, other = _rate(view.scores[job.id]), _rate(view.scores[winner])
    text = f"gives way to {winner} ({other}): it converges at {mine}"
    return Reason(text, terms, winner, f"converging faster than {winner}")


def _waits(view: HermesDecision, job: Job, ahead: JobId | None, terms: tuple[Term, ...]) -> Reason:
    if ahead is None:
        return Reason("waits for enough free GPUs at once", terms, None, "a running job ending")
    mine, other = view.scores[job.id], view.scores[ahead]
    if mine > other:
        text = f"waits for {ahead} to become preemptible, which it then overtakes"
        return Reason(text, terms, ahead, f"{ahead} finishing a slice")
    text = f"waits: {ahead} converges faster or as fast ({_rate(other)} to {_rate(mine)})"
    return Reason(text, terms, ahead, f"{ahead} falling below {_rate(mine)}, or its end")


def _terms(view: HermesDecision, job: Job) -> tuple[Term, ...]:
    gpus = view.places.get(job.id, ())
    terms = [
        Term("convergence_per_s", view.scores[job.id]),
        Term("weight", job.weight),
        Term("queue_length", float(max((view.load[g] for g in gpus), default=0))),
        Term("threshold", float(view.threshold)),
        Term("preemptions", float(job.preemptions)),
    ]
    if job.started_s is not None and job.holds_gpus:
        terms.append(Term("ran_s", view.snapshot.time_s - job.started_s))
    if job.waiting_since_s is not None and not job.holds_gpus:
        terms.append(Term("waited_s", view.snapshot.time_s - job.waiting_since_s))
    return tuple(terms)


def _best(view: HermesDecision, jobs: set[JobId]) -> JobId | None:
    return min(jobs, key=lambda j: (-view.scores.get(j, -inf), j), default=None)


def _rate(score: float) -> str:
    return "not seen yet" if isinf(score) else f"{figure(score)}/s"

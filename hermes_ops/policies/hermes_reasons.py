"""What `hermes explain` prints about a decision of the Hermes policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isinf

from hermes_ops.core.convergence import finished_slice
from hermes_ops.core.model import Job, JobId, Phase, Reason, Term
from hermes_ops.core.placement import Places

_NO_ROOM = Reason(
    "waits: the queue of each GPU is full",
    would_change="an open trial ending, or its sweep's weight or the threshold being raised",
)

_TOO_LARGE = Reason("waits: it needs more GPUs than the pool has", would_change="a larger pool")


@dataclass(frozen=True, slots=True)
class View:
    """A decision that has been made, with all that it was made from."""

    time_s: float
    jobs: Mapping[JobId, Job]
    scores: Mapping[JobId, float]
    places: Places
    held: Places
    seats: Places
    displaced: Mapping[JobId, JobId]
    waiting: tuple[JobId, ...]  # left without GPUs, best first
    threshold: int
    pool_size: int


def reasons(view: View) -> dict[JobId, Reason]:
    """One reason for every job that has not ended."""
    rivals: dict[int, JobId] = {}  # best waiting job of each GPU's queue
    load: dict[int, int] = {}
    for job_id in view.waiting:
        for gpu in view.places.get(job_id, ()):
            rivals.setdefault(gpu, job_id)
    for gpus in view.places.values():
        for gpu in gpus:
            load[gpu] = load.get(gpu, 0) + 1
    owners = {gpu: job_id for job_id, gpus in view.seats.items() for gpu in gpus}
    return {
        job.id: _reason(view, job, rivals, owners, load)
        for job in view.jobs.values()
        if job.phase is not Phase.ENDED
    }


def _reason(
    view: View,
    job: Job,
    rivals: Mapping[int, JobId],
    owners: Mapping[int, JobId],
    load: Mapping[int, int],
) -> Reason:
    terms = _terms(view, job, load)
    if job.id in view.displaced:
        return _stopped(view, job, view.displaced[job.id], terms)
    if job.id in view.seats:
        rival = _best(view, {rivals[g] for g in view.seats[job.id] if g in rivals})
        return (_kept if job.id in view.held else _started)(view, job, rival, terms)
    if job.phase is Phase.STOPPING:
        return Reason("is stopping: it waits from then on", terms)
    if job.holds_gpus:
        return Reason("stops: its GPUs left the pool or are held by another job", terms)
    if job.id not in view.places:
        return _TOO_LARGE if job.min_gpus > view.pool_size else _NO_ROOM
    ahead = _best(view, {owners[g] for g in view.places[job.id] if g in owners})
    return _waits(view, job, ahead, terms)


def _kept(view: View, job: Job, rival: JobId | None, terms: tuple[Term, ...]) -> Reason:
    if rival is None:
        return Reason("runs: nobody waits for its GPU", terms)
    rival_text = f"{rival} ({_rate(view.scores[rival])})"
    if view.scores[rival] <= view.scores[job.id]:
        text = f"runs: it converges at {_rate(view.scores[job.id])}, next is {rival_text}"
        change = f"its own convergence falling below {_rate(view.scores[rival])}"
        return Reason(text, terms, rival, change)
    if not job.preemptible:
        return Reason("runs: it cannot be stopped without losing work", terms, rival, "its end")
    text = f"runs: its first slice of this segment is not finished; then {rival_text}"
    if not finished_slice(job):
        return Reason(text, terms, rival, "its next reported step")
    return Reason(f"runs: {rival_text} has not won all GPUs it needs", terms, rival)


def _started(view: View, job: Job, rival: JobId | None, terms: tuple[Term, ...]) -> Reason:
    victims = [v for v, winner in view.displaced.items() if winner == job.id]
    rate = _rate(view.scores[job.id])
    verb = "starts" if job.phase is Phase.PENDING else "resumes"
    if not victims:
        change = f"{rival} being faster" if rival else ""
        return Reason(f"{verb} on an idle GPU: {rate}", terms, rival, change)
    victim = min(victims)
    beaten = f"{victim} ({_rate(view.scores[victim])})"
    return Reason(f"{verb}: {rate}, faster than {beaten}", terms, victim, f"{victim} being faster")


def _stopped(view: View, job: Job, winner: JobId, terms: tuple[Term, ...]) -> Reason:
    mine, other = _rate(view.scores[job.id]), _rate(view.scores[winner])
    text = f"gives way to {winner} ({other}): it converges at {mine}"
    return Reason(text, terms, winner, f"converging faster than {winner}")


def _waits(view: View, job: Job, ahead: JobId | None, terms: tuple[Term, ...]) -> Reason:
    if ahead is None:
        return Reason("waits for enough free GPUs at once", terms, None, "a running job ending")
    mine, other = view.scores[job.id], view.scores[ahead]
    if mine > other:
        text = f"waits for {ahead} to become preemptible, which it then overtakes"
        return Reason(text, terms, ahead, f"{ahead} finishing a slice")
    text = f"waits: {ahead} converges faster or as fast ({_rate(other)} to {_rate(mine)})"
    return Reason(text, terms, ahead, f"{ahead} falling below {_rate(mine)}, or its end")


def _terms(view: View, job: Job, load: Mapping[int, int]) -> tuple[Term, ...]:
    gpus = view.places.get(job.id, ())
    terms = [
        Term("convergence_per_s", view.scores[job.id]),
        Term("weight", job.weight),
        Term("queue_length", float(max((load[g] for g in gpus), default=0))),
        Term("threshold", float(view.threshold)),
        Term("preemptions", float(job.preemptions)),
    ]
    if job.started_s is not None and job.holds_gpus:
        terms.append(Term("ran_s", view.time_s - job.started_s))
    if job.waiting_since_s is not None and not job.holds_gpus:
        terms.append(Term("waited_s", view.time_s - job.waiting_since_s))
    return tuple(terms)


def _best(view: View, jobs: set[JobId]) -> JobId | None:
    return min(jobs, key=lambda j: (-view.scores.get(j, -inf), j), default=None)


def _rate(score: float) -> str:
    return "not seen yet" if isinf(score) else f"{score:.3g}/s"

"""Hermes: the trial whose loss falls fastest holds the GPU.

`placement` is Algorithms 1 and 2, which queue each job stands in; Algorithm 3, which job of a
queue runs, is here, and so is the explanation of a decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nsmallest
from math import inf, isinf
from typing import ClassVar

import numpy as np

from hermes_ops.core.amounts import figure
from hermes_ops.core.model import Job, JobId, Phase, Plan, Reason, Snapshot, Term
from hermes_ops.core.nodes import usable
from hermes_ops.core.plan import LazyReasons
from hermes_ops.policies.hermes.placement import (
    FairShareOrder,
    GpuQueues,
    Places,
    open_job_count,
    place,
)
from hermes_ops.policies.toolbox.answer import forced_reason
from hermes_ops.policies.toolbox.convergence import weighted_convergences
from hermes_ops.policies.toolbox.fill import grant
from hermes_ops.policies.toolbox.parameter_checks import whole

_PENDING, _WAITING = Phase.PENDING, Phase.WAITING  # looked up for 10,000 jobs in every decision

_NO_ROOM = Reason(
    "waits: the queue of each GPU is full",
    would_change="an open trial ending, or its sweep's weight or the threshold being raised",
)


@dataclass(frozen=True, slots=True)
class Hermes:
    """Give each GPU to the job of its queue with the highest convergence, preempting for it.

    Jobs wait in the queue of a GPU; a new one joins the queue with the fewest jobs, if that has
    fewer than `threshold` (Algorithms 1 and 2), so that at most `threshold` x GPUs are open at
    once. On each GPU the waiting job of highest convergence takes over when it converges faster
    than the running one and that has finished a slice (Algorithm 3). A job not seen yet converges
    infinitely fast: each runs once before any is compared.

    Source: Son et al., "Hermes", Electronics 2021, 10(3), 350. The paper's threshold, convergence
    formula and preemption rule are not recovered: the threshold of 2, `toolbox.convergence` and the
    strict "higher" are choices. So are these, on which the paper is silent:

    * Weights: convergence is multiplied by the job's weight; of pending trials the one of the
      sweep with the smallest (open jobs + 1) / weight is next.
    * Gangs: a job of several GPUs stands in as many queues and starts only when it wins all of
      them in one decision. Nothing is held for it meanwhile, so two gangs cannot wait for each
      other; the Aging guard bounds its waiting. A job gets `min_gpus`.
    * Work conservation: an idle GPU whose own queue has no job to run takes the best waiting job
      of the other queues, and that job changes its queue.
    """

    threshold: int = 2
    name: ClassVar[str] = "hermes"
    preempts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole("threshold", self.threshold, 1)

    def initial(self) -> GpuQueues:
        """Return empty queues."""
        return GpuQueues()

    def decide(self, snapshot: Snapshot, memory: GpuQueues) -> tuple[Plan, GpuQueues]:
        """Make one pass of Algorithms 1 to 3 over all GPUs."""
        places = place(snapshot, memory, self.threshold)
        assignment = Assignment(snapshot, places, weighted_convergences(snapshot.jobs))
        waiting = assignment.ranked()
        _serve_own_queues(assignment, waiting)
        _preempt(assignment, waiting)
        _fill(assignment, waiting)
        _admit(assignment, self.threshold * len(snapshot.gpus))
        return self._plan(snapshot, assignment, waiting), _remember(snapshot, assignment)

    def _plan(self, snapshot: Snapshot, assignment: Assignment, waiting: Sequence[Job]) -> Plan:
        view = HermesDecision(
            snapshot=snapshot,
            scores=assignment.scores,
            places=assignment.places,
            assigned=assignment.assigned,
            displaced=assignment.displaced,
            waiting=tuple(job.id for job in waiting if job.id not in assignment.assigned),
            threshold=self.threshold,
        )
        grants = tuple(grant(job, gpus) for job, gpus in sorted(assignment.assigned.items()))
        last = [job.id for job in assignment.pending if job.id not in assignment.assigned]
        line = tuple(dict.fromkeys((*view.waiting, *last))) if last else view.waiting
        return Plan(grants, ranking=line, reasons=LazyReasons(assignment.scores, view.explain))


@dataclass(slots=True)
class Assignment:
    """The GPUs of each job, as one decision is made."""

    snapshot: Snapshot
    places: Places
    scores: dict[JobId, float]
    assigned: Places = field(init=False)
    displaced: dict[JobId, JobId] = field(default_factory=dict)  # victim: the job that takes over
    owner: dict[int, Job] = field(init=False)  # jobs that held the GPU before this decision
    idle: set[int] = field(init=False)
    pending: list[Job] = field(init=False)  # in order of submission

    def __post_init__(self) -> None:
        jobs, held = self.snapshot.index, self.snapshot.held
        self.assigned = dict(held)
        self.owner = {gpu: jobs[job] for job, gpus in held.items() for gpu in gpus}
        self.idle = {gpu.index for gpu in self.snapshot.gpus} - self.owner.keys()
        self.pending = [job for job in self.snapshot.queue if job.phase is _PENDING]

    def ranked(self) -> list[Job]:
        """Return the waiting jobs, and the pending ones with a queue, best first.

        Ties go to open jobs, then to older ones.
        """
        jobs = [job for job in self.snapshot.queue if job.phase is _WAITING]
        if self.pending:
            order = {job: number for number, job in enumerate(self.places)}
            jobs += sorted((j for j in self.pending if j.id in order), key=lambda j: order[j.id])
        scores = np.array([self.scores[job.id] for job in jobs])
        return [jobs[place] for place in np.argsort(-scores, kind="stable").tolist()]

    def beatable(self, gpus: Iterable[int], job: Job) -> bool:
        """Return True when each GPU is idle or held by a job that this one may preempt."""
        return all(gpu in self.idle or self._beats(job, gpu) for gpu in gpus)

    def assign(self, job: Job, gpus: tuple[int, ...]) -> None:
        """Give the GPUs to the job; a job that held one of them loses all of its own."""
        victims = {self.owner[gpu].id for gpu in gpus if gpu in self.owner}
        for victim in victims:
            self.displaced[victim] = job.id
            for gpu in self.assigned.pop(victim):
                del self.owner[gpu]
                self.idle.add(gpu)
        self.idle.difference_update(gpus)
        self.assigned[job.id] = gpus
        self.places[job.id] = gpus

    def assign_if_idle(self, job: Job) -> bool:
        """Give the job its own GPUs if they are idle, else any idle ones, if there are enough."""
        last_gpus = self.places.get(job.id, ())
        if last_gpus and self.idle.issuperset(last_gpus):
            self.assign(job, last_gpus)
        else:
            idle = usable(self.snapshot, job, self.idle)
            if job.min_gpus <= len(idle):
                self.assign(job, tuple(nsmallest(job.min_gpus, idle)))
        return job.id in self.assigned

    def _beats(self, job: Job, gpu: int) -> bool:
        runs = self.owner.get(gpu)
        if runs is None or runs.phase is not Phase.RUNNING:
            return False
        may_stop = runs.preemptible and runs.has_finished_slice
        return may_stop and self.scores[job.id] > self.scores[runs.id]


def _serve_own_queues(assignment: Assignment, waiting: Sequence[Job]) -> None:
    """Run the head of each idle GPU's own queue; a gang gets its full try at its own rank."""
    for job in waiting:
        if not assignment.idle and job.min_gpus == 1:
            continue
        last_gpus = assignment.places.get(job.id, ())
        if last_gpus and assignment.idle.issuperset(last_gpus):
            assignment.assign(job, last_gpus)
        elif job.min_gpus > 1 and not assignment.assign_if_idle(job):
            _preempt(assignment, [job])


def _preempt(assignment: Assignment, waiting: Sequence[Job]) -> None:
    """Algorithm 3, best job of all queues first; an idle GPU elsewhere spares the preemption."""
    for job in waiting:
        if not assignment.idle and job.id not in assignment.places:
            continue
        if job.id in assignment.assigned or assignment.assign_if_idle(job):
            continue
        last_gpus = assignment.places.get(job.id, ())
        if last_gpus and assignment.beatable(last_gpus, job):
            assignment.assign(job, last_gpus)


def _fill(assignment: Assignment, waiting: Sequence[Job]) -> None:
    """Give GPUs that are still idle (a preempted gang leaves some) to jobs that fit."""
    for job in waiting:
        if not assignment.idle:
            return
        if job.id not in assignment.assigned:
            assignment.assign_if_idle(job)


def _admit(assignment: Assignment, most_open: int) -> None:
    """Open pending jobs without a place on idle GPUs, up to the bound of open jobs."""
    if not assignment.idle:
        return
    started = {job.id for job in assignment.pending if job.id in assignment.assigned}
    opened = open_job_count(assignment.snapshot) + len(started)
    shares = FairShareOrder(assignment.snapshot)
    while assignment.idle and opened < most_open and shares:
        job = shares.pop()
        if job.id not in assignment.assigned and assignment.assign_if_idle(job):
            opened += 1
            shares.count(job)


def _remember(snapshot: Snapshot, assignment: Assignment) -> GpuQueues:
    """Return the queues of all jobs that are open after this decision."""
    jobs, assigned = snapshot.index, assignment.assigned
    return GpuQueues(
        tuple(p for p in assignment.places.items() if p[0] in assigned or jobs[p[0]].is_open)
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

"""One queue of jobs for each sweep, and how the queues share the GPUs of the pool."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from hermes_ops.core.model import Job, JobId, Phase, Plan, Reason, Snapshot, SweepId
from hermes_ops.core.order import SubmissionKey, by_submission, submission
from hermes_ops.core.plan import overlay
from hermes_ops.policies.toolbox.answer import Explain, answer
from hermes_ops.policies.toolbox.fill import fill


@dataclass(frozen=True, slots=True)
class SweepQueue:
    """The queue of one sweep: jobs that keep their GPUs, then candidates, best first.

    `continuing` have GPUs. `candidates` may have some too, and keep them only when it is their
    turn.
    """

    continuing: tuple[Job, ...] = ()
    candidates: tuple[Job, ...] = ()


def by_sweep(snapshot: Snapshot) -> dict[SweepId, list[Job]]:
    """Return all jobs of each sweep, ended ones too, in order of submission."""
    sweeps: dict[SweepId, list[Job]] = {}
    for job in by_submission(snapshot.jobs):
        sweeps.setdefault(job.sweep, []).append(job)
    return sweeps


def searches(snapshot: Snapshot) -> dict[SweepId, list[Job]]:
    """Return the trials of each sweep that searches for the best one, ended ones too.

    Those are jobs with hyper-parameters and without the name of a model; a trial that has none yet
    belongs to the others of its sweep.
    """
    if not any(job.configuration and job.model_name is None for job in snapshot.jobs):
        return {}
    trials_of = {}
    for sweep, jobs in by_sweep(snapshot).items():
        trials = [job for job in jobs if job.model_name is None]
        if any(job.configuration for job in trials):
            trials_of[sweep] = trials
    return trials_of


def holding(snapshot: Snapshot, jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs that have GPUs and can keep them."""
    return [job for job in jobs if job.id in snapshot.held]


def queued(jobs: Iterable[Job], phase: Phase) -> list[Job]:
    """Return the jobs that are in this phase."""
    return [job for job in jobs if job.phase is phase]


def in_turn(queues: Mapping[SweepId, SweepQueue]) -> Iterator[Job]:
    """Yield the continuing jobs, then by turns candidates: smallest (GPUs + 1) / weight first.

    Ties go to the sweep whose next candidate was submitted first. A choice: the same rule by which
    `placement.FairShareOrder` opens trials, counted in GPUs.
    """
    yield from by_submission(job for queue in queues.values() for job in queue.continuing)
    heap: list[tuple[float, SubmissionKey, int]] = []
    left = [iter(queue.candidates) for queue in queues.values()]
    gpus = [sum(map(_size, queue.continuing)) for queue in queues.values()]
    heads: list[Job | None] = [next(candidates, None) for candidates in left]
    for number, head in enumerate(heads):
        if head is not None:
            heap.append(_entry(head, gpus[number], number))
    heapq.heapify(heap)
    while heap:
        number = heap[0][2]
        job = heads[number]
        assert job is not None
        yield job
        gpus[number] += _size(job)
        heads[number] = following = next(left[number], None)
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, _entry(following, gpus[number], number))


def serve(
    snapshot: Snapshot,
    order: Iterable[Job],
    explain: Explain,
    ends: Mapping[JobId, Reason] | None = None,
) -> Plan:
    """Return the plan that serves jobs in this order, each with `min_gpus` or its own GPUs.

    A job that does not fit is passed over: nothing is reserved for a gang (the Aging guard bounds
    its waiting). `ends` leave at once, their GPUs serve others. `explain` is called only for
    reasons that are read.
    """
    ends = ends or {}
    drawn: list[Job] = []
    source = (job for job in order if job.id not in ends)
    grants = fill(snapshot.with_stopping(ends), _noted(source, drawn))
    plan = answer(snapshot, grants, chain(drawn, source), explain)
    if not ends:
        return plan
    return replace(plan, ends=tuple(ends), reasons=overlay(plan.reasons, ends))


def _noted(jobs: Iterable[Job], drawn: list[Job]) -> Iterator[Job]:
    for job in jobs:
        drawn.append(job)
        yield job


def _entry(job: Job, gpus: int, number: int) -> tuple[float, SubmissionKey, int]:
    return ((gpus + 1) / job.weight, submission(job), number)


def _size(job: Job) -> int:
    return len(job.gpus_held) if job.holds_gpus else job.min_gpus

"""Which job holds which GPUs, and in which GPU's queue each job stands."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from hermes_ops.core.model import Job, JobId, Phase, Snapshot, SweepId
from hermes_ops.core.order import SubmissionKey, by_submission, submission

Places = dict[JobId, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Queues:
    """The queue of each GPU, written as the GPUs in whose queues a job stands (a gang: several)."""

    places: tuple[tuple[JobId, tuple[int, ...]], ...] = ()


def holdings(snapshot: Snapshot) -> Places:
    """The GPUs that each RUNNING or STARTING job can keep: a copy of `Snapshot.held`."""
    return dict(snapshot.held)


def holders(snapshot: Snapshot) -> list[Job]:
    """The jobs that keep their GPUs, first submitted first."""
    return [job for job in snapshot.holding if job.id in snapshot.held]


def least_loaded(load: Mapping[int, int], number: int, threshold: int) -> tuple[int, ...] | None:
    """The `number` GPUs with the fewest jobs, each with fewer than `threshold`; ties to the first.

    None when there are not so many. Source: Hermes, Algorithm 2 (`number` is 1 there).
    """
    room = sorted((jobs, gpu) for gpu, jobs in load.items() if jobs < threshold)
    if number > len(room):
        return None
    return tuple(sorted(gpu for _, gpu in room[:number]))


def place(snapshot: Snapshot, held: Places, memory: Queues, threshold: int) -> Places:
    """The queues in which each job stands now: Hermes, Algorithm 1.

    Open jobs stay where they run, else where the memory has them, else join the least loaded
    queue with room. Then pending jobs fill what room is left; a job for which there is no room
    has no place. Pending jobs are placed anew each time, so that a sweep that arrives later is
    not behind another's whole queue (a choice).
    """
    places = _remembered(snapshot, held, memory)
    load = {gpu.index: 0 for gpu in snapshot.gpus}
    for gpus in places.values():
        for gpu in gpus:
            load[gpu] += 1
    for job in by_submission(j for j in snapshot.jobs if j.is_open and j.id not in places):
        _enqueue(job, places, load, threshold)
    _place_pending(snapshot, places, load, threshold)
    return places


def _remembered(snapshot: Snapshot, held: Places, memory: Queues) -> Places:
    indices = {gpu.index for gpu in snapshot.gpus}
    known = dict(memory.places)
    places = dict(held)
    for job in snapshot.jobs:
        gpus = known.get(job.id, ())
        fits = len(gpus) == job.min_gpus and indices.issuperset(gpus)
        if job.is_open and job.id not in places and fits:
            places[job.id] = tuple(sorted(gpus))
    return places


def _enqueue(job: Job, places: Places, load: dict[int, int], threshold: int) -> bool:
    gpus = least_loaded(load, job.min_gpus, threshold)
    if gpus is None:
        return False
    places[job.id] = gpus
    for gpu in gpus:
        load[gpu] += 1
    return True


def _place_pending(
    snapshot: Snapshot, places: Places, load: dict[int, int], threshold: int
) -> None:
    """Place pending jobs in the order of `Shares`, at most up to threshold x GPUs open ones.

    That bound is checked on its own: a queue may be over the threshold when another has room
    (jobs change queues, GPUs leave).
    """
    shares = Shares(snapshot)
    left = threshold * len(load) - sum(job.is_open for job in snapshot.jobs)
    while shares and left > 0 and any(jobs < threshold for jobs in load.values()):
        job = shares.pop()
        if _enqueue(job, places, load, threshold):
            shares.count(job)
            left -= 1


class Shares:
    """The pending jobs, next first: of the sweep with the smallest (open jobs + 1) / weight.

    Ties go to the sweep whose next trial was submitted first, then to the lower id. Within a sweep
    trials come in the order of submission, then of their numbers.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._open: Counter[SweepId] = Counter(j.sweep for j in snapshot.jobs if j.is_open)
        self._lines: dict[SweepId, deque[Job]] = {}
        for job in by_submission(j for j in snapshot.jobs if j.phase is Phase.PENDING):
            self._lines.setdefault(job.sweep, deque()).append(job)

    def __bool__(self) -> bool:
        return bool(self._lines)

    def pop(self) -> Job:
        """Take the next job out of its line."""
        sweep = min(self._lines, key=self._key)
        line = self._lines[sweep]
        job = line.popleft()
        if not line:
            del self._lines[sweep]
        return job

    def count(self, job: Job) -> None:
        """Count the job as open: its sweep's next one comes later."""
        self._open[job.sweep] += 1

    def _key(self, sweep: SweepId) -> tuple[float, SubmissionKey]:
        job = self._lines[sweep][0]
        return ((self._open[sweep] + 1) / job.weight, submission(job))

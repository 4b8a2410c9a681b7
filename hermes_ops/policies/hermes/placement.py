"""The queues of the GPUs: which job stands in which (Hermes, Algorithms 1 and 2)."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, merge

from hermes_ops.core.model import Job, JobId, Phase, Snapshot, SweepId
from hermes_ops.core.nodes import on_allowed_node, unplaceable
from hermes_ops.core.order import SubmissionKey, by_submission, submission

Places = dict[JobId, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class GpuQueues:
    """The queue of each GPU, written as the GPUs in whose queues a job stands (a gang: several)."""

    places: tuple[tuple[JobId, tuple[int, ...]], ...] = ()


class Loads:
    """The number of jobs in the queue of each GPU, at most `threshold` in each, as jobs join."""

    def __init__(self, snapshot: Snapshot, places: Places, threshold: int) -> None:
        self._snapshot = snapshot
        self.jobs = dict.fromkeys((gpu.index for gpu in snapshot.gpus), 0)
        self._threshold = threshold
        for taken in places.values():
            for gpu in taken:
                self.jobs[gpu] += 1
        self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        self._heap = [(jobs, gpu) for gpu, jobs in self.jobs.items() if jobs < self._threshold]
        heapify(self._heap)

    @property
    def has_room(self) -> bool:
        """True when some queue holds fewer than `threshold` jobs."""
        return bool(self._heap)

    def join(self, job: Job) -> tuple[int, ...] | None:
        """Join the shortest queues, ties to the first; None, and no change, if all are full.

        A job that may run on some nodes only joins queues of one of these.
        Source: Hermes, Algorithm 2 (one GPU there).
        """
        number = job.min_gpus
        if job.nodes:
            return self._join_bound(job)
        if number > len(self._heap):
            return None
        chosen = [heappop(self._heap) for _ in range(number)]
        for jobs, gpu in chosen:
            self.jobs[gpu] = jobs + 1
            if jobs + 1 < self._threshold:
                heappush(self._heap, (jobs + 1, gpu))
        return tuple(sorted(gpu for _, gpu in chosen))

    def _join_bound(self, job: Job) -> tuple[int, ...] | None:
        """Join the shortest queues of the allowed node where these are shortest."""
        of_node: dict[str, list[tuple[int, int]]] = {node: [] for node in job.nodes}
        where = self._snapshot.node_of
        for jobs, gpu in sorted(self._heap):
            if where[gpu] in of_node:
                of_node[where[gpu]].append((jobs, gpu))
        heads = [gpus[: job.min_gpus] for gpus in of_node.values() if len(gpus) >= job.min_gpus]
        if not heads:
            return None
        chosen = min(heads)
        for jobs, gpu in chosen:
            self.jobs[gpu] = jobs + 1
        self._rebuild_heap()
        return tuple(sorted(gpu for _, gpu in chosen))


def place(snapshot: Snapshot, memory: GpuQueues, threshold: int) -> Places:
    """Return the queues in which each job stands now: Hermes, Algorithm 1.

    Open jobs stay where they run, else where the memory has them, else join the least loaded
    queue that is not full. Then pending jobs join the queues; a job that finds all full has no
    place. Pending jobs are placed again each time, so that a sweep that arrives later is not
    behind another's whole queue (a choice).
    """
    places = _remembered(snapshot, memory)
    loads = Loads(snapshot, places, threshold)
    if loads.has_room:
        _place_open(snapshot, places, loads)
        _place_pending(snapshot, places, loads, threshold)
    return places


def _remembered(snapshot: Snapshot, memory: GpuQueues) -> Places:
    indices = {gpu.index for gpu in snapshot.gpus}
    places = dict(snapshot.held)
    jobs = snapshot.index
    for job_id, gpus in memory.places:
        job = None if job_id in places else jobs.get(job_id)
        if job is None or not job.is_open or len(gpus) != job.min_gpus:
            continue
        if indices.issuperset(gpus) and on_allowed_node(snapshot, job, gpus):
            places[job_id] = tuple(sorted(gpus))
    return places


def _place_open(snapshot: Snapshot, places: Places, loads: Loads) -> None:
    waiting = (j for j in snapshot.queue if j.phase is Phase.WAITING and j.id not in places)
    others = (*snapshot.holding, *snapshot.others)
    lost = by_submission(j for j in others if j.is_open and j.id not in places)
    for job in merge(waiting, lost, key=submission):
        if not loads.has_room:
            return
        gpus = loads.join(job)
        if gpus is not None:
            places[job.id] = gpus


def open_job_count(snapshot: Snapshot) -> int:
    """Return the number of open jobs; those whose nodes have left the pool do not count (ours)."""
    return sum(job.is_open and not unplaceable(snapshot, job) for job in snapshot.jobs)


def _place_pending(snapshot: Snapshot, places: Places, loads: Loads, threshold: int) -> None:
    """Place pending jobs in the order of `FairShareOrder`, at most up to threshold x GPUs jobs.

    That bound is checked on its own: a queue may be over the threshold when another has room
    (jobs change queues, GPUs leave).
    """
    shares = FairShareOrder(snapshot)
    left = threshold * len(loads.jobs) - (open_job_count(snapshot) if shares else 0)
    while shares and left > 0 and loads.has_room:
        job = shares.pop()
        gpus = loads.join(job)
        if gpus is not None:
            places[job.id] = gpus
            shares.count(job)
            left -= 1


class FairShareOrder:
    """The pending jobs, next first: of the sweep with the smallest (open jobs + 1) / weight.

    Ties go to the sweep whose next trial was submitted first, then to the lower id. Within a sweep
    trials come in the order of submission, then of their numbers.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._lines: dict[SweepId, deque[Job]] = {}
        for job in snapshot.queue:
            if job.phase is Phase.PENDING:
                self._lines.setdefault(job.sweep, deque()).append(job)
        opened = (j.sweep for j in snapshot.jobs if j.is_open) if self._lines else ()
        self._open: Counter[SweepId] = Counter(opened)
        self._heap = [(self._key(sweep), sweep) for sweep in self._lines]
        heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._lines)

    def pop(self) -> Job:
        """Remove the next job from its sweep's line and return it."""
        key, sweep = heappop(self._heap)
        while sweep not in self._lines or key != self._key(sweep):  # it has had another key since
            key, sweep = heappop(self._heap)
        line = self._lines[sweep]
        job = line.popleft()
        if not line:
            del self._lines[sweep]
        self._push(sweep)
        return job

    def count(self, job: Job) -> None:
        """Count the job as open: its sweep's next one comes later."""
        self._open[job.sweep] += 1
        self._push(job.sweep)

    def _push(self, sweep: SweepId) -> None:
        if sweep in self._lines:
            heappush(self._heap, (self._key(sweep), sweep))

    def _key(self, sweep: SweepId) -> tuple[float, SubmissionKey]:
        job = self._lines[sweep][0]
        return ((self._open[sweep] + 1) / job.weight, submission(job))

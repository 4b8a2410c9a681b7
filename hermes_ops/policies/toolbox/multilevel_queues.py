"""Queues by attained service, kept in order from decision to decision (Tiresias, NSDI 2019).

A textbook version (section 3.2: put each job in the queue of its attained service, sort, serve)
visits all jobs at each decision. On the first 20,000 jobs of `bench trace`, with 435 jobs at a
decision on average, it takes 2.5 times as long as this one (24 s of CPU, not 9), and `bench trace`
would miss its target. So the queues are kept between decisions. A decision costs set operations in
C, work for the jobs that hold GPUs, and work for what changed; waiting jobs are not visited one by
one. Changes since the last decision are found by comparison with the snapshot; where that is not
conclusive the queues are rebuilt.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import inf
from operator import attrgetter

from hermes_ops.core.model import QUEUED_PHASES, Job, JobId, Phase, Snapshot
from hermes_ops.core.nodes import NodeCapacity
from hermes_ops.core.order import by_submission, submission

SLACK_GPU_S = 1e-3  # a limit counts as reached this little before it: times are floats
TRUSTED_DECISIONS = 64  # decisions without a full comparison, while the counts agree
_PREEMPTIBLE = attrgetter("preemptible")

Crossing = tuple[float, int, JobId]
"""When a job that holds GPUs reaches its queue's limit (inf: never), its queue, its id."""

Queue = tuple[JobId, ...]


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of the promotion knob: when a job first ran since its service was reset."""

    job: JobId
    ran_at_s: float  # inf: not since the reset
    reset_gpu_s: float  # its service at the reset; 0 if there was none


@dataclass(frozen=True, slots=True)
class QueuesMemory:
    """The queues, highest priority first: in each the jobs that run, then those that wait.

    `newest_s` is the latest submission seen, `trusted` the decisions since the last full look.
    """

    running: tuple[Queue, ...] = ()
    waiting: tuple[Queue, ...] = ()
    crossings: tuple[Crossing, ...] = ()
    clocks: tuple[Clock, ...] = ()
    newest_s: float = -inf
    trusted: int = 0


class MultilevelQueues:
    """The queues of one decision: a memory brought up to date with a snapshot, then served.

    `limits` says at how many GPU-seconds each queue ends but the last. `keep_place`: a job that
    starts keeps its place instead of passing those of its queue that wait. `in_time`: jobs that
    are demoted in the same decision enter their queue in the order in which they reached the
    limit, as if each had been demoted then; else in the order of their submission.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        memory: QueuesMemory,
        limits: tuple[float, ...],
        *,
        keep_place: bool = False,
        promote_knob: float | None = None,
        in_time: bool = False,
    ) -> None:
        self.snapshot = snapshot
        self.limits = limits
        self.keep_place = keep_place
        self._knob = promote_knob
        self._in_time = in_time
        if len(memory.running) != len(limits) + 1 or len(memory.waiting) != len(limits) + 1:
            empty: tuple[Queue, ...] = ((),) * (len(limits) + 1)
            memory = QueuesMemory(empty, empty)
        self.running = list(memory.running)
        self.waiting = list(memory.waiting)
        self.crossings: list[Crossing] = []
        self.clocks = {clock.job: clock for clock in memory.clocks}
        self._newest_s = memory.newest_s
        self._trusted = memory.trusted + 1
        self._update(memory.crossings)

    # -- bringing up to date

    def _update(self, before: tuple[Crossing, ...]) -> None:
        held = self.snapshot.held
        still = [crossing for crossing in before if crossing[2] in held]
        if len(still) < len(before):
            self._leave([crossing for crossing in before if crossing[2] not in held])
        if not self._arrive():
            self._rebuild()
        due = bisect_right(still, (self.snapshot.time_s, len(self.running), JobId("")))
        self.crossings = still[due:]
        for _, level, job_id in still[:due] if due < 2 else self._in_order(still[:due]):
            self._demote(level, job_id)
        if len(self.crossings) != len(held):
            self._adopt()
        if self._knob is not None:
            self._promote()

    def attained_gpu_s(self, job: Job) -> float:
        """Return the service since the last promotion, or since the beginning."""
        clock = self.clocks.get(job.id)
        attained = job.attained_gpu_s(self.snapshot.time_s)
        return attained - clock.reset_gpu_s if clock else attained

    def level_of(self, job: Job) -> int:
        """Return the queue in which the job belongs by its service."""
        attained = self.attained_gpu_s(job) + SLACK_GPU_S
        return bisect_right(self.limits, attained)

    def _in_order(self, crossings: list[Crossing]) -> list[Crossing]:
        index = self.snapshot.index
        if self._in_time:
            return sorted(crossings, key=lambda c: (c[0], submission(index[c[2]])))
        return sorted(crossings, key=lambda c: submission(index[c[2]]))

    def _leave(self, gone: list[Crossing]) -> None:
        """Put jobs that lost their GPUs first in their queue; drop those that ended."""
        of_level: dict[int, list[JobId]] = {}
        for _, level, job_id in gone:
            of_level.setdefault(level, []).append(job_id)
        for level, job_ids in of_level.items():
            ended = {job_id for job_id in job_ids if self._has_ended(job_id)}
            runs = set(self.running[level])
            stopped = [job_id for job_id in job_ids if job_id in runs and job_id not in ended]
            out = ended.union(stopped)
            self.running[level] = tuple([job for job in self.running[level] if job not in out])
            waits = [job for job in self.waiting[level] if job not in out]
            self.waiting[level] = (*stopped, *waits)
            for job_id in ended:
                self.clocks.pop(job_id, None)

    def _has_ended(self, job_id: JobId) -> bool:
        job = self.snapshot.index.get(job_id)
        return job is None or job.phase is Phase.ENDED

    def _drop(self, level: int, job: JobId) -> None:
        """Remove the job from the queue."""
        for queues in (self.running, self.waiting):
            queue = queues[level]
            if job in queue:
                at = queue.index(job)
                queues[level] = queue[:at] + queue[at + 1 :]

    def _arrive(self) -> bool:
        """Add the new jobs; return False when the memory and the snapshot disagree."""
        snapshot = self.snapshot
        stopping = sum(job.phase is Phase.STOPPING for job in snapshot.others)
        alive = len(snapshot.holding) + len(snapshot.queue) + stopping
        new = alive - sum(map(len, self.running)) - sum(map(len, self.waiting))
        if new < 0 or self._trusted > TRUSTED_DECISIONS:
            return False
        queue = snapshot.queue
        after = sum(job.submitted_s > self._newest_s for job in queue[len(queue) - new - 1 :])
        if new != after:
            return False
        if not new:
            return True
        arrived = tuple(job.id for job in queue[len(queue) - new :])
        if not set(arrived).isdisjoint(chain(*self.running, *self.waiting)):
            return False  # the memory is of other submissions
        self.waiting[0] += arrived
        self._newest_s = queue[-1].submitted_s
        return True

    def _rebuild(self) -> None:
        """Compare every job: drop jobs that are gone, add missing ones, first submitted first."""
        alive = [job for job in self.snapshot.jobs if job.phase is not Phase.ENDED]
        ids = {job.id for job in alive}
        for queues in (self.running, self.waiting):
            queues[:] = [tuple(job for job in queue if job in ids) for queue in queues]
        queued = set(chain(*self.running, *self.waiting))
        added: list[list[JobId]] = [[] for _ in self.waiting]
        for job in by_submission([job for job in alive if job.id not in queued]):
            added[self.level_of(job)].append(job.id)
        self.waiting = [
            queue + tuple(more) for queue, more in zip(self.waiting, added, strict=True)
        ]
        self.clocks = {job: clock for job, clock in self.clocks.items() if job in ids}
        self._newest_s = max((job.submitted_s for job in alive), default=self._newest_s)
        self._trusted = 0

    def _demote(self, level: int, job_id: JobId) -> None:
        """Move a job with GPUs that has reached the limit, unless its measured service has not."""
        job = self.snapshot.index[job_id]
        now_in = max(level, self.level_of(job))
        if now_in > level:
            self.relegate(level, job_id, now_in)
        insort(self.crossings, self.crossing(job, now_in))

    def _adopt(self) -> None:
        """Compute the crossing of jobs with GPUs that have none yet.

        One that this policy would have stopped, and that kept its GPUs, may be past the limit.
        """
        held, index = self.snapshot.held, self.snapshot.index
        timed = {crossing[2] for crossing in self.crossings}
        level_of = {job: n for n, queue in enumerate(self.waiting) for job in queue if job in held}
        level_of |= {job: n for n, queue in enumerate(self.running) for job in queue if job in held}
        if len(level_of) < len(held):
            self._rebuild()
            self._adopt()
            return
        for job in by_submission(index[job_id] for job_id in held.keys() - timed):
            self._demote(level_of[job.id], job.id)

    def relegate(self, level: int, job: JobId, belongs: int) -> None:
        """Put a waiting job last in a lower queue."""
        self._drop(level, job)
        self.waiting[belongs] += (job,)

    def crossing(self, job: Job, level: int) -> Crossing:
        """Return when the job, holding GPUs from now on, leaves this queue."""
        if level == len(self.limits):
            return (inf, level, job.id)
        left_gpu_s = max(self.limits[level] - self.attained_gpu_s(job), SLACK_GPU_S)
        return (self.snapshot.time_s + left_gpu_s / self._size(job), level, job.id)

    def _size(self, job: Job) -> int:
        return len(self.snapshot.held.get(job.id, ())) or job.min_gpus

    # -- promotion

    def waited_s(self, job: Job) -> float:
        """Return the seconds that it has waited since it first ran after its last reset."""
        clock = self.clocks.get(job.id)
        if clock is None or clock.ran_at_s == inf:
            return 0.0
        ran_s = self.attained_gpu_s(job) / job.min_gpus
        return max(0.0, self.snapshot.time_s - clock.ran_at_s - ran_s)

    def _overdue_s(self, job: Job) -> float:
        """Return by how much its waiting exceeds the knob's bound; negative: the time left."""
        assert self._knob is not None
        return self.waited_s(job) - self._knob * self.attained_gpu_s(job) / job.min_gpus

    def _patient(self) -> Iterable[Job]:
        """Yield the waiting jobs below the first queue that have run since their last reset."""
        running = {crossing[2] for crossing in self.crossings}
        for job_id in chain(*self.waiting[1:]):
            clock = self.clocks.get(job_id)
            runs = clock is None or clock.ran_at_s == inf or job_id in running
            if not runs and job_id in self.snapshot.index:
                yield self.snapshot.index[job_id]

    def _promote(self) -> None:
        """Put the jobs that have waited `promote_knob` times as long as they ran on top."""
        for job in by_submission(j for j in self._patient() if self._overdue_s(j) >= -1e-6):
            for level in range(1, len(self.waiting)):
                self._drop(level, job.id)
            self.waiting[0] += (job.id,)
            attained = job.attained_gpu_s(self.snapshot.time_s)
            self.clocks[job.id] = Clock(job.id, inf, attained)

    def waiting_jobs(self) -> Iterator[JobId]:
        """Return the waiting jobs, first served first."""
        remaining = chain.from_iterable(self.waiting)
        if not self.keep_place:
            return remaining
        running = {crossing[2] for crossing in self.crossings}
        return (job for job in remaining if job not in running)

    @property
    def somebody_waits(self) -> bool:
        """True when not all jobs have GPUs."""
        return sum(map(len, chain(self.running, self.waiting))) > len(self.crossings)

    def next_demotion_s(self) -> float:
        """Return when the next running job leaves its queue; inf: none does."""
        return self.crossings[0][0] if self.crossings else inf

    def next_promotion_s(self) -> float:
        """Return when the next waiting job is promoted, if it still waits; inf: none."""
        if self._knob is None:
            return inf
        soonest_s = min((-self._overdue_s(job) for job in self._patient()), default=inf)
        return self.snapshot.time_s + max(soonest_s, 0.0)

    # -- serving

    def serve(self, banned: frozenset[JobId] = frozenset(), bound: bool = False) -> QueueService:
        """Serve the queues in order, in each the running jobs first, each job that still fits.

        Jobs that must not be stopped keep their GPUs. `banned` jobs are not started. `bound`: GPUs
        are counted by node, as some job may run on some nodes only.
        """
        service = QueueService(self, banned, bound)
        for level in range(len(self.running)):
            service.keep(self.running[level])
            if service.left or service.unplaced:
                service.start(level, self.waiting[level])
        if service.stale:
            self._rebuild()
            return self.serve(banned, bound)
        return self.serve(banned, bound=True) if service.bound else service

    def after(self, service: QueueService) -> QueuesMemory:
        """Return the memory after this service; starting jobs pass waiting ones of their queue."""
        if service.stopped:
            self._step_back(service.stopped)
        if not self.keep_place:
            self._step_forward(service.moves)
        for level, job in service.starts:
            insort(self.crossings, self.crossing(job, level))
        if self._knob is not None:
            self._start_clocks(service.starts)
        return QueuesMemory(
            tuple(self.running),
            tuple(self.waiting),
            tuple(self.crossings),
            tuple(self.clocks.values()),
            self._newest_s,
            self._trusted,
        )

    def _step_back(self, stopped: set[JobId]) -> None:
        self.crossings = [c for c in self.crossings if c[2] not in stopped]
        for level, queue in enumerate(self.running):
            if not stopped.isdisjoint(queue):
                back = tuple(job for job in queue if job in stopped)
                self.running[level] = tuple(job for job in queue if job not in stopped)
                self.waiting[level] = back + self.waiting[level]

    def _step_forward(self, moves: list[tuple[int, JobId]]) -> None:
        for level in {level for level, _ in moves}:
            moved = tuple(job for at, job in moves if at == level)
            if len(moved) == 1:
                self._drop(level, moved[0])
            else:
                gone = set(moved)
                self.waiting[level] = tuple(job for job in self.waiting[level] if job not in gone)
            self.running[level] += moved

    def _start_clocks(self, starts: Iterable[tuple[int, Job]]) -> None:
        for _, job in starts:
            clock = self.clocks.get(job.id)
            if clock is None or clock.ran_at_s == inf:
                reset_gpu_s = clock.reset_gpu_s if clock else 0.0
                self.clocks[job.id] = Clock(job.id, self.snapshot.time_s, reset_gpu_s)


class QueueService:
    """The jobs that are served, collected queue by queue.

    `stopped` lose their GPUs, `starts` get some, `moves` pass those of their queue that wait;
    `left` GPUs are not given out yet, `unplaced` running jobs have not been reached yet. `capacity`
    counts them by node, once it is known that a job that waits is `bound` to some nodes.
    """

    def __init__(
        self, queues: MultilevelQueues, banned: frozenset[JobId], bound: bool = False
    ) -> None:
        snapshot = queues.snapshot
        self._queues = queues
        self._banned = banned
        self._held: Mapping[JobId, tuple[int, ...]] = snapshot.held
        pinned: list[JobId] = []
        if not all(map(_PREEMPTIBLE, snapshot.holding)):  # quick: most often all are
            pinned = [j.id for j in snapshot.holding if not j.preemptible and j.id in self._held]
        self._pinned = set(pinned)
        self.stopped: set[JobId] = set()
        self.moves: list[tuple[int, JobId]] = []
        self.starts: list[tuple[int, Job]] = []
        self.stale = False  # a job of the queues is not in the snapshot
        self.bound = False  # a job that is bound to some nodes was reached, and nodes not counted
        self.capacity: NodeCapacity | None = None
        if bound:
            self.capacity = NodeCapacity(snapshot, (snapshot.retained[job] for job in pinned))
        self.left = len(snapshot.gpus) - sum([len(self._held[job]) for job in pinned])
        self.unplaced = len(self._held)

    def keep(self, queue: Queue) -> None:
        """Serve the running jobs of a queue."""
        if not queue:
            return
        held = self._held
        self.unplaced -= len(queue)
        if not self._pinned and self.capacity is None:
            wanted = sum(map(len, map(held.__getitem__, queue)))
            if wanted <= self.left:
                self.left -= wanted
                return
        for job_id in queue:
            self._keep(job_id, held[job_id])

    def _keep(self, job_id: JobId, gpus: tuple[int, ...]) -> bool:
        if job_id in self._pinned:
            return True
        if len(gpus) > self.left or (self.capacity is not None and not self.capacity.reserve(gpus)):
            self.stopped.add(job_id)
            return False
        self.left -= len(gpus)
        return True

    def start(self, level: int, queue: Queue) -> None:
        """Serve the waiting jobs of a queue, and running ones that stand among them."""
        late: list[tuple[JobId, int]] = []
        remaining = iter(queue)
        if self.unplaced:
            self._start_among_running(level, remaining, late)
        left = self.left
        if left:
            for job in map(self._queues.snapshot.index.get, remaining):
                if job is None or job.min_gpus <= left:
                    self._begin(level, job, late)
                    left = self.left
                    if not left:
                        break
        for job_id, belongs in late:
            self._queues.relegate(level, job_id, belongs)

    def _start_among_running(
        self, level: int, remaining: Iterator[JobId], late: list[tuple[JobId, int]]
    ) -> None:
        """Serve the queue until all running jobs were reached."""
        held, index = self._held, self._queues.snapshot.index
        for job_id in remaining:
            if job_id in held:
                self.unplaced -= 1
                if self._keep(job_id, held[job_id]):
                    self.moves.append((level, job_id))
                if not self.unplaced:
                    return
            elif self.left:
                job = index.get(job_id)
                if job is None or job.min_gpus <= self.left:
                    self._begin(level, job, late)

    def _begin(self, level: int, job: Job | None, late: list[tuple[JobId, int]]) -> None:
        if job is None or job.phase is Phase.ENDED:
            self.stale = True
        elif job.phase in QUEUED_PHASES and job.id not in self._banned:
            belongs = self._queues.level_of(job)
            if belongs > level:  # it went on while it wrote its checkpoint
                late.append((job.id, belongs))
                return
            if job.nodes and not self._bind(job):
                return
            self.left -= job.min_gpus
            self.starts.append((level, job))
            self.moves.append((level, job.id))

    def _bind(self, job: Job) -> bool:
        """Promise the job GPUs of one of its nodes; False without room, or if not counted yet."""
        if self.capacity is None:
            self.bound = True
            return False
        return self.capacity.promise(job)

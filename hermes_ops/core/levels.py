"""Queues by attained service, kept in order from decision to decision (Tiresias, NSDI 2019).

A decision costs set operations in C, work for the jobs that hold GPUs, and work for what changed:
waiting jobs are not looked at one by one. What has changed since the memory was written is found
by comparison with the snapshot; where that is not conclusive the queues are rebuilt.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import inf

from hermes_ops.core.model import Job, JobId, Phase, Snapshot
from hermes_ops.core.order import by_submission, submission
from hermes_ops.core.service import Service

SLACK_GPU_S = 1e-3  # a limit counts as reached so little before it: clocks are floats
TRUSTED_DECISIONS = 64  # so often the memory is believed where counts agree, then compared whole

Crossing = tuple[float, int, JobId]
"""When a job that holds GPUs reaches its queue's limit (inf: never), its queue, its id."""

Lane = tuple[JobId, ...]


@dataclass(frozen=True, slots=True)
class Clock:
    """What the promotion knob knows of a job: when it first ran since its service was reset."""

    job: JobId
    ran_at_s: float  # inf: not since the reset
    reset_gpu_s: float  # its service at the reset; 0 if there was none


@dataclass(frozen=True, slots=True)
class Levels:
    """The queues, highest priority first: in each the jobs that run, then those that wait.

    `newest_s` is the latest submission seen, `trusted` the decisions since the last full look.
    """

    runs: tuple[Lane, ...] = ()
    waits: tuple[Lane, ...] = ()
    crossings: tuple[Crossing, ...] = ()
    clocks: tuple[Clock, ...] = ()
    newest_s: float = -inf
    trusted: int = 0


class Queues:
    """The queues of one decision: a memory brought up to date with a snapshot, then served.

    `limits` says at how many GPU-seconds each queue ends but the last. `keep_place`: a job that
    starts keeps its place instead of passing those of its queue that wait.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        memory: Levels,
        limits: tuple[float, ...],
        *,
        keep_place: bool = False,
        promote_knob: float | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.limits = limits
        self.keep_place = keep_place
        self._knob = promote_knob
        if len(memory.runs) != len(limits) + 1 or len(memory.waits) != len(limits) + 1:
            empty: tuple[Lane, ...] = ((),) * (len(limits) + 1)
            memory = Levels(empty, empty)
        self.runs = list(memory.runs)
        self.waits = list(memory.waits)
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
        due = bisect_right(still, (self.snapshot.time_s, len(self.runs), JobId("")))
        self.crossings = still[due:]
        for crossing in still[:due] if due < 2 else self._in_order(still[:due]):
            self._demote(crossing)
        if len(self.crossings) != len(held):
            self._adopt()
        if self._knob is not None:
            self._promote()

    def attained_gpu_s(self, job: Job) -> float:
        """The service that counts: since the last promotion, if there was one."""
        clock = self.clocks.get(job.id)
        attained = job.attained_gpu_s(self.snapshot.time_s)
        return attained - clock.reset_gpu_s if clock else attained

    def level_of(self, job: Job) -> int:
        """The queue in which the job belongs by its service."""
        attained = self.attained_gpu_s(job) + SLACK_GPU_S
        return bisect_right(self.limits, attained)

    def _in_order(self, crossings: list[Crossing]) -> list[Crossing]:
        index = self.snapshot.index
        return sorted(crossings, key=lambda c: submission(index[c[2]]))

    def _leave(self, gone: list[Crossing]) -> None:
        """Jobs that have lost their GPUs wait, first in their queue; those that ended are out."""
        for _, level, job_id in reversed(gone):
            job = self.snapshot.index.get(job_id)
            ended = job is None or job.phase is Phase.ENDED
            if ended:
                self._drop(level, job_id)
                self.clocks.pop(job_id, None)
            elif job_id in self.runs[level]:
                self._drop(level, job_id)
                self.waits[level] = (job_id, *self.waits[level])

    def _drop(self, level: int, job: JobId) -> None:
        """Take the job out of the queue, wherever it stands there."""
        for lanes in (self.runs, self.waits):
            lane = lanes[level]
            if job in lane:
                at = lane.index(job)
                lanes[level] = lane[:at] + lane[at + 1 :]

    def _arrive(self) -> bool:
        """Take in the jobs that are new; False when the memory and the snapshot disagree."""
        snapshot = self.snapshot
        stopping = sum(job.phase is Phase.STOPPING for job in snapshot.others)
        alive = len(snapshot.holding) + len(snapshot.queue) + stopping
        new = alive - sum(map(len, self.runs)) - sum(map(len, self.waits))
        if new < 0 or self._trusted > TRUSTED_DECISIONS:
            return False
        queue = snapshot.queue
        after = sum(job.submitted_s > self._newest_s for job in queue[len(queue) - new - 1 :])
        if new != after:
            return False
        if new:
            self.waits[0] += tuple(job.id for job in queue[len(queue) - new :])
            self._newest_s = queue[-1].submitted_s
        return True

    def _rebuild(self) -> None:
        """Compare every job: drop who is gone, add who is missing, first submitted first."""
        alive = [job for job in self.snapshot.jobs if job.phase is not Phase.ENDED]
        ids = {job.id for job in alive}
        for lanes in (self.runs, self.waits):
            lanes[:] = [tuple(job for job in lane if job in ids) for lane in lanes]
        known = set(chain(*self.runs, *self.waits))
        added: list[list[JobId]] = [[] for _ in self.waits]
        for job in by_submission(job for job in alive if job.id not in known):
            added[self.level_of(job)].append(job.id)
        self.waits = [lane + tuple(more) for lane, more in zip(self.waits, added, strict=True)]
        self.clocks = {job: clock for job, clock in self.clocks.items() if job in ids}
        self._newest_s = max((job.submitted_s for job in alive), default=self._newest_s)
        self._trusted = 0

    def _demote(self, crossing: Crossing) -> None:
        """The job has reached the limit (or, by a measured service, not yet)."""
        _, level, job_id = crossing
        job = self.snapshot.index[job_id]
        now_in = max(level, self.level_of(job))
        if now_in > level:
            self.relegate(level, job_id, now_in)
        insort(self.crossings, self.crossing(job, now_in))

    def _adopt(self) -> None:
        """Time the jobs that have GPUs and of which that was not known; forget a second entry."""
        held, index = self.snapshot.held, self.snapshot.index
        timed = {crossing[2] for crossing in self.crossings}
        level_of = {job: n for n, lane in enumerate(self.waits) for job in lane if job in held}
        level_of |= {job: n for n, lane in enumerate(self.runs) for job in lane if job in held}
        if len(level_of) < len(held):
            self._rebuild()
            self._adopt()
            return
        for job in by_submission(index[job_id] for job_id in held.keys() - timed):
            insort(self.crossings, self.crossing(job, level_of[job.id]))

    def relegate(self, level: int, job: JobId, belongs: int) -> None:
        """Put a waiting job last in a lower queue."""
        self._drop(level, job)
        self.waits[belongs] += (job,)

    def crossing(self, job: Job, level: int) -> Crossing:
        """When the job, holding GPUs from now on, leaves this queue."""
        if level == len(self.limits):
            return (inf, level, job.id)
        left_gpu_s = max(self.limits[level] - self.attained_gpu_s(job), SLACK_GPU_S)
        return (self.snapshot.time_s + left_gpu_s / self._size(job), level, job.id)

    def _size(self, job: Job) -> int:
        return len(self.snapshot.held.get(job.id, ())) or job.min_gpus

    # -- promotion

    def waited_s(self, job: Job) -> float:
        """Seconds it has waited since it first ran after its last reset; 0 before that."""
        clock = self.clocks.get(job.id)
        if clock is None or clock.ran_at_s == inf:
            return 0.0
        ran_s = self.attained_gpu_s(job) / job.min_gpus
        return max(0.0, self.snapshot.time_s - clock.ran_at_s - ran_s)

    def _overdue_s(self, job: Job) -> float:
        """By how much its waiting exceeds the knob's bound; negative: so long it still has."""
        assert self._knob is not None
        return self.waited_s(job) - self._knob * self.attained_gpu_s(job) / job.min_gpus

    def _patient(self) -> Iterable[Job]:
        """The waiting jobs below the first queue that have run since their last reset."""
        running = {crossing[2] for crossing in self.crossings}
        for job_id in chain(*self.waits[1:]):
            clock = self.clocks.get(job_id)
            runs = clock is None or clock.ran_at_s == inf or job_id in running
            if not runs and job_id in self.snapshot.index:
                yield self.snapshot.index[job_id]

    def _promote(self) -> None:
        """Put the jobs that have waited `promote_knob` times as long as they ran on top."""
        for job in by_submission(j for j in self._patient() if self._overdue_s(j) >= -1e-6):
            for level in range(1, len(self.waits)):
                self._drop(level, job.id)
            self.waits[0] += (job.id,)
            attained = job.attained_gpu_s(self.snapshot.time_s)
            self.clocks[job.id] = Clock(job.id, inf, attained)

    def waiting(self) -> Iterator[JobId]:
        """Who waits, first served first."""
        line = chain.from_iterable(self.waits)
        if not self.keep_place:
            return line
        running = {crossing[2] for crossing in self.crossings}
        return (job for job in line if job not in running)

    @property
    def somebody_waits(self) -> bool:
        """True when not all jobs have GPUs."""
        return sum(map(len, chain(self.runs, self.waits))) > len(self.crossings)

    def next_demotion_s(self) -> float:
        """When the next running job leaves its queue; inf: none does."""
        return self.crossings[0][0] if self.crossings else inf

    def next_promotion_s(self) -> float:
        """When the next waiting job is promoted, if it still waits; inf: none."""
        if self._knob is None:
            return inf
        soonest_s = min((-self._overdue_s(job) for job in self._patient()), default=inf)
        return self.snapshot.time_s + max(soonest_s, 0.0)

    # -- serving

    def serve(self, banned: frozenset[JobId] = frozenset(), bound: bool = False) -> Service:
        """Who runs: the queues in order, in each those that run first, each job that still fits.

        Jobs that must not be stopped keep their GPUs. `banned` jobs are not started. `bound`: GPUs
        are counted by node, as some job may run on some nodes only.
        """
        service = Service(self, banned, bound)
        for level in range(len(self.runs)):
            service.keep(self.runs[level])
            if service.left or service.unplaced:
                service.start(level, self.waits[level])
        if service.stale:
            self._rebuild()
            return self.serve(banned, bound)
        return self.serve(banned, bound=True) if service.bound else service

    def after(self, service: Service) -> Levels:
        """The memory once this is done: who starts passes those of his queue that wait."""
        if service.stopped:
            self._step_back(service.stopped)
        if not self.keep_place:
            self._step_forward(service.moves)
        for level, job in service.starts:
            insort(self.crossings, self.crossing(job, level))
        if self._knob is not None:
            self._start_clocks(service.starts)
        return Levels(
            tuple(self.runs),
            tuple(self.waits),
            tuple(self.crossings),
            tuple(self.clocks.values()),
            self._newest_s,
            self._trusted,
        )

    def _step_back(self, stopped: set[JobId]) -> None:
        self.crossings = [c for c in self.crossings if c[2] not in stopped]
        for level, lane in enumerate(self.runs):
            if not stopped.isdisjoint(lane):
                back = tuple(job for job in lane if job in stopped)
                self.runs[level] = tuple(job for job in lane if job not in stopped)
                self.waits[level] = back + self.waits[level]

    def _step_forward(self, moves: list[tuple[int, JobId]]) -> None:
        for level in {level for level, _ in moves}:
            moved = tuple(job for at, job in moves if at == level)
            if len(moved) == 1:
                self._drop(level, moved[0])
            else:
                gone = set(moved)
                self.waits[level] = tuple(job for job in self.waits[level] if job not in gone)
            self.runs[level] += moved

    def _start_clocks(self, starts: Iterable[tuple[int, Job]]) -> None:
        for _, job in starts:
            clock = self.clocks.get(job.id)
            if clock is None or clock.ran_at_s == inf:
                reset_gpu_s = clock.reset_gpu_s if clock else 0.0
                self.clocks[job.id] = Clock(job.id, self.snapshot.time_s, reset_gpu_s)

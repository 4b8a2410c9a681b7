"""Reading queues from the top: who stays, who starts, who is stopped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

from hermes_ops.core.model import QUEUED_PHASES, Job, JobId, Phase
from hermes_ops.core.nodes import Rooms

if TYPE_CHECKING:
    from hermes_ops.core.levels import Lane, Queues

_PREEMPTIBLE = attrgetter("preemptible")


class Service:
    """Who is served, while the queues are read.

    `stopped` lose their GPUs, `starts` get some, `moves` pass those of their queue that wait;
    `left` GPUs are not given out yet, `unplaced` running jobs have not been reached yet. `rooms`
    counts them by node, once it is known that a job that waits is `bound` to some nodes.
    """

    def __init__(self, queues: Queues, banned: frozenset[JobId], bound: bool = False) -> None:
        snapshot = queues.snapshot
        self._queues = queues
        self._banned = banned
        self._held: Mapping[JobId, tuple[int, ...]] = snapshot.held
        firm: list[JobId] = []
        if not all(map(_PREEMPTIBLE, snapshot.holding)):  # quick: most often all are
            firm = [j.id for j in snapshot.holding if not j.preemptible and j.id in self._held]
        self._firm = set(firm)
        self.stopped: set[JobId] = set()
        self.moves: list[tuple[int, JobId]] = []
        self.starts: list[tuple[int, Job]] = []
        self.stale = False  # a job of the queues is not in the snapshot
        self.bound = False  # a job that is bound to some nodes was reached, and nodes not counted
        self.rooms: Rooms | None = None
        if bound:
            self.rooms = Rooms(snapshot, (snapshot.stays[job] for job in firm))
        self.left = len(snapshot.gpus) - sum([len(self._held[job]) for job in firm])
        self.unplaced = len(self._held)

    def keep(self, lane: Lane) -> None:
        """Serve jobs that run in their place."""
        if not lane:
            return
        held = self._held
        self.unplaced -= len(lane)
        if not self._firm and self.rooms is None:
            wanted = sum(map(len, map(held.__getitem__, lane)))
            if wanted <= self.left:
                self.left -= wanted
                return
        for job_id in lane:
            self._keep(job_id, held[job_id])

    def _keep(self, job_id: JobId, gpus: tuple[int, ...]) -> bool:
        if job_id in self._firm:
            return True
        if len(gpus) > self.left or (self.rooms is not None and not self.rooms.stay(gpus)):
            self.stopped.add(job_id)
            return False
        self.left -= len(gpus)
        return True

    def start(self, level: int, lane: Lane) -> None:
        """Serve jobs that wait, or run but stand behind those of their queue that wait."""
        late: list[tuple[JobId, int]] = []
        line = iter(lane)
        if self.unplaced:
            self._start_among_running(level, line, late)
        left = self.left
        if left:
            for job in map(self._queues.snapshot.index.get, line):
                if job is None or job.min_gpus <= left:
                    self._begin(level, job, late)
                    left = self.left
                    if not left:
                        break
        for job_id, belongs in late:
            self._queues.relegate(level, job_id, belongs)

    def _start_among_running(
        self, level: int, line: Iterator[JobId], late: list[tuple[JobId, int]]
    ) -> None:
        """Go on as far as jobs that run may stand in the line."""
        held, index = self._held, self._queues.snapshot.index
        for job_id in line:
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
        """Promise the job GPUs of one of its nodes; False where that has no room, or is unknown."""
        if self.rooms is None:
            self.bound = True
            return False
        return self.rooms.promise(job)

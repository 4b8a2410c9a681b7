"""The snapshots of a simulation, rebuilt only where a job has changed."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from weakref import ref

from hermes_ops.core.model import QUEUED_PHASES, Gpu, Grant, Job, JobId, Phase, Snapshot
from hermes_ops.simulator.simulated_job import SimulatedJob


class SnapshotBuilder:
    """Builds the snapshots that a policy sees; `mark_changed` says which jobs to rebuild.

    Snapshots share the builder's containers: they are copied before a change, copy on write, if the
    jobs of a snapshot that uses them are still referenced.
    """

    def __init__(self) -> None:
        self._holding, self._queue, self._others = RankedJobs(), RankedJobs(), RankedJobs()
        self._queue_of: dict[str, RankedJobs] = defaultdict(RankedJobs)
        self._where: dict[int, RankedJobs] = {}
        self._dirty: dict[int, SimulatedJob] = {}
        self._ended_once: list[SimulatedJob] = []  # ended without a curve: in one snapshot
        self._index: dict[JobId, Job] = {}
        self._retained: dict[JobId, Grant] = {}
        self._held: dict[JobId, tuple[int, ...]] = {}
        self._free = _FreeGpus()
        self._shared_with: list[ref[Sequence[Job]]] = []  # jobs of snapshots with the containers

    def mark_changed(self, job: SimulatedJob) -> None:
        """Mark a job as changed since the last snapshot."""
        self._dirty[job.rank] = job

    def snapshot(self, now_s: float, pool: tuple[Gpu, ...]) -> Snapshot:
        """Return the snapshot at `now_s`."""
        if self._ended_once or self._dirty:
            if any(jobs() is not None for jobs in self._shared_with):
                self._detach()
            self._shared_with = []
            self._update()
        snapshot = Snapshot.prepared(
            now_s,
            pool,
            holding=self._holding.jobs,
            queue=self._queue.jobs,
            others=self._others.jobs,
            queue_of={name: queue.jobs for name, queue in self._queue_of.items() if queue.jobs},
            index=self._index,
            retained=self._retained,
            held=self._held,
            free=self._free.among(pool),
        )
        self._shared_with = [
            *(shared for shared in self._shared_with if shared() is not None),
            ref(snapshot.jobs),
        ]
        return snapshot

    def _detach(self) -> None:
        """Continue with copies of the containers."""
        self._index = self._index.copy()
        self._retained, self._held = self._retained.copy(), self._held.copy()
        for ranked in (self._holding, self._queue, self._others, *self._queue_of.values()):
            ranked.detach()

    def _update(self) -> None:
        for job in self._ended_once:
            self._where.pop(job.rank).drop(job.rank)
            del self._index[job.id]
        self._ended_once = []
        for job in self._dirty.values():
            self._refresh(job)
        self._dirty = {}

    def _refresh(self, job: SimulatedJob) -> None:
        observed = job.to_job()
        self._index[job.id] = observed
        ranked = self._list_of(job.phase)
        held_before = self._held.get(job.id, ())
        if ranked is self._holding and job.grant is not None:
            self._retained[job.id], self._held[job.id] = job.grant, job.grant.gpus
        elif job.id in self._retained:
            del self._retained[job.id], self._held[job.id]
        self._free.move(held_before, self._held.get(job.id, ()))
        before = self._where.get(job.rank)
        if before is not None and before is not ranked:
            before.drop(job.rank)
            if before is self._queue:
                self._queue_of[observed.virtual_cluster].drop(job.rank)
        ranked.put(job.rank, observed)
        if ranked is self._queue:
            self._queue_of[observed.virtual_cluster].put(job.rank, observed)
        self._where[job.rank] = ranked
        if job.phase is Phase.ENDED and not job.work.curve:
            self._ended_once.append(job)

    def _list_of(self, phase: Phase) -> RankedJobs:
        if phase in QUEUED_PHASES:
            return self._queue
        return self._holding if phase in (Phase.STARTING, Phase.RUNNING) else self._others


class _FreeGpus:
    """The GPUs that no job holds, updated incrementally."""

    def __init__(self) -> None:
        self._pool: tuple[Gpu, ...] = ()
        self._indices: frozenset[int] = frozenset()
        self._holders: dict[int, int] = {}  # number of jobs that hold a share of it
        self._free: set[int] = set()

    def move(self, before: tuple[int, ...], now: tuple[int, ...]) -> None:
        """Record that a job holds the GPUs `now`, and held those `before`."""
        if before == now:
            return
        holders = self._holders
        for gpu in now:
            holders[gpu] = holders.get(gpu, 0) + 1
        for gpu in before:
            holders[gpu] -= 1
        self._free.difference_update(now)
        self._free.update(g for g in before if not holders[g] and g in self._indices)

    def among(self, pool: tuple[Gpu, ...]) -> frozenset[int]:
        """Return the free GPUs of this pool."""
        if pool is not self._pool:
            self._pool = pool
            self._indices = frozenset(gpu.index for gpu in pool)
            self._free = {gpu for gpu in self._indices if not self._holders.get(gpu)}
        return frozenset(self._free)


class RankedJobs:
    """Jobs sorted by rank. `jobs` is modified in place: call `detach` before sharing it."""

    def __init__(self) -> None:
        self._ranks: list[int] = []
        self.jobs: list[Job] = []

    def put(self, rank: int, job: Job) -> None:
        """Insert the job at its rank, replacing an earlier version."""
        at = bisect_left(self._ranks, rank)
        if at < len(self._ranks) and self._ranks[at] == rank:
            self.jobs[at] = job
        else:
            self._ranks.insert(at, rank)
            self.jobs.insert(at, job)

    def drop(self, rank: int) -> None:
        """Remove the job of that rank, which must exist."""
        at = bisect_left(self._ranks, rank)
        del self._ranks[at], self.jobs[at]

    def detach(self) -> None:
        """Continue with a copy of `jobs`; the former list never changes again."""
        self.jobs = self.jobs.copy()

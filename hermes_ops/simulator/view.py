"""The snapshots of a simulation, rebuilt only where a job has changed."""

from __future__ import annotations

from weakref import ref

from hermes_ops.core.model import QUEUED_PHASES, Gpu, Grant, Job, JobId, Phase, Snapshot
from hermes_ops.simulator.by_rank import ByRank
from hermes_ops.simulator.lives import Life


class View:
    """What a policy sees, kept up to date by `changed`.

    What a snapshot is given is copied before it changes only if somebody still has the snapshot.
    """

    def __init__(self) -> None:
        self._holding, self._queue, self._others = ByRank(), ByRank(), ByRank()
        self._where: dict[int, ByRank] = {}
        self._dirty: dict[int, Life] = {}
        self._brief: list[Life] = []  # ended without a curve: seen once
        self._index: dict[JobId, Job] = {}
        self._stays: dict[JobId, Grant] = {}
        self._held: dict[JobId, tuple[int, ...]] = {}
        self._free = _Free()
        self._lent: list[ref[Snapshot]] = []  # who was given these very views

    def changed(self, life: Life) -> None:
        """The facts of the job are no longer those that were last seen."""
        self._dirty[life.rank] = life

    def snapshot(self, now_s: float, pool: tuple[Gpu, ...]) -> Snapshot:
        """The pool as it is now."""
        if self._brief or self._dirty:
            if any(snapshot() is not None for snapshot in self._lent):
                self._part()
            self._lent = []
            self._update()
        snapshot = Snapshot.prepared(
            now_s,
            pool,
            holding=self._holding.jobs,
            queue=self._queue.jobs,
            others=self._others.jobs,
            index=self._index,
            stays=self._stays,
            held=self._held,
            free=self._free.among(pool),
        )
        self._lent = [*(lent for lent in self._lent if lent() is not None), ref(snapshot)]
        return snapshot

    def _part(self) -> None:
        """Go on with copies."""
        self._index = self._index.copy()
        self._stays, self._held = self._stays.copy(), self._held.copy()
        for line in (self._holding, self._queue, self._others):
            line.part()

    def _update(self) -> None:
        for life in self._brief:
            self._where.pop(life.rank).drop(life.rank)
            del self._index[life.id]
        self._brief = []
        for life in self._dirty.values():
            self._refresh(life)
        self._dirty = {}

    def _refresh(self, life: Life) -> None:
        job = life.fact()
        self._index[life.id] = job
        line = self._line(life.phase)
        held_before = self._held.get(life.id, ())
        if line is self._holding and life.grant is not None:
            self._stays[life.id], self._held[life.id] = life.grant, life.grant.gpus
        elif life.id in self._stays:
            del self._stays[life.id], self._held[life.id]
        self._free.passed(held_before, self._held.get(life.id, ()))
        before = self._where.get(life.rank)
        if before is not None and before is not line:
            before.drop(life.rank)
        line.put(life.rank, job)
        self._where[life.rank] = line
        if life.phase is Phase.ENDED and not life.work.curve:
            self._brief.append(life)

    def _line(self, phase: Phase) -> ByRank:
        if phase in QUEUED_PHASES:
            return self._queue
        return self._holding if phase in (Phase.STARTING, Phase.RUNNING) else self._others


class _Free:
    """The GPUs of which no job keeps anything, kept up to date."""

    def __init__(self) -> None:
        self._pool: tuple[Gpu, ...] = ()
        self._indices: frozenset[int] = frozenset()
        self._kept: dict[int, int] = {}  # how many jobs keep a part of it
        self._free: set[int] = set()

    def passed(self, before: tuple[int, ...], now: tuple[int, ...]) -> None:
        """A job keeps these GPUs now, and kept those before."""
        if before == now:
            return
        kept = self._kept
        for gpu in now:
            kept[gpu] = kept.get(gpu, 0) + 1
        for gpu in before:
            kept[gpu] -= 1
        self._free.difference_update(now)
        self._free.update(g for g in before if not kept[g] and g in self._indices)

    def among(self, pool: tuple[Gpu, ...]) -> frozenset[int]:
        """Those of this pool."""
        if pool is not self._pool:
            self._pool = pool
            self._indices = frozenset(gpu.index for gpu in pool)
            self._free = {gpu for gpu in self._indices if not self._kept.get(gpu)}
        return frozenset(self._free)

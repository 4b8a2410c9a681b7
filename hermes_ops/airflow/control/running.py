"""The sweeps that run in a pool, and the pool as a policy sees it: read, never written."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hermes_ops.airflow.control.books import Book, Plan
from hermes_ops.airflow.control.faults import FaultBarrier, Subject
from hermes_ops.airflow.metadata import Metadata, PoolRow, RunRow
from hermes_ops.core.model import Gpu, Job, Snapshot
from hermes_ops.errors import HermesError

log = logging.getLogger(__name__)


READ = "read its record"

UNREADABLE_S = 600.0
"""A sweep whose record cannot be read ends after so long: until then an upgrade may help."""


@dataclass(slots=True)
class RunningSweeps:
    """The running sweeps of one pool; the record of each is parsed once.

    `unreadable` are those whose record is there and cannot be made sense of.
    """

    pool: str
    faults: FaultBarrier = field(default_factory=FaultBarrier)
    plans: dict[str, Plan] = field(default_factory=dict)
    unreadable: dict[str, RunRow] = field(default_factory=dict)
    _not_ours: dict[str, dict[str, Any]] = field(default_factory=dict)

    def read(self, metadata: Metadata) -> Mapping[str, Plan]:
        """Bring `plans` up to date; return those that run no more."""
        runs = {r.sweep_id: r for r in metadata.sweeps()}
        unreadable: dict[str, RunRow] = {}
        for sweep, run in runs.items():
            known = self.plans.get(sweep)
            if (known and known.run == run) or self._not_ours.get(sweep) == run.sweep:
                continue  # a sweep that has been extended or resumed is read anew
            read = self.faults.isolate(Subject(sweep), READ, Plan.of, run)
            if read is None:
                unreadable[sweep] = run
            elif read.value is not None and read.value.config.pool == self.pool:
                self.plans[sweep] = read.value
            else:
                self._not_ours[sweep] = run.sweep
        for sweep in unreadable.keys() - self.unreadable.keys():
            log.error("The sweep %s cannot be scheduled: its record cannot be read", sweep)
        self.unreadable = unreadable
        return {gone: self.plans.pop(gone) for gone in set(self.plans) - set(runs)}

    def hopeless(self, now_s: float) -> Iterator[tuple[RunRow, str]]:
        """Yield the unreadable sweeps of this pool that are to end, and why."""
        for fault in self.faults.faults:
            run = self.unreadable.get(fault.subject.sweep)
            if run is None or fault.step != READ or now_s - fault.since_s < UNREADABLE_S:
                continue
            if _pool_of(run) == self.pool:
                yield run, f"its record cannot be read: {fault.reason}"


def _pool_of(run: RunRow) -> str | None:
    """The pool that an unreadable record names; None where it names none."""
    config = run.sweep.get("config")
    pool = config.get("pool") if isinstance(config, Mapping) else None
    return pool if isinstance(pool, str) else None


def pool_snapshot(
    pool: str,
    metadata: Metadata,
    books: Mapping[str, Book],
    now_s: float,
    *,
    nodes: Sequence[str] = (),
    jobs: tuple[Job, ...] | None = None,
) -> Snapshot:
    """The facts on which a policy decides; HermesError when Airflow has no such pool.

    `jobs` are the trials of the books, if they have been made.
    """
    if jobs is None:
        jobs = tuple(j for b in books.values() for j in b.jobs(now_s))
    runs = ((b.plan.run, b.plan.record) for b in books.values())
    row = metadata.pool(pool, [(r.dag_id, r.run_id, record.trial_task) for r, record in runs])
    if row is None:
        raise HermesError(f"Airflow has no pool {pool!r}: create it with as many slots as GPUs.")
    held = [g for j in jobs for g in j.gpus_held]
    return Snapshot(now_s, usable_gpus(row, held, nodes), jobs)


def usable_gpus(pool: PoolRow, held: Sequence[int], nodes: Sequence[str] = ()) -> tuple[Gpu, ...]:
    """The GPUs that trials may use: the pool's, less as many as other tasks occupy.

    Tasks that are not trials name no GPU, so those that our trials hold are kept before free ones.
    `nodes` names the node of each slot, as far as it goes.
    """
    capacity = max(0, pool.slots - pool.foreign_slots)
    mine = sorted({g for g in held if g < pool.slots})
    free = [g for g in range(pool.slots) if g not in mine]
    usable = sorted((mine + free)[:capacity])
    return tuple(Gpu(i, nodes[i]) if i < len(nodes) else Gpu(i) for i in usable)

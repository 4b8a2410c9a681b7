"""The sweeps that run in a pool, and the pool as a policy sees it: read, never written."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hermes_ops.airflow.control.books import Book, Plan
from hermes_ops.airflow.metadata import Metadata, PoolRow, RunRow
from hermes_ops.core.model import Gpu, Snapshot
from hermes_ops.errors import HermesError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RunningSweeps:
    """The running sweeps of one pool; the record of each is parsed once."""

    pool: str
    plans: dict[str, Plan] = field(default_factory=dict)
    _not_ours: dict[str, dict[str, Any]] = field(default_factory=dict)

    def read(self, metadata: Metadata) -> Mapping[str, Plan]:
        """Bring `plans` up to date; return those that run no more."""
        runs = {r.sweep_id: r for r in metadata.sweeps()}
        for run_id, run in runs.items():
            known = self.plans.get(run_id)
            if (known and known.run == run) or self._not_ours.get(run_id) == run.sweep:
                continue  # a sweep that has been extended or resumed is read anew
            plan = _plan(run)
            if plan is not None and plan.config.pool == self.pool:
                self.plans[run_id] = plan
            else:
                self._not_ours[run_id] = run.sweep
        return {gone: self.plans.pop(gone) for gone in set(self.plans) - set(runs)}


def _plan(run: RunRow) -> Plan | None:
    try:
        return Plan.of(run)
    except HermesError:
        log.exception("The sweep %s cannot be scheduled", run.run_id)
        return None


def pool_snapshot(
    pool: str,
    metadata: Metadata,
    books: Mapping[str, Book],
    now_s: float,
    nodes: Sequence[str] = (),
) -> Snapshot:
    """The facts on which a policy decides; HermesError when Airflow has no such pool."""
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

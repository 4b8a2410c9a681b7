"""Override the grants of a plan for starved jobs, and repair what they displace."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from math import inf

from hermes_ops.core.model import SHARE_EPS, Gpu, Grant, Job, JobId, Plan, Snapshot
from hermes_ops.core.nodes import usable


class FreeCapacity:
    """The share of each GPU that is left while grants are reserved."""

    def __init__(self, gpus: Iterable[Gpu]) -> None:
        self._left = {gpu.index: 1.0 for gpu in gpus}

    def fits(self, grant: Grant) -> bool:
        """Return whether each GPU of the grant has its share left."""
        needed = grant.share - SHARE_EPS
        return all(self._left[gpu] >= needed for gpu in grant.gpus)

    def reserve(self, grant: Grant) -> None:
        """Reserve the grant's share of its GPUs."""
        for gpu in grant.gpus:
            self._left[gpu] -= grant.share


def override_grants(
    snapshot: Snapshot,
    plan: Plan,
    first: Collection[Grant],
    reserved: Collection[int] = frozenset(),
) -> Plan:
    """Return the plan with the grants of `first` in force and no new start on reserved GPUs.

    Grants that no longer fit are withdrawn. A job that had lost its GPUs to a withdrawn grant gets
    them back if they are free. Jobs with GPUs leave the ranking.
    """
    held = snapshot.held
    wins = {grant.job for grant in first}
    room = FreeCapacity(snapshot.gpus)
    for grant in first:
        room.reserve(grant)
    grants, withdrawn, kept_free = list(first), set[int](), set(reserved)
    for grant in plan.grants:
        keeps_gpus = held.get(grant.job) == grant.gpus
        if grant.job in wins:
            withdrawn.update(grant.gpus)
        elif room.fits(grant) and (keeps_gpus or kept_free.isdisjoint(grant.gpus)):
            room.reserve(grant)
            grants.append(grant)
        else:
            withdrawn.update(grant.gpus, held.get(grant.job, ()))
    out = {grant.job for grant in grants}.union(plan.ends)
    grants += _restored(snapshot, room, out, withdrawn)
    granted = {grant.job for grant in grants}
    ranking = tuple(job for job in plan.ranking if job not in granted)
    return replace(plan, grants=tuple(grants), ranking=ranking)


def _restored(
    snapshot: Snapshot, room: FreeCapacity, out: Collection[JobId], withdrawn: set[int]
) -> list[Grant]:
    """Return grants to the jobs that a withdrawn grant had displaced and whose GPUs are free."""
    back = []
    for job in snapshot.holding:
        grant = snapshot.retained.get(job.id)
        if grant is None:
            continue
        if job.id not in out and not withdrawn.isdisjoint(grant.gpus) and room.fits(grant):
            room.reserve(grant)
            back.append(grant)
    return back


class StarvedJobs:
    """Chooses the GPUs that starved jobs take from the plan, or reserve until they are enough."""

    def __init__(self, snapshot: Snapshot, plan: Plan, protected: Mapping[JobId, float]) -> None:
        self.served: list[Grant] = []
        self.reserved: set[int] = set()
        self._snapshot = snapshot
        self._granted = {grant.job: grant for grant in plan.grants}
        self._room = FreeCapacity(snapshot.gpus)
        fixed, blocked = set[int](), set[int]()
        for job in (job for job in snapshot.holding if job.id in snapshot.held):
            if not job.preemptible:
                fixed.update(job.gpus_held)
            keeps_gpus = not job.preemptible or job.id in protected or not job.has_finished_slice
            if keeps_gpus and job.id not in plan.ends:
                blocked.update(job.gpus_held)
        self._obtainable = {gpu.index for gpu in snapshot.gpus} - fixed
        costs = _costs(snapshot, plan)
        self._available = {gpu.index for gpu in snapshot.gpus} - blocked
        self._cheapest = deque(sorted(self._available, key=costs.__getitem__))

    def serve(self, job: Job) -> bool:
        """Grant the job GPUs, or reserve those available; False: no later job may take any.

        A job that cannot fit beside the non-preemptible ones is passed over. One that may run on
        some nodes only reserves GPUs there and no others.
        """
        grant = self._granted.get(job.id)
        if grant is None or not self._room.fits(grant):
            available = usable(self._snapshot, job, self._available)
            if job.min_gpus > len(available):
                return self._reserve(job, available)
            grant = Grant(job.id, self._draw(job.min_gpus, available))
        self._room.reserve(grant)
        self.served.append(grant)
        self._available.difference_update(grant.gpus)
        return True

    def _reserve(self, job: Job, available: Collection[int]) -> bool:
        if job.min_gpus > len(usable(self._snapshot, job, self._obtainable)):
            return True
        self.reserved.update(available)
        if job.nodes:
            self._available.difference_update(available)
        return bool(job.nodes)

    def _draw(self, number: int, available: Collection[int]) -> tuple[int, ...]:
        """Return the `number` cheapest of the available GPUs, ascending; there must be as many."""
        if available is not self._available:
            return tuple(sorted([gpu for gpu in self._cheapest if gpu in available][:number]))
        drawn: list[int] = []
        while len(drawn) < number:
            gpu = self._cheapest.popleft()
            if gpu in self._available:
                drawn.append(gpu)
        return tuple(sorted(drawn))


def _costs(snapshot: Snapshot, plan: Plan) -> dict[int, tuple[int, float, int]]:
    """Return sort keys of GPUs: unused, then of a job not yet started, then oldest segment."""
    costs = {gpu.index: (0, 0.0, gpu.index) for gpu in snapshot.gpus}
    jobs, held = snapshot.index, snapshot.held
    for grant in plan.grants:
        started_s = jobs[grant.job].started_s
        since_s = -inf if started_s is None else started_s
        for gpu in grant.gpus:
            runs = gpu in held.get(grant.job, ())
            costs[gpu] = (2, since_s, gpu) if runs else (1, 0.0, gpu)
    return costs

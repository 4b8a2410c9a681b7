"""How many GPUs each team may hold now: what is guaranteed to it, and what others lend."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from hermes_ops.core.decayed_use import DecayedUse
from hermes_ops.core.model import Job, JobId, Snapshot
from hermes_ops.core.quota import Quota, TeamQuota


@dataclass(slots=True)
class _Demand:
    """What a team's jobs want, and what they have been given so far, in GPUs."""

    quota: TeamQuota
    pinned: int = 0  # of jobs that keep their GPUs in any case
    sizes: list[int] = field(default_factory=list)  # of its other jobs, those that hold GPUs first
    given: int = 0
    spare: int = 0  # given, but less than its next job needs
    next: int = 0  # the first of `sizes` that is not covered yet

    def give_own(self) -> None:
        """Give the guaranteed GPUs that its jobs want; pinned jobs keep theirs beyond that."""
        self.given = max(self.pinned, min(self.pinned + sum(self.sizes), self.quota.guaranteed))
        self.spare = self.given - self.pinned

    @property
    def overdrawn(self) -> int:
        """The GPUs that pinned jobs hold beyond the guarantee."""
        return max(0, self.pinned - self.quota.guaranteed)

    def next_need(self) -> int | None:
        """Cover jobs with the spare GPUs; return what the next one lacks, None without any."""
        while self.next < len(self.sizes) and self.sizes[self.next] <= self.spare:
            self.spare -= self.sizes[self.next]
            self.next += 1
        return self.sizes[self.next] - self.spare if self.next < len(self.sizes) else None

    def take(self, gpus: int) -> None:
        """Add GPUs that others lend."""
        self.given += gpus
        self.spare += gpus


def team_shares(
    snapshot: Snapshot,
    quota: Quota,
    use: DecayedUse,
    pinned: Collection[JobId],
) -> dict[str, int]:
    """Return the GPUs that each team with jobs may hold; more than the pool only if pinned.

    `pinned` jobs keep their GPUs whatever their team is entitled to; `use` lessens the weights of
    the teams among borrowers (`DecayedUse.factors`). Each team first gets its guaranteed GPUs as
    far as its jobs want them. The rest is lent job by job to the team that borrows the least for
    its factor, ties by name, up to its limit (progressive filling, as in DRF, Ghodsi et al., NSDI
    2011, for one resource). A gang that is first in line and fits once pinned jobs of others have
    left gets all that is left: smaller jobs cannot keep it waiting.
    """
    demands = _demands(snapshot, quota, pinned)
    factors = use.factors({name: demand.quota.weight for name, demand in demands.items()})
    for demand in demands.values():
        demand.give_own()
    rest = len(snapshot.gpus) - sum(demand.given for demand in demands.values())
    overdrawn = sum(demand.overdrawn for demand in demands.values())
    _lend(demands, factors, rest, overdrawn)
    return {name: demand.given for name, demand in demands.items()}


def _demands(snapshot: Snapshot, quota: Quota, pinned: Collection[JobId]) -> dict[str, _Demand]:
    demands: dict[str, _Demand] = {}
    of_cluster: dict[str, _Demand] = {}
    gpus = len(snapshot.gpus)
    for job in (*snapshot.holding, *snapshot.queue):
        demand = of_cluster.get(job.virtual_cluster)
        if demand is None:
            team = quota.team_of(job.virtual_cluster)
            demand = demands.setdefault(team.name, _Demand(team))
            of_cluster[job.virtual_cluster] = demand
        if job.id in pinned:
            demand.pinned += len(job.gpus_held)
        elif job.min_gpus <= gpus:
            of_one_size = job.min_gpus == job.max_gpus
            demand.sizes.append(job.min_gpus if of_one_size else largest_size(job, gpus))
    return demands


def largest_size(job: Job, gpus: int) -> int:
    """Return the largest number of GPUs, at most `gpus`, that the job takes; 0 without any."""
    sizes = job.sizes_up_to(gpus)
    return sizes[-1] if sizes else 0


def _lend(
    demands: Mapping[str, _Demand], factors: Mapping[str, float], rest: int, overdrawn: int
) -> None:
    def place(name: str) -> tuple[float, str]:
        demand = demands[name]
        return max(0, demand.given - demand.quota.guaranteed) / factors[name], name

    line = [place(name) for name, demand in demands.items() if demand.next_need() is not None]
    heapify(line)
    while line and rest > 0:
        name = heappop(line)[1]
        demand = demands[name]
        need = demand.next_need()
        if need is None:
            continue
        if demand.given + need > demand.quota.limit or need > rest + overdrawn:
            demand.next += 1
        else:
            taken = min(need, rest)
            demand.take(taken)
            rest -= taken
        heappush(line, place(name))

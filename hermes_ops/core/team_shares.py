"""How many GPUs each team may hold now: what is guaranteed to it, and what others lend.

Where the jobs of a team have several priorities, each may hold what the higher ones leave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, merge
from itertools import chain, pairwise
from math import inf
from operator import itemgetter

from hermes_ops.core.gpu_time import DecayedUse
from hermes_ops.core.model import Job, JobId, Snapshot
from hermes_ops.core.order import by_submission, submission
from hermes_ops.core.quota import Quota, TeamQuota

STAY = 1.2
"""How many times as much, relative to its factor, a team may borrow as another before its jobs
leave the GPUs lent to them; at most half of the GPUs of such a job."""


_Want = tuple[int, bool, int]
"""GPUs that a job wants: its priority, the highest least; whether it waits; how many."""


@dataclass(slots=True)
class _Demand:
    """The demand of a team's jobs, and their share so far, in GPUs."""

    quota: TeamQuota
    gpus: int  # of the pool
    pinned: int = 0  # of jobs that keep their GPUs in any case
    sizes: list[int] = field(default_factory=list)  # of its other jobs: needed one by one
    waiting: Iterator[Job] = field(default_factory=lambda: iter(()))  # jobs not in `sizes` yet
    held: int = 0  # of `sizes`, the first ones, which its jobs hold now
    growth: list[int] = field(default_factory=list)  # what jobs may take beyond that, part by part
    priorities: list[int] = field(default_factory=list)  # of `sizes`, where jobs have several
    holding: list[bool] = field(default_factory=list)  # likewise: whether a job holds them now
    given: int = 0
    spare: int = 0  # given, but less than its next job needs
    next: int = 0  # the first of `sizes` that is not covered yet

    def give_own(self) -> None:
        """Give the guaranteed GPUs that its jobs want; pinned jobs keep theirs beyond that."""
        wanted, counted = self.pinned, 0
        while wanted < self.quota.guaranteed and self._has(counted):
            wanted += self.sizes[counted]
            counted += 1
        self.given = max(self.pinned, min(wanted, self.quota.guaranteed))
        self.spare = self.given - self.pinned

    @property
    def overdrawn(self) -> int:
        """The GPUs that pinned jobs hold beyond the guarantee."""
        return max(0, self.pinned - self.quota.guaranteed)

    def want(self, job: Job) -> None:
        """Add what a job wants of the pool: its least number of GPUs, and parts by which it grows.

        Jobs that hold GPUs come first: what they hold is wanted before anything else.
        """
        if job.min_gpus == job.max_gpus <= self.gpus:
            self.sizes.append(job.min_gpus)
            self.held += job.holds_gpus
            return
        sizes = job.sizes_up_to(self.gpus)
        if not sizes:
            return
        parts = [sizes[0], *(after - before for before, after in pairwise(sizes))]
        holds = len(job.gpus_held)
        kept = max(1, sum(size <= holds for size in sizes))
        self.sizes += parts[:kept]
        self.held += kept if holds else 0
        self.growth += parts[kept:]

    @property
    def has_next_held(self) -> bool:
        """True where the next GPUs that it lacks are held by a job of its own."""
        if self.priorities:
            return self.next < len(self.holding) and self.holding[self.next]
        return self.next < self.held

    @property
    def next_priority(self) -> int:
        """The priority of the job that lacks them; 0 where all jobs have the same one."""
        return self.priorities[self.next] if self.next < len(self.priorities) else 0

    def order(self, wanted: list[_Want], growth: list[_Want]) -> None:
        """Take what jobs want in the order of their priorities; who holds GPUs comes first."""
        wanted.sort(key=itemgetter(0, 1))
        growth.sort(key=itemgetter(0))
        parts = (*wanted, *growth)
        self.sizes, self.growth, self.waiting = [size for *_, size in parts], [], iter(())
        self.holding = [not waits for _, waits, _ in parts]
        self.priorities = [-rank for rank, *_ in parts]

    def next_need(self) -> int | None:
        """Cover jobs with the spare GPUs; return what the next one lacks, None without any."""
        while self._has(self.next):
            lacks = self.sizes[self.next] - self.spare
            if lacks > 0:
                return lacks
            self.spare = -lacks
            self.next += 1
        return None

    def _has(self, place: int) -> bool:
        """Return whether `sizes` has that place, after reading jobs that wait as far as needed."""
        while place >= len(self.sizes):
            if (job := next(self.waiting, None)) is not None:
                self.want(job)
            elif self.growth:
                self.sizes += self.growth
                self.growth = []
            else:
                return False
        return True

    def take(self, gpus: int) -> None:
        """Add GPUs that others lend."""
        self.given += gpus
        self.spare += gpus


def team_shares(
    snapshot: Snapshot,
    quota: Quota,
    use: DecayedUse,
    pinned: Collection[JobId],
    priority_of: Mapping[JobId, int] | None = None,
) -> dict[str, int]:
    """Return the GPUs that each team with jobs may hold; more than the pool only if pinned.

    `pinned` jobs keep their GPUs whatever their team is entitled to; `use` lessens the weights of
    the teams among borrowers (`DecayedUse.factors`). Each team first gets its guaranteed GPUs as
    far as its jobs want them. The rest is lent job by job to the team that borrows the least for
    its factor, ties to the larger factor, then by name, up to its limit (progressive filling, as in
    DRF, Ghodsi et al., NSDI 2011, for one resource). A job that holds lent GPUs leaves them for
    another team only where that borrows clearly less (`STAY`): else the use of one second would
    decide, and jobs would take turns without end. A gang that is first in line and fits once pinned
    jobs of others have left gets all that is left: smaller jobs cannot keep it waiting. A team that
    has jobs alone may hold all GPUs up to its limit.

    With `priority_of`, the priority of each job, a team's jobs want GPUs in the order of their
    priorities, and of two teams that borrow alike the one whose next job has the higher one comes
    first, also where the other's holds the GPUs.
    """
    demands = _demands(snapshot, quota, pinned)
    if priority_of and len(demands) > 1:
        _order(demands, snapshot, quota, pinned, priority_of)
    if len(demands) == 1:
        [(name, alone)] = demands.items()
        return {name: max(alone.pinned, int(min(alone.quota.limit, len(snapshot.gpus))))}
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
    gpus, queue_of = len(snapshot.gpus), snapshot.queue_of

    def demand_of(cluster: str) -> _Demand:
        team = quota.team_of(cluster)
        return demands.setdefault(team.name, _Demand(team, gpus))

    for job in snapshot.holding:
        demand = of_cluster.get(job.virtual_cluster)
        if demand is None:
            demand = of_cluster[job.virtual_cluster] = demand_of(job.virtual_cluster)
        if job.id in pinned:
            demand.pinned += len(job.gpus_held)
        else:
            demand.want(job)
    queues: dict[str, list[Sequence[Job]]] = defaultdict(list)
    for first in by_submission(queue[0] for queue in queue_of.values()):
        cluster = first.virtual_cluster
        queues[demand_of(cluster).quota.name].append(queue_of[cluster])
    for name, of_team in queues.items():
        demands[name].waiting = merge(*of_team, key=submission)
    return demands


def _order(
    demands: Mapping[str, _Demand],
    snapshot: Snapshot,
    quota: Quota,
    pinned: Collection[JobId],
    priority_of: Mapping[JobId, int],
) -> None:
    """Put what each team wants into the order of its jobs' priorities."""
    gpus = len(snapshot.gpus)
    wanted: dict[str, tuple[list[_Want], list[_Want]]] = {name: ([], []) for name in demands}
    of_cluster: dict[str, tuple[list[_Want], list[_Want]]] = {}
    for job in (*snapshot.holding, *snapshot.queue):
        if job.id in pinned:
            continue
        lists = of_cluster.get(job.virtual_cluster)
        if lists is None:
            lists = wanted[quota.team_of(job.virtual_cluster).name]
            of_cluster[job.virtual_cluster] = lists
        rank, waits = -priority_of[job.id], not job.holds_gpus
        if job.min_gpus == job.max_gpus <= gpus:
            lists[0].append((rank, waits, job.min_gpus))
            continue
        parts = _Demand(quota.others, gpus)
        parts.want(job)
        lists[0].extend((rank, waits, size) for size in parts.sizes)
        lists[1].extend((rank, True, size) for size in parts.growth)
    for name, demand in demands.items():
        demand.order(*wanted[name])


def _lend(
    demands: Mapping[str, _Demand], factors: Mapping[str, float], rest: int, overdrawn: int
) -> None:
    def place(name: str) -> tuple[float, int, float, str] | None:
        demand, factor = demands[name], factors[name]
        if (need := demand.next_need()) is None:
            return None
        lent: float = max(0, demand.given - demand.quota.guaranteed)
        rank = -demand.next_priority
        if demand.has_next_held:
            return max(lent / STAY, lent - need / 2) / factor, rank, -STAY * factor, name
        return lent / factor, rank, -factor, name

    line = [placed for name in demands if (placed := place(name)) is not None]
    heapify(line)
    while line and rest > 0:
        name = heappop(line)[3]
        demand = demands[name]
        need = demand.next_need() or 0
        if demand.given + need > demand.quota.limit or need > rest + overdrawn:
            demand.next += 1
        else:
            taken = min(need, rest)
            demand.take(taken)
            rest -= taken
        if (again := place(name)) is not None:
            heappush(line, again)


Account = str | tuple[str, int]
"""What a job's GPUs count for: its team; in a team with jobs of several priorities, its priority
there."""


@dataclass(frozen=True, slots=True)
class ClassShares:
    """The jobs of teams whose jobs have several priorities: the priority and the account of each.

    `most_gpus` is how many GPUs the jobs of each account may hold. Without such a team all fields
    are empty.
    """

    priority_of: Mapping[JobId, int] = field(default_factory=dict)
    account_of: Mapping[JobId, Account] = field(default_factory=dict)
    most_gpus: Mapping[Account, int] = field(default_factory=dict)

    def by_priority(self, jobs: Iterable[Job]) -> list[Job]:
        """Return the jobs, those of a higher priority first, else in their order."""
        return sorted(jobs, key=lambda job: -self.priority_of.get(job.id, 0))


NO_CLASSES = ClassShares()


def job_priorities(snapshot: Snapshot, quota: Quota, named: Set[str]) -> dict[JobId, int]:
    """Return the priority of each job that holds GPUs or waits; none if all have the same one.

    `named` are the classes of all jobs.
    """
    priorities = quota.priorities
    if len({priorities.get(name, 0) for name in named}) < 2:
        return {}
    jobs = chain(snapshot.holding, snapshot.queue)
    return {job.id: priorities.get(job.priority_class, 0) for job in jobs}


def class_shares(
    snapshot: Snapshot,
    quota: Quota,
    priority_of: Mapping[JobId, int],
    of_team: Mapping[str, int],
    pinned: Collection[JobId],
) -> ClassShares:
    """Return what the jobs of each priority may hold of their team's share.

    The highest priority may hold all of it. A lower one may hold what is left of the share beyond
    the least GPUs of the jobs above it, as far as those fit into the share and the limits of their
    users. `pinned` jobs keep their GPUs whatever their priority.
    """
    if not priority_of:
        return NO_CLASSES
    account_of: dict[JobId, Account] = {}
    most_gpus: dict[Account, int] = {}
    for team, by_priority in _by_team(snapshot, quota, priority_of).items():
        if len(by_priority) < 2:
            continue
        room = _Room(of_team.get(team, 0), quota.limit_of_user)
        for priority in sorted(by_priority, reverse=True):
            jobs, account = by_priority[priority], (team, priority)
            account_of.update((job.id, account) for job in jobs)
            held = sum(len(job.gpus_held) for job in jobs if job.id in pinned)
            most_gpus[account] = max(held, room.left)
            room.fill(jobs, pinned, len(snapshot.gpus))
    return ClassShares(priority_of, account_of, most_gpus)


def _by_team(
    snapshot: Snapshot, quota: Quota, priority_of: Mapping[JobId, int]
) -> Mapping[str, Mapping[int, list[Job]]]:
    """Return the jobs that hold GPUs or wait, by their team and their priority."""
    teams: dict[str, dict[int, list[Job]]] = defaultdict(lambda: defaultdict(list))
    of_cluster: dict[str, dict[int, list[Job]]] = {}
    for job in chain(snapshot.holding, snapshot.queue):
        by_priority = of_cluster.get(job.virtual_cluster)
        if by_priority is None:
            by_priority = teams[quota.team_of(job.virtual_cluster).name]
            of_cluster[job.virtual_cluster] = by_priority
        by_priority[priority_of[job.id]].append(job)
    return teams


class _Room:
    """The rest of a team's share, and of its users' limits, for the next lower priority."""

    def __init__(self, share: int, limit_of_user: Mapping[str, int]) -> None:
        self.left = share
        self._limits = limit_of_user
        self._users: dict[str, int] = defaultdict(int)

    def fill(self, jobs: Iterable[Job], pinned: Collection[JobId], gpus: int) -> None:
        """Take the least GPUs of the jobs that fit; those of pinned jobs in any case."""
        for job in jobs:
            if job.id in pinned:
                self._take(job.user, len(job.gpus_held))
        for job in jobs:
            if self.left <= 0:
                return
            size = job.sizes[0] if job.sizes else job.min_gpus
            if job.id in pinned or size > min(self.left, gpus):
                continue
            if self._users[job.user] + size <= self._limits.get(job.user, inf):
                self._take(job.user, size)

    def _take(self, user: str, gpus: int) -> None:
        self.left = max(0, self.left - gpus)
        self._users[user] += gpus

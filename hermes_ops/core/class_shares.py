"""How many GPUs of a team's share the jobs of each priority may hold: what higher ones leave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from hermes_ops.core.model import Job, JobId, Snapshot
from hermes_ops.core.quota import Quota

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

"""How many GPUs of a team's share the jobs of each priority may hold: what higher ones leave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from hermes_ops.core.model import Job, JobId, Snapshot
from hermes_ops.core.quota import Quota

Account = str | tuple[str, int]
"""What a job's GPUs count for: its team; in a team with jobs of several priorities, its priority
there."""


@dataclass(frozen=True, slots=True)
class ClassShares:
    """The jobs of teams with several priorities: the priority and the account of each.

    `most_gpus` are those that the jobs of each account may hold. Without such a team all are empty.
    """

    priority_of: Mapping[JobId, int] = field(default_factory=dict)
    account_of: Mapping[JobId, Account] = field(default_factory=dict)
    most_gpus: Mapping[Account, int] = field(default_factory=dict)

    def by_priority(self, jobs: Iterable[Job]) -> list[Job]:
        """Return the jobs, those of a higher priority first, else in their order."""
        return sorted(jobs, key=lambda job: -self.priority_of.get(job.id, 0))


NO_CLASSES = ClassShares()


def job_priorities(snapshot: Snapshot, quota: Quota) -> dict[JobId, int]:
    """Return the priority of each job that holds GPUs or waits; none if all have the same one."""
    priorities, jobs = quota.priorities, (*snapshot.holding, *snapshot.queue)
    named = {job.priority_class for job in jobs}
    if len({priorities.get(name, 0) for name in named}) < 2:
        return {}
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
    teams: dict[str, dict[int, list[Job]]] = defaultdict(lambda: defaultdict(list))
    for job in (*snapshot.holding, *snapshot.queue):
        team = quota.team_of(job.virtual_cluster).name
        teams[team][priority_of[job.id]].append(job)
    account_of: dict[JobId, Account] = {}
    most_gpus: dict[Account, int] = {}
    for team, by_priority in teams.items():
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


class _Room:
    """What is left of a team's share, and of its users' limits, for the next lower priority."""

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
            size = next(iter(job.sizes_up_to(gpus)), None)
            if self.left <= 0:
                return
            if job.id in pinned or size is None or size > self.left:
                continue
            if self._users[job.user] + size <= self._limits.get(job.user, inf):
                self._take(job.user, size)

    def _take(self, user: str, gpus: int) -> None:
        self.left = max(0, self.left - gpus)
        self._users[user] += gpus

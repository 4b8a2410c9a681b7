"""Holdings of teams in a pool with a quota: own GPUs, and GPUs lent by other teams."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hermes_ops.core.model import Grant, JobId, Plan, Snapshot
from hermes_ops.core.quota import Quota


@dataclass(frozen=True, slots=True)
class TeamHolding:
    """The GPUs of a team: `held` in all, `borrowed` of these; and its number of `waiting` jobs.

    `guaranteed` GPUs are its own, as the pool has them; `limit` is the most that it may hold, None
    without one. The name is empty for the users of no team.
    """

    team: str
    guaranteed: int
    limit: int | None
    held: int
    borrowed: int
    waiting: int


def borrowing_jobs(snapshot: Snapshot, plan: Plan, quota: Quota) -> frozenset[JobId]:
    """Return the granted jobs that hold borrowed GPUs: beyond their team's guarantee.

    The jobs of a team use its guaranteed GPUs in the order of their priority classes, then of the
    plan's grants.
    """
    quota = quota.scaled(len(snapshot.gpus))
    used, borrowing = Counter[str](), set[JobId]()
    priorities, index = quota.priorities, snapshot.index

    def rank(grant: Grant) -> int:
        return -priorities.get(index[grant.job].priority_class, 0)

    for grant in sorted(plan.grants, key=rank):
        team = quota.team_of(snapshot.index[grant.job].virtual_cluster)
        used[team.name] += len(grant.gpus)
        if used[team.name] > team.guaranteed:
            borrowing.add(grant.job)
    return frozenset(borrowing)


def team_holdings(snapshot: Snapshot, quota: Quota) -> tuple[TeamHolding, ...]:
    """Return what each team holds in the snapshot, in the order of the quota.

    The users of no team come last, if they have jobs or a guarantee.
    """
    quota = quota.scaled(len(snapshot.gpus))
    held, waiting = quota.held_by_team(snapshot), Counter[str]()
    for job in snapshot.queue:
        waiting[quota.team_of(job.virtual_cluster).name] += 1
    rows = []
    for team in quota.everyone:
        limit = None if team.borrow is None else team.guaranteed + team.borrow
        count, name = held[team.name], team.name
        lent = max(0, count - team.guaranteed)
        if team is not quota.others or count or waiting[name] or team.guaranteed:
            rows.append(TeamHolding(name, team.guaranteed, limit, count, lent, waiting[name]))
    return tuple(rows)

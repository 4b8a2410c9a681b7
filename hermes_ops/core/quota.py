"""The quota of a pool: guaranteed, borrowed, limited GPUs of teams and users; what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite

from hermes_ops.core.model import Grant, JobId, Plan, Snapshot
from hermes_ops.core.priority_class import BUILT_IN_CLASSES, DEFAULT_CLASS, PriorityClass

HALF_LIFE_S = 7 * 86_400.0
"""Seconds after which past use counts half, as in Slurm's default of seven days."""


@dataclass(frozen=True, slots=True)
class TeamQuota:
    """The quota of a team: `guaranteed` GPUs are its own, at most `borrow` more are lent to it.

    `borrow` None: as many as others leave idle. `weight` is its share, above 0, among borrowers.
    """

    name: str
    guaranteed: int = 0
    borrow: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.guaranteed < 0 or (self.borrow is not None and self.borrow < 0):
            raise ValueError("guaranteed and borrow are whole numbers from 0")
        if not (self.weight > 0 and isfinite(self.weight)):
            raise ValueError("a weight is a finite number above 0")

    @property
    def limit(self) -> float:
        """The GPUs that it may hold at once; infinite without a limit."""
        return inf if self.borrow is None else self.guaranteed + self.borrow


@dataclass(frozen=True, slots=True)
class UserBudget:
    """The limits of a user other than that of GPUs at once; None: no limit.

    `sweeps` at once, GPU-seconds a day and a month, both in UTC.
    """

    user: str
    sweeps: int | None = None
    gpu_s_per_day: float | None = None
    gpu_s_per_month: float | None = None

    def __post_init__(self) -> None:
        limits = (self.sweeps, self.gpu_s_per_day, self.gpu_s_per_month)
        if not all(limit is None or 0 <= limit < inf for limit in limits):
            raise ValueError("the limits of a user are finite numbers from 0")

    @property
    def limits_gpu_time(self) -> bool:
        """True with a limit of GPU-seconds."""
        return self.gpu_s_per_day is not None or self.gpu_s_per_month is not None


@dataclass(frozen=True)
class Quota:
    """The quotas of a pool. A job of no team named here belongs to `others`.

    `user_limits` are the GPUs that a user may hold at once, `user_budgets` its other limits;
    `half_life_s` (above 0) is the time after which past use of borrowed and own GPUs counts half.
    `classes` say which jobs of a team go first. A job keeps borrowed GPUs for `reclaim_notice_s`
    seconds once another team wants them.
    """

    teams: tuple[TeamQuota, ...] = ()
    user_limits: tuple[tuple[str, int], ...] = ()
    others: TeamQuota = TeamQuota("")
    half_life_s: float = HALF_LIFE_S
    user_budgets: tuple[UserBudget, ...] = ()
    classes: tuple[PriorityClass, ...] = BUILT_IN_CLASSES
    reclaim_notice_s: float = 0.0

    def __post_init__(self) -> None:
        names = [team.name for team in self.everyone]
        if len(set(names)) < len(names):
            raise ValueError("each team has a name of its own")
        if any(limit < 0 for _, limit in self.user_limits):
            raise ValueError("the limit of a user is a whole number from 0")
        if len(self.class_by_name) < len(self.classes) or DEFAULT_CLASS not in self.class_by_name:
            raise ValueError(f"each class has its own name, and {DEFAULT_CLASS} is one of them")
        if not 0 <= self.reclaim_notice_s < inf:
            raise ValueError("reclaim_notice_s is a finite number from 0")
        if not 0 < self.half_life_s < inf:
            raise ValueError("half_life_s is a finite number above 0")

    @cached_property
    def by_name(self) -> Mapping[str, TeamQuota]:
        """The teams by name, without the others."""
        return {team.name: team for team in self.teams}

    @cached_property
    def class_by_name(self) -> Mapping[str, PriorityClass]:
        """The classes by name."""
        return {each.name: each for each in self.classes}

    @cached_property
    def priorities(self) -> Mapping[str, int]:
        """The priority of each class; the default one also by the empty name."""
        of_name = {each.name: each.priority for each in self.classes}
        return {"": of_name[DEFAULT_CLASS], **of_name}

    @property
    def everyone(self) -> tuple[TeamQuota, ...]:
        """The teams, and the others last."""
        return (*self.teams, self.others)

    @cached_property
    def limit_of_user(self) -> Mapping[str, int]:
        """The GPUs that each limited user may hold at once."""
        return dict(self.user_limits)

    @cached_property
    def budget_of_user(self) -> Mapping[str, UserBudget]:
        """The other limits of each user that has some."""
        return {budget.user: budget for budget in self.user_budgets}

    @property
    def limits_gpu_time(self) -> bool:
        """Whether the GPU time of a user is limited."""
        return any(budget.limits_gpu_time for budget in self.user_budgets)

    @property
    def has_limits(self) -> bool:
        """Whether a team or a user may hold a limited number of GPUs alone."""
        return bool(self.user_limits) or any(team.borrow is not None for team in self.everyone)

    @property
    def capacities(self) -> tuple[tuple[str, float], ...]:
        """The GPUs that are guaranteed to each team, above 0: next to nothing in place of none."""
        return tuple((team.name, max(float(team.guaranteed), 1e-3)) for team in self.teams)

    def team_of(self, virtual_cluster: str) -> TeamQuota:
        """Return the team of that name; `others` for an unknown one."""
        return self.by_name.get(virtual_cluster, self.others)

    def held_by_team(self, snapshot: Snapshot) -> Counter[str]:
        """Return how many GPUs the jobs of each team hold, by the team's name."""
        held = Counter[str]()
        for job in snapshot.holding:
            held[self.team_of(job.virtual_cluster).name] += len(job.gpus_held)
        return held

    def scaled(self, gpus: int) -> Quota:
        """Return the quotas of a pool of that many GPUs.

        Guarantees beyond the pool shrink in proportion, by largest remainders (ties by name), so
        that they add up to the pool.
        """
        everyone = self.everyone
        total = sum(team.guaranteed for team in everyone)
        if total <= gpus:
            return self
        exact = {team.name: team.guaranteed * gpus / total for team in everyone}
        whole = {name: int(share) for name, share in exact.items()}
        by_remainder = sorted(exact, key=lambda name: (whole[name] - exact[name], name))
        for name in by_remainder[: gpus - sum(whole.values())]:
            whole[name] += 1
        resized = [replace(team, guaranteed=whole[team.name]) for team in everyone]
        return replace(self, teams=tuple(resized[:-1]), others=resized[-1])


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

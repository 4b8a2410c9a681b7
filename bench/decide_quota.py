"""How long a decision within the quotas of many teams takes, without any input or output."""

from __future__ import annotations

import random
from dataclasses import replace

from bench.decide import LATER_S, NOW_S, applied, decision_ms, world
from bench.measure import QUICK, Figures
from hermes_ops.core.guards import Quantum, guarded
from hermes_ops.core.model import Job, Snapshot
from hermes_ops.core.quota import Quota, TeamQuota
from hermes_ops.core.within_quota import WithinQuota
from hermes_ops.policies import make_policy

POLICIES = ("fifo", "hermes", "2d-las")
JOBS = 1_000 if QUICK else 10_000
TEAMS, USERS = 50, 500
USER_LIMIT = 20
"""GPUs that each fifth user may hold at once."""


def run() -> Figures:
    """CPU milliseconds from the jobs to the actions, within the guards and the quota.

    The pool and the two decisions are those of `decide`. The guarantees of 50 teams add up to the
    pool; a few teams have most of the jobs, and each fifth user a limit.
    """
    gpus, jobs = world(JOBS)
    share = len(gpus) // TEAMS
    teams = tuple(TeamQuota(_team(n), share, weight=1.0 + n % 3) for n in range(TEAMS))
    limits = tuple((_user(n), USER_LIMIT) for n in range(0, USERS, 5))
    owned = _owned(jobs)
    results: dict[str, Figures | int] = {"jobs": JOBS, "gpus": len(gpus), "teams": TEAMS}
    for name in POLICIES:
        policy = WithinQuota(guarded(make_policy(name, {})), Quota(teams, limits), Quantum())
        seen = Snapshot(NOW_S, gpus, owned)
        plan, memory = policy.decide(seen, policy.initial())
        later = Snapshot(NOW_S + LATER_S, gpus, applied(seen, plan))
        first_ms = decision_ms(policy, seen, policy.initial())
        results[name] = {"first_ms": first_ms, "next_ms": decision_ms(policy, later, memory)}
    return results


def _owned(jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """Give each job a user and the user's team: the first users have the most jobs."""
    chance = random.Random(2)
    users = [int(USERS * chance.random() ** 3) for _ in jobs]
    return tuple(
        replace(job, user=_user(user), virtual_cluster=_team(user % TEAMS))
        for job, user in zip(jobs, users, strict=True)
    )


def _team(number: int) -> str:
    return f"team-{number}"


def _user(number: int) -> str:
    return f"user-{number}"

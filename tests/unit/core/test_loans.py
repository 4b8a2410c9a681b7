from __future__ import annotations

from hermes_ops.core.model import Grant, Job, Phase, Plan
from hermes_ops.core.quota import Quota, TeamHolding, TeamQuota, borrowing_jobs, team_holdings
from tests.builders import job, world

QUOTA = Quota((TeamQuota("a", 1, borrow=2), TeamQuota("b", 2)))


def of_team(team: str, number: int, *gpus: int) -> Job:
    phase = Phase.RUNNING if gpus else Phase.PENDING
    held = {"gpus_held": gpus, "started_s": 0.0, "min_gpus": len(gpus)} if gpus else {}
    return job(f"{team or 'none'}/{number}", phase, virtual_cluster=team, **held)


def test_gpus_beyond_the_guarantee_are_borrowed_by_the_last_granted_jobs() -> None:
    jobs = [of_team("a", 0, 0), of_team("a", 1, 1), of_team("b", 0, 2, 3)]
    plan = Plan(grants=tuple(Grant(each.id, each.gpus_held) for each in reversed(jobs)))
    assert borrowing_jobs(world(*jobs, gpus=4), plan, QUOTA) == {"a/0"}


def test_each_team_has_its_holding_and_the_others_only_with_jobs() -> None:
    jobs = [of_team("a", 0, 0), of_team("a", 1, 1), of_team("a", 2), of_team("b", 0)]
    expected = (TeamHolding("a", 1, 3, 2, 1, 1), TeamHolding("b", 2, None, 0, 0, 1))
    assert team_holdings(world(*jobs, gpus=4), QUOTA) == expected
    found = team_holdings(world(*jobs, of_team("", 0), gpus=4), QUOTA)
    assert found == (*expected, TeamHolding("", 0, None, 0, 0, 1))


def test_guarantees_are_those_that_the_pool_can_keep() -> None:
    assert [row.guaranteed for row in team_holdings(world(gpus=2), QUOTA)] == [1, 1]

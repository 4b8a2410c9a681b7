"""The notice before a reclaim, decision by decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hermes_ops.core.model import Job, JobId, Phase, Plan
from hermes_ops.core.plan import check
from hermes_ops.core.quota import Quota, TeamQuota
from hermes_ops.core.within_quota import QuotaMemory, WithinQuota
from hermes_ops.policies import make_policy
from tests.builders import job, world

NOTICE = Quota((TeamQuota("a", 2), TeamQuota("b", 2)), reclaim_notice_s=30.0)


def of(team: str, number: int, *, gpu: int | None = None, **facts: Any) -> Job:
    phase = Phase.PENDING if gpu is None else Phase.RUNNING
    held = {} if gpu is None else {"gpus_held": (gpu,), "started_s": 0.0}
    return job(f"{team}/{number}", phase, virtual_cluster=team, **held, **facts)


BORROWED = tuple(of("a", n, gpu=n) for n in range(4))


def decided(
    now_s: float, *jobs: Job, quota: Quota = NOTICE, memory: Any = None
) -> tuple[Plan, QuotaMemory[Any]]:
    within, snapshot = (
        WithinQuota(make_policy("fifo", {}), quota),
        world(*jobs, gpus=4, now_s=now_s),
    )
    plan, memory = within.decide(snapshot, memory or within.initial())
    check(snapshot, plan)
    return plan, memory


def held(plan: Plan) -> list[str]:
    return sorted(grant.job for grant in plan.grants)


def test_a_borrower_keeps_its_gpus_and_is_told_until_when() -> None:
    plan, memory = decided(100.0, *BORROWED, of("b", 0))
    assert held(plan) == ["a/0", "a/1", "a/2", "a/3"]
    assert plan.notices == (("a/3", 130.0),)
    assert plan.review_at_s == 130.0
    assert memory.notices == (("a/3", 100.0),)
    why = plan.reasons[JobId("a/3")].text
    assert why.startswith("keeps its GPUs until 00:02:10 UTC, then is preempted: team b wants its")
    waits = plan.reasons[JobId("b/0")].text
    assert waits.startswith("waits until 00:02:10 UTC: a trial that has borrowed its GPUs has")
    assert plan.ranking[0] == "b/0"


def test_it_is_preempted_once_the_notice_is_over_whoever_the_policy_would_choose_then() -> None:
    _, memory = decided(100.0, *BORROWED, of("b", 0))
    last = replace(BORROWED[0], submitted_s=50.0)
    later = (last, *BORROWED[1:], of("b", 0))
    assert decided(120.0, *later)[0].notices == (("a/0", 150.0),)
    plan, memory = decided(120.0, *later, memory=memory)
    assert plan.notices == (("a/3", 130.0),)
    plan, memory = decided(130.0, *later, memory=memory)
    assert held(plan) == ["a/0", "a/1", "a/2", "b/0"]
    assert plan.reasons[JobId("a/3")].text.startswith("preempted because team b wants its")
    assert plan.notices == ()


def test_a_notice_ends_when_nobody_wants_the_gpus_any_more() -> None:
    _, memory = decided(100.0, *BORROWED, of("b", 0))
    plan, memory = decided(110.0, *BORROWED, of("a", 4), memory=memory)
    assert held(plan) == ["a/0", "a/1", "a/2", "a/3"]
    assert (plan.notices, memory.notices) == ((), ())
    plan, _ = decided(140.0, *BORROWED, of("b", 0), memory=memory)
    assert plan.notices == (("a/3", 170.0),)


def test_each_trial_has_a_notice_of_its_own() -> None:
    _, memory = decided(100.0, *BORROWED, of("b", 0))
    plan, memory = decided(120.0, *BORROWED, of("b", 0), of("b", 1), memory=memory)
    assert plan.notices == (("a/2", 150.0), ("a/3", 130.0))
    plan, memory = decided(130.0, *BORROWED, of("b", 0), of("b", 1), memory=memory)
    assert held(plan) == ["a/0", "a/1", "a/2", "b/0"]
    assert plan.notices == (("a/2", 150.0),)


def test_without_a_notice_nothing_waits() -> None:
    plan, memory = decided(
        100.0, *BORROWED, of("b", 0), quota=replace(NOTICE, reclaim_notice_s=0.0)
    )
    assert held(plan) == ["a/0", "a/1", "a/2", "b/0"]
    assert (plan.notices, memory.notices) == ((), ())


def test_what_is_beyond_a_limit_has_no_notice() -> None:
    lowered = replace(NOTICE, teams=(TeamQuota("a", 2, borrow=1), TeamQuota("b", 2)))
    plan, _ = decided(100.0, *BORROWED, quota=lowered)
    assert held(plan) == ["a/0", "a/1", "a/2"]
    of_ann = [replace(each, user="ann") for each in BORROWED]
    plan, _ = decided(100.0, *of_ann, quota=replace(NOTICE, user_limits=(("ann", 1),)))
    assert held(plan) == ["a/0"]
    assert plan.notices == ()


def test_a_higher_class_of_the_same_team_gives_no_notice() -> None:
    others = [of("b", n, gpu=n + 2) for n in range(2)]
    high = of("a", 9, priority_class="interactive")
    plan, _ = decided(100.0, *BORROWED[:2], *others, high)
    assert held(plan) == ["a/0", "a/9", "b/0", "b/1"]
    assert plan.notices == ()


def test_a_notice_is_not_renewed_while_trials_of_its_team_leave_for_a_higher_class() -> None:
    """Two trials leave: one for its own team's higher class, at once, and one with notice."""
    nightly = [replace(each, priority_class="nightly") for each in (*BORROWED, of("b", 0))]
    high = [of("a", n, priority_class="interactive") for n in (8, 9)]
    plan, memory = decided(100.0, *nightly, high[0])
    assert len(held(plan)) == 4
    assert {"a/8", "b/0"} & set(held(plan))
    (notice,) = plan.notices
    assert notice[1] == 130.0
    of_plan = {grant.job: grant.gpus for grant in plan.grants}
    later = [
        replace(each, phase=Phase.RUNNING, gpus_held=of_plan[each.id], started_s=0.0)
        if each.id in of_plan
        else replace(each, phase=Phase.PENDING, gpus_held=(), started_s=None)
        for each in (*nightly, high[0])
    ]
    plan, _ = decided(110.0, *later, high[1], memory=memory)
    assert dict(plan.notices)[notice[0]] == 130.0

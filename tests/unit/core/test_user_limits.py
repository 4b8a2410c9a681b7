"""The limits of a user beside GPUs at once: sweeps, and GPU-hours of a day and a month."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.core.gpu_time import GpuTime, day_end_s, month_end_s, month_start_s
from hermes_ops.core.model import Job, JobId, Phase, Plan
from hermes_ops.core.plan import check
from hermes_ops.core.quota import Quota, TeamQuota, UserBudget
from hermes_ops.core.within_quota import QuotaMemory, WithinQuota
from hermes_ops.policies import make_policy
from tests.builders import job, world

HOUR_S = 3_600.0
DAY_S = 24 * HOUR_S
NOON_S = 1_795_651_200.0 + 12 * HOUR_S
"""Noon of the 26th of November 2026."""
MIDNIGHT_S = NOON_S + 12 * HOUR_S
UNUSED = GpuTime()
A_DAY = Quota(user_budgets=(UserBudget("ann", gpu_s_per_day=8 * HOUR_S),))


def of_user(
    user: str, number: int, *, gpu: int | None = None, sweep: str = "s", **facts: Any
) -> Job:
    phase = Phase.PENDING if gpu is None else Phase.RUNNING
    held = {} if gpu is None else {"gpus_held": (gpu,), "started_s": 0.0}
    return job(f"{sweep}-{user}/{number}", phase, user=user, **held, **facts)


def decided(
    quota: Quota, *jobs: Job, time: GpuTime = UNUSED, now_s: float = NOON_S, policy: str = "fifo"
) -> tuple[Plan, GpuTime]:
    """Return the plan on four GPUs, and the GPU time that is remembered."""
    within = WithinQuota(make_policy(policy, {}), quota)
    snapshot = world(*jobs, gpus=4, now_s=now_s)
    memory = QuotaMemory(within.policy.initial(), within.past_use, time)
    plan, after = within.decide(snapshot, memory)
    check(snapshot, plan)
    return plan, after.time


def granted(plan: Plan) -> list[str]:
    return sorted(grant.job for grant in plan.grants)


def used_today(hours: float, now_s: float = NOON_S, **facts: Any) -> GpuTime:
    used = (("ann", hours * HOUR_S),)
    return GpuTime(used, used, at_s=now_s, **facts)


def test_a_user_whose_hours_are_used_starts_nothing_and_is_stopped_until_the_day_ends() -> None:
    jobs = [of_user("ann", 0, gpu=0), of_user("ann", 1), of_user("bob", 0)]
    plan, time = decided(A_DAY, *jobs, time=used_today(8.0))
    assert granted(plan) == ["s-bob/0"]
    words = "2026-11-27 00:00 UTC: user ann has used the 8 GPU-hours of this day"
    assert plan.reasons[JobId("s-ann/0")].text == f"stops until {words}"
    assert plan.reasons[JobId("s-ann/1")].text == f"waits until {words}"
    assert plan.review_at_s == MIDNIGHT_S
    waiting = [of_user("ann", number) for number in range(2)]
    plan, _ = decided(A_DAY, *waiting, time=time, now_s=MIDNIGHT_S)
    assert granted(plan) == ["s-ann/0", "s-ann/1"]


def test_a_plan_is_reviewed_when_the_hours_of_a_user_will_be_used() -> None:
    jobs = [of_user("ann", n, gpu=n) for n in range(2)]
    plan, time = decided(A_DAY, *jobs, time=used_today(7.0))
    assert (granted(plan), plan.review_at_s) == (["s-ann/0", "s-ann/1"], NOON_S + HOUR_S / 2)
    plan, _ = decided(A_DAY, *jobs, time=time, now_s=NOON_S + HOUR_S / 2)
    assert granted(plan) == []


def test_a_plan_is_reviewed_when_the_hours_of_the_first_of_several_users_will_be_used() -> None:
    limits = {"ann": 9 * HOUR_S, "bob": 8 * HOUR_S, "eve": 10 * HOUR_S}
    quota = Quota(user_budgets=tuple(UserBudget(user, None, most) for user, most in limits.items()))
    used = tuple((user, 7 * HOUR_S) for user in limits)
    jobs = [of_user(user, 0, gpu=gpu) for gpu, user in enumerate(limits)]
    plan, _ = decided(quota, *jobs, time=GpuTime(used, used, at_s=NOON_S))
    assert plan.review_at_s == NOON_S + HOUR_S


def test_the_month_outlasts_the_day_and_its_end_is_told() -> None:
    both = UserBudget("ann", gpu_s_per_day=HOUR_S, gpu_s_per_month=HOUR_S)
    plan, _ = decided(Quota(user_budgets=(both,)), of_user("ann", 0), time=used_today(1.0))
    assert plan.reasons[JobId("s-ann/0")].text.startswith("waits until 2026-12-01 00:00 UTC: ")


def test_what_a_user_without_hours_leaves_is_lent_in_spite_of_the_guarantee() -> None:
    quota = replace(A_DAY, teams=(TeamQuota("a", 3), TeamQuota("b", 1)))
    own = [of_user("ann", n, virtual_cluster="a") for n in range(4)]
    others = [of_user("bob", n, virtual_cluster="b") for n in range(4)]
    plan, _ = decided(quota, *own, *others, time=used_today(9.0))
    assert granted(plan) == [f"s-bob/{n}" for n in range(4)]


def test_a_gang_without_hours_that_is_first_in_line_holds_up_nobody() -> None:
    gang = of_user("ann", 0, min_gpus=4)
    others = [of_user("bob", 0, gpu=0), of_user("bob", 1, submitted_s=5.0)]
    plan, _ = decided(A_DAY, gang, *others, time=used_today(8.0))
    assert granted(plan) == ["s-bob/0", "s-bob/1"]
    plan, _ = decided(A_DAY, gang, *others)
    assert granted(plan) == ["s-bob/0"]


def test_until_the_hours_used_before_are_known_trials_train_on_and_none_starts() -> None:
    jobs = [of_user("ann", 0, gpu=0), of_user("ann", 1), of_user("bob", 1)]
    plan, _ = decided(A_DAY, *jobs, time=GpuTime(is_known=False))
    assert granted(plan) == ["s-ann/0", "s-bob/1"]
    assert "are being counted" in plan.reasons[JobId("s-ann/1")].text


def test_a_trial_that_must_not_be_stopped_trains_on_without_hours() -> None:
    fixed = of_user("ann", 0, gpu=0, preemptible=False)
    plan, _ = decided(A_DAY, fixed, of_user("ann", 1), time=used_today(9.0))
    assert granted(plan) == ["s-ann/0"]


@pytest.mark.parametrize("policy", ["fifo", "asha", "elastic-fifo", "2d-las"])
def test_a_user_has_no_more_sweeps_at_once_than_allowed_and_those_that_have_begun_first(
    policy: str,
) -> None:
    one = Quota(user_budgets=(UserBudget("ann", sweeps=1),))
    late = [of_user("ann", 0, gpu=3, sweep="late", submitted_s=9.0)]
    early = [of_user("ann", n, sweep="early") for n in range(3)]
    plan, _ = decided(one, *early, *late, of_user("bob", 0), policy=policy)
    assert granted(plan) == ["late-ann/0", "s-bob/0"]
    reason = plan.reasons[JobId("early-ann/0")]
    assert reason.text == "waits: user ann may have 1 sweep at once"
    plan, _ = decided(one, *early, policy=policy)
    assert granted(plan) == [f"early-ann/{n}" for n in range(3)]


@pytest.mark.parametrize("resumes", [True, False])
def test_a_sweep_whose_only_open_trial_is_stopping_counts_if_that_trial_goes_on(
    resumes: bool,
) -> None:
    one = Quota(user_budgets=(UserBudget("ann", sweeps=1),))
    stopping = job("old-ann/0", Phase.STOPPING, user="ann", resumes=resumes)
    plan, _ = decided(one, stopping, of_user("ann", 0, sweep="new"))
    assert granted(plan) == ([] if resumes else ["new-ann/0"])
    of_another = job("a-bob/0", Phase.STOPPING, user="bob", resumes=True)
    plan, _ = decided(one, of_another, of_user("ann", 0, sweep="new"))
    assert granted(plan) == ["new-ann/0"]


def test_gpu_time_grows_by_what_is_held_and_begins_anew_with_the_day_and_the_month() -> None:
    end_s = month_end_s(NOON_S)
    held = GpuTime(held=(("ann", 2),), at_s=end_s - DAY_S - 10.0)
    later = held.advance(world(now_s=end_s - DAY_S + 5.0), {"ann"})
    assert (later.day, later.month) == ((("ann", 10.0),), (("ann", 30.0),))
    held = replace(later, held=(("ann", 3),))
    last = held.advance(world(now_s=end_s + 1.0), {"ann"})
    assert last.day == last.month == (("ann", 3.0),)
    back = last.advance(world(now_s=end_s - 7.0), {"ann"})
    assert back.held == ()


def test_spans_count_as_far_as_they_lie_in_the_day_or_the_month() -> None:
    spans = [
        ("ann", NOON_S - 20.0, NOON_S - 10.0, 2),
        ("ann", MIDNIGHT_S - DAY_S - 5.0, MIDNIGHT_S - DAY_S + 5.0, 1),
        ("bob", month_start_s(NOON_S) - 9.0, month_start_s(NOON_S) + 1.0, 1),
        ("eve", NOON_S, NOON_S + 50.0, 1),
    ]
    time = GpuTime.from_spans(spans, NOON_S)
    assert time.day == (("ann", 25.0),)
    assert time.month == (("ann", 30.0), ("bob", 1.0))
    now = GpuTime((("ann", 1.0),), (("ann", 1.0),), (), NOON_S + 5.0)
    assert now.plus(time).day == (("ann", 26.0),)
    tomorrow = GpuTime((("ann", 1.0),), (("ann", 1.0),), (), MIDNIGHT_S + 5.0)
    assert tomorrow.plus(time).day == (("ann", 1.0),)
    assert tomorrow.plus(time).month == (("ann", 31.0), ("bob", 1.0))


def test_the_ends_of_days_and_months_are_in_utc() -> None:
    assert day_end_s(NOON_S) == MIDNIGHT_S
    assert day_end_s(MIDNIGHT_S) == MIDNIGHT_S + DAY_S
    assert month_end_s(NOON_S) == MIDNIGHT_S + 4 * DAY_S
    assert month_start_s(month_end_s(NOON_S)) == month_end_s(NOON_S)


@pytest.mark.parametrize("limit", [-1.0, float("nan"), float("inf")])
def test_a_limit_that_is_no_number_from_0_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match="from 0"):
        UserBudget("ann", gpu_s_per_day=limit)

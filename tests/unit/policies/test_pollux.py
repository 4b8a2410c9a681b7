"""What pollux makes of its last decision when it is asked again at the same instant."""

from __future__ import annotations

from dataclasses import replace

from hermes_ops.core.model import Gpu, Grant, Job, Phase, Plan, Snapshot
from hermes_ops.core.plan import check
from hermes_ops.policies.pollux import Pollux, PolluxMemory
from tests.builders import job

NOW_S = 100.0
POOL = (Gpu(0, "node-0"), Gpu(1, "node-1"))
ONCE = job(0, max_gpus=2)


def asked_again(*jobs: Job, grants: tuple[Grant, ...]) -> Plan:
    """Return the plan at the instant of a decision that gave these grants."""
    snapshot = Snapshot(NOW_S, POOL, jobs)
    plan, _ = Pollux().decide(snapshot, PolluxMemory(NOW_S, grants))
    check(snapshot, plan)
    return plan


def test_a_decision_stands_at_the_same_instant() -> None:
    grants = (Grant(ONCE.id, (1,)),)
    assert asked_again(ONCE, grants=grants).grants == grants


def test_a_job_that_is_stopping_now_gets_nothing_that_it_was_granted_before() -> None:
    stopping = replace(ONCE, phase=Phase.STOPPING)
    assert asked_again(stopping, grants=(Grant(ONCE.id, (0,)),)).grants == ()


def test_a_job_that_is_bound_to_a_node_now_gets_gpus_of_that_node_alone() -> None:
    bound = replace(ONCE, nodes=("node-1",))
    assert asked_again(bound, grants=(Grant(ONCE.id, (0,)),)).grants == (Grant(ONCE.id, (1,)),)


def test_a_job_that_has_ended_gets_nothing() -> None:
    ended = replace(ONCE, phase=Phase.ENDED)
    assert asked_again(ended, grants=(Grant(ONCE.id, (0,)),)).grants == ()


def test_a_job_that_was_just_submitted_starts_on_an_idle_gpu_within_seconds() -> None:
    policy, fresh = Pollux(), replace(ONCE, submitted_s=NOW_S)
    plan, memory = policy.decide(Snapshot(NOW_S, POOL, (fresh,)), policy.initial())
    assert plan.review_at_s is not None
    assert plan.review_at_s <= NOW_S + 1.0
    plan, _ = policy.decide(Snapshot(plan.review_at_s, POOL, (fresh,)), memory)
    assert [grant.job for grant in plan.grants] == [fresh.id]


def test_a_job_with_many_restarts_starts_on_an_idle_gpu_once_it_is_worth_one() -> None:
    policy, often = Pollux(), replace(ONCE, phase=Phase.WAITING, segments=5)
    plan, memory = policy.decide(Snapshot(NOW_S, POOL, (often,)), policy.initial())
    assert plan.review_at_s == 121.0
    plan, _ = policy.decide(Snapshot(121.0, POOL, (often,)), memory)
    assert [grant.job for grant in plan.grants] == [often.id]

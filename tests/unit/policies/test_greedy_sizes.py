"""The policies that size jobs greedily: doubling, throughput, Optimus, AFS-L, elastic 2D-LAS."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.core.model import Gpu, Job, JobId, Phase, Policy, Snapshot
from hermes_ops.core.sizes import StepTime
from hermes_ops.policies import live_policies, make_policy
from tests import builders

NAMES = ("afs", "doubling", "elastic-2d-las", "optimus", "throughput")


class Known:
    """An oracle of the work left; the speed on w GPUs is w to the power of `scaling`."""

    def __init__(self, scaling: float = 0.5, **left: float) -> None:
        self.scaling, self.left = scaling, left

    def remaining_s(self, job: Job, now_s: float) -> float:
        return self.left[str(job.id)]

    remaining_work = remaining_s

    def rate(self, job: Job, placement: tuple[int, ...], batch: int | None = None) -> float:
        return float(sum(placement) ** self.scaling)

    def final_loss(self, job: Job) -> float:
        return 0.0


def job(name: str, **facts: Any) -> Job:
    return builders.job(name, Phase.PENDING, **({"max_gpus": 8} | facts))


def sizes(name: str, jobs: tuple[Job, ...], gpus: int, oracle: Known) -> dict[str, int]:
    policy: Policy[Any] = make_policy(name, {}, {"oracle": oracle})
    plan, _ = policy.decide(Snapshot(0.0, tuple(map(Gpu, range(gpus))), jobs), policy.initial())
    return {str(grant.job): len(grant.gpus) for grant in plan.grants}


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_in_a_pool_without_an_oracle(name: str) -> None:
    assert name in live_policies()
    policy: Policy[Any] = make_policy(name, {})
    world = Snapshot(0.0, tuple(map(Gpu, range(4))), (job("a"), job("b")))
    plan, _ = policy.decide(world, policy.initial())
    assert sum(len(grant.gpus) for grant in plan.grants) == 4


def test_doubling_widens_the_job_with_more_left_and_throughput_the_other() -> None:
    jobs, oracle = (job("a"), job("b")), Known(a=10.0, b=100.0)
    assert sizes("doubling", jobs, 3, oracle) == {"a": 1, "b": 2}
    assert sizes("throughput", jobs, 3, oracle) == {"a": 2, "b": 1}


def test_doubling_serves_by_submission_and_throughput_the_shortest() -> None:
    jobs, oracle = (job("a"), job("b")), Known(a=100.0, b=10.0)
    assert sizes("doubling", jobs, 1, oracle) == {"a": 1}
    assert sizes("throughput", jobs, 1, oracle) == {"b": 1}


@pytest.mark.parametrize("name", ["doubling", "throughput"])
def test_a_job_that_is_no_faster_on_more_gpus_is_not_widened(name: str) -> None:
    assert sizes(name, (job("a"),), 8, Known(scaling=0.0, a=10.0)) == {"a": 1}


def test_afs_serves_the_shortest_first_and_lets_the_longer_one_in_next() -> None:
    jobs, oracle = (job("a"), job("b")), Known(a=100.0, b=10.0)
    assert sizes("afs", jobs, 1, oracle) == {"b": 1}
    assert sizes("afs", jobs, 2, oracle) == {"a": 1, "b": 1}


def test_afs_gives_the_next_gpu_to_the_short_job_of_two_that_scale_alike() -> None:
    assert sizes("afs", (job("a"), job("b")), 3, Known(a=100.0, b=10.0)) == {"a": 1, "b": 2}


def test_elastic_las_serves_what_users_request_in_order_of_attained_service() -> None:
    served = job("a", requested_gpus=4, service_gpu_s=9_000.0)
    fresh = job("b", requested_gpus=4)
    oracle = Known(a=1.0, b=1.0)
    assert sizes("elastic-2d-las", (served, fresh), 4, oracle) == {"b": 4}
    assert sizes("elastic-2d-las", (served, fresh), 8, oracle) == {"a": 4, "b": 4}


def test_elastic_las_shrinks_demoted_jobs_while_many_wait() -> None:
    served = tuple(job(f"a{n}", requested_gpus=4, service_gpu_s=9_000.0) for n in range(13))
    oracle = Known(**{f"a{n}": 1.0 for n in range(13)})
    assert sizes("elastic-2d-las", served, 8, oracle) == {f"a{n}": 1 for n in range(8)}
    few = sizes("elastic-2d-las", served[:12], 8, oracle)
    assert few == {"a0": 4, "a1": 4}


def test_a_plan_holds_until_a_job_arrives_or_ends() -> None:
    policy: Policy[Any] = make_policy("doubling", {}, {"oracle": Known(a=10.0, b=100.0, c=1.0)})
    pool = tuple(map(Gpu, range(3)))
    _, memory = policy.decide(Snapshot(0.0, pool, (job("a"), job("b"))), policy.initial())
    turned: Policy[Any] = make_policy("doubling", {}, {"oracle": Known(a=100.0, b=10.0, c=1.0)})
    plan, memory = turned.decide(Snapshot(5.0, pool, (job("a"), job("b"))), memory)
    assert len(plan.gpus_of(JobId("b"))) == 2
    plan, _ = turned.decide(Snapshot(6.0, pool, (job("a"), job("b"), job("c"))), memory)
    assert len(plan.grants) == 3


def test_optimus_learns_speeds_and_the_steps_left_and_keeps_its_sizes_for_ten_minutes() -> None:
    policy: Policy[Any] = make_policy("optimus", {})
    pool = tuple(map(Gpu, range(4)))
    times = (StepTime(1, 1.0), StepTime(2, 0.6))
    jobs = tuple(job(n, total_steps=s, step_times=times) for n, s in (("a", 100), ("b", 1_000)))
    plan, memory = policy.decide(Snapshot(0.0, pool, jobs), policy.initial())
    assert [len(plan.gpus_of(j.id)) for j in jobs] == [1, 3]
    assert plan.review_at_s == 600.0
    swapped = tuple(replace(j, total_steps=1_100 - (j.total_steps or 0)) for j in jobs)
    plan, memory = policy.decide(Snapshot(599.0, pool, swapped), memory)
    assert [len(plan.gpus_of(j.id)) for j in jobs] == [1, 3]
    plan, _ = policy.decide(Snapshot(600.0, pool, swapped), memory)
    assert [len(plan.gpus_of(j.id)) for j in jobs] == [3, 1]


def test_an_exploring_job_reserves_its_largest_size_and_trains_on_each() -> None:
    policy: Policy[Any] = make_policy("doubling", {"explore": True}, {"oracle": Known(a=1.0, b=1)})
    pool, jobs = tuple(map(Gpu, range(12))), (job("a"), job("b"))
    memory, widths = policy.initial(), []
    for turn in range(4):
        plan, memory = policy.decide(Snapshot(7.1 + turn * 150.0, pool, jobs), memory)
        widths.append([len(plan.gpus_of(j.id)) for j in jobs])
        assert plan.review_at_s == pytest.approx(7.1 + (turn + 1) * 150.0)
    assert widths == [[1, 4], [2, 4], [4, 4], [8, 4]]

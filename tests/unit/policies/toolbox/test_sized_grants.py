from __future__ import annotations

from typing import Any

import pytest

from hermes_ops.core.model import Gpu, Job, JobId, Phase, Policy, Snapshot
from hermes_ops.core.plan import check, diff
from hermes_ops.policies import live_policies, make_policy, sizes_jobs
from hermes_ops.policies.toolbox.sized_grants import Batches, Sizes, SizingProblem
from tests.builders import arriving, world

RANGE: dict[str, Any] = {"min_gpus": 1, "max_gpus": 2}
ALONE = arriving(1, Phase.RUNNING, gpus_held=(0,), **RANGE)


class Asked:
    """Solves problems by a table of sizes, and keeps the jobs that each had."""

    def __init__(self, sizes: dict[JobId, int]) -> None:
        self.sizes, self.jobs = sizes, list[list[JobId]]()

    def __call__(self, problem: SizingProblem) -> tuple[Sizes, Batches]:
        self.jobs.append([job.id for job in problem.jobs])
        return {job.id: self.sizes.get(job.id, 0) for job in problem.jobs}, {}


def test_a_solution_is_asked_for_again_without_the_jobs_that_find_no_place() -> None:
    bound = [arriving(n, nodes=("b",), **RANGE) for n in (2, 3)]
    snapshot = Snapshot(0.0, (Gpu(0, "a"), Gpu(1, "a"), Gpu(2, "b")), (ALONE, *bound))
    asked = Asked({ALONE.id: 1, bound[0].id: 1, bound[1].id: 1})
    grants = SizingProblem.from_snapshot(snapshot).solve_grants(asked)
    assert sorted(grant.job for grant in grants) == [ALONE.id, "s/2"]
    assert asked.jobs == [[ALONE.id, "s/2", "s/3"], [ALONE.id, "s/2"]]


def test_a_running_job_without_a_size_keeps_gpus_that_nobody_gets() -> None:
    problem = SizingProblem.from_snapshot(world(arriving(0, **RANGE), ALONE, gpus=2))
    assert [grant.job for grant in problem.solve_grants(Asked({}))] == [ALONE.id]


def test_a_job_that_stops_to_be_resized_has_a_size_and_no_grant_yet() -> None:
    resized = arriving(0, Phase.STOPPING, **RANGE)
    problem = SizingProblem.from_snapshot(world(resized, ALONE, gpus=2))
    assert [job.id for job in problem.jobs] == [resized.id, ALONE.id]
    asked = Asked({resized.id: 1, ALONE.id: 1})
    assert [grant.job for grant in problem.solve_grants(asked)] == [ALONE.id]
    assert len(asked.jobs) == 1


def test_a_job_that_stops_to_end_leaves_its_gpus_to_the_others() -> None:
    ending = arriving(0, Phase.STOPPING, resumes=False, **RANGE)
    problem = SizingProblem.from_snapshot(world(ending, ALONE, gpus=2))
    assert [job.id for job in problem.jobs] == [ALONE.id]


@pytest.mark.parametrize("name", ["elastic-fifo", "doubling", "throughput", "optimus"])
def test_nobody_grows_into_the_gpus_of_a_job_that_is_being_resized(name: str) -> None:
    policy: Policy[Any] = make_policy(name, {})
    wide = arriving(0, Phase.RUNNING, gpus_held=(0, 1), **RANGE)
    late = arriving(1, Phase.PENDING, **RANGE)
    first = world(wide, late, gpus=2)
    plan, memory = policy.decide(first, policy.initial())
    check(first, plan)
    assert {grant.job: len(grant.gpus) for grant in plan.grants} == {wide.id: 1, late.id: 1}
    (gpu,) = plan.gpus_of(late.id)
    stopping = arriving(0, Phase.STOPPING, **RANGE)
    started = arriving(1, Phase.RUNNING, gpus_held=(gpu,), **RANGE)
    second = world(stopping, started, gpus=2)
    plan, memory = policy.decide(second, memory)
    assert diff(second, plan) == ()
    third = world(arriving(0, Phase.WAITING, **RANGE), started, gpus=2)
    plan, _ = policy.decide(third, memory)
    assert {grant.job: len(grant.gpus) for grant in plan.grants} == {wide.id: 1, late.id: 1}


SIZING = tuple(name for name in live_policies() if sizes_jobs(name))


def sizes(name: str, *jobs: Job, nodes: str) -> dict[str, int]:
    """Return the GPUs of each job in a first decision; a letter of `nodes` is a GPU on it."""
    policy: Policy[Any] = make_policy(name, {})
    snapshot = Snapshot(100.0, tuple(map(Gpu, range(len(nodes)), nodes)), jobs)
    plan, _ = policy.decide(snapshot, policy.initial())
    check(snapshot, plan)
    return {grant.job: len(grant.gpus) for grant in plan.grants}


@pytest.mark.parametrize("name", SIZING)
def test_a_job_whose_node_has_left_the_pool_keeps_no_gpu_from_the_others(name: str) -> None:
    away = arriving(1, Phase.WAITING, nodes=("b",), segments=1)
    assert sizes(name, away, arriving(2), nodes="a") == {"s/2": 1}


@pytest.mark.parametrize("name", SIZING)
def test_a_job_that_is_bound_to_a_node_grows_no_larger_than_that_node(name: str) -> None:
    bound = arriving(1, Phase.WAITING, nodes=("b",), segments=1, max_gpus=4)
    assert 1 <= sizes(name, bound, nodes="aabb").get("s/1", 0) <= 2


@pytest.mark.parametrize("name", SIZING)
def test_a_job_whose_node_is_held_by_one_that_must_not_stop_lets_another_start(name: str) -> None:
    fixed = arriving(0, Phase.RUNNING, gpus_held=(1,), started_s=0.0, preemptible=False)
    bound = arriving(1, Phase.WAITING, nodes=("b",), segments=1)
    assert sizes(name, fixed, bound, arriving(2), nodes="ab") == {"s/0": 1, "s/2": 1}


@pytest.mark.parametrize("name", SIZING)
def test_jobs_that_wait_for_the_same_node_let_others_have_the_gpus_of_the_next(name: str) -> None:
    bound = [arriving(n, Phase.WAITING, nodes=("b",), segments=1) for n in (0, 1, 2)]
    found = sizes(name, *bound, arriving(3), arriving(4), nodes="aab")
    assert sum(found.values()) == 3
    assert {"s/3", "s/4"} <= found.keys()


def test_a_job_without_a_place_at_its_size_gets_the_largest_that_has_one() -> None:
    bound = [arriving(n, Phase.WAITING, nodes=("b",), min_gpus=1, max_gpus=2) for n in (0, 1)]
    snapshot = Snapshot(0.0, tuple(map(Gpu, range(5), "aabbb")), tuple(bound))
    problem = SizingProblem.from_snapshot(snapshot)
    found = problem.solve_sizes(
        lambda subproblem: {job.id: job.max_gpus for job in subproblem.jobs}
    )
    assert found == {bound[0].id: 2, bound[1].id: 1}


@pytest.mark.parametrize("name", SIZING)
def test_a_job_that_loses_a_size_on_its_node_to_another_gets_a_smaller_one(name: str) -> None:
    both = [arriving(n, Phase.WAITING, nodes=("b",), segments=1, max_gpus=2) for n in (0, 1)]
    found = sizes(name, *both, nodes="aabbb")
    assert found.keys() == {"s/0", "s/1"}

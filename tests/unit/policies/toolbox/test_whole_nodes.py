"""Packing: whole nodes for large jobs, best fit for small ones, fewer GPUs for want of room."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, Job, Phase, Snapshot
from hermes_ops.policies.toolbox.sized_grants import SizingProblem
from hermes_ops.policies.toolbox.whole_nodes import cleared, packing
from tests import builders


def problem(*jobs: Job, nodes: int = 2) -> SizingProblem:
    """Return the problem of these jobs on nodes of 4 GPUs."""
    pool = tuple(Gpu(index, f"node-{index // 4}") for index in range(4 * nodes))
    return SizingProblem.from_snapshot(Snapshot(100.0, pool, jobs))


def waiting(name: str, **facts: Any) -> Job:
    return builders.job(name, Phase.PENDING, **({"max_gpus": 8} | facts))


def running(name: str, *gpus: int) -> Job:
    return builders.job(name, Phase.RUNNING, gpus_held=gpus, max_gpus=8)


def placed(world: SizingProblem, **sizes: int) -> dict[str, tuple[int, ...]]:
    by_job = {job.id: sizes[str(job.id)] for job in world.jobs if str(job.id) in sizes}
    placing = packing(world, world.jobs)
    grants = world.grants(by_job, placing=placing, moving=cleared(world, by_job))
    return {str(grant.job): grant.gpus for grant in grants}


def test_a_small_job_gets_the_node_with_the_fewest_free_gpus_that_has_room() -> None:
    world = problem(running("a", 0, 1), running("b", 4, 5, 6), waiting("c"), nodes=3)
    assert placed(world, a=2, b=3, c=1)["c"] == (7,)
    assert placed(world, a=2, b=3, c=2)["c"] == (2, 3)


def test_of_equal_nodes_the_last_takes_a_small_job_and_the_first_a_large_one() -> None:
    assert placed(problem(waiting("a")), a=2) == {"a": (4, 5)}
    assert placed(problem(waiting("a")), a=4) == {"a": (0, 1, 2, 3)}


def test_a_large_job_gets_whole_nodes_from_which_small_ones_move() -> None:
    world = problem(running("a", 0), running("b", 4, 5), waiting("c"))
    assert placed(world, a=1, b=2, c=4) == {"a": (6,), "b": (4, 5), "c": (0, 1, 2, 3)}


def test_a_job_without_room_gets_fewer_gpus() -> None:
    world = problem(running("a", 0, 1, 2), running("b", 4, 5), waiting("c"))
    assert placed(world, a=3, b=2, c=3) == {"a": (0, 1, 2), "b": (4, 5), "c": (6, 7)}


def test_a_job_without_room_for_its_least_size_gets_none() -> None:
    world = problem(running("a", 0, 1, 2), running("b", 4, 5, 6), waiting("c", min_gpus=2))
    assert placed(world, a=3, b=3, c=2) == {"a": (0, 1, 2), "b": (4, 5, 6)}


@pytest.mark.parametrize("size", [5, 6])
def test_a_size_that_does_not_pack_is_spread(size: int) -> None:
    assert len(placed(problem(waiting("a", min_gpus=size)), a=size)["a"]) == size


@given(st.lists(st.sampled_from([1, 2, 3, 4, 8, 12]), max_size=8), st.data())
def test_no_gpu_is_given_twice_and_no_small_job_is_on_two_nodes(
    wanted: list[int], data: st.DataObject
) -> None:
    fitting = [size for place, size in enumerate(wanted) if sum(wanted[: place + 1]) <= 16]
    world = problem(*(waiting(f"j{n}", max_gpus=16) for n in range(len(fitting))), nodes=4)
    first = placed(world, **{f"j{n}": size for n, size in enumerate(fitting)})
    held = [running(name, *gpus) for name, gpus in first.items()]
    sizes = {str(job.id): data.draw(st.sampled_from([1, 2, 3, 4])) for job in held[:4]}
    again = placed(problem(*held, nodes=4), **sizes)
    for grants in (first, again):
        gpus = [gpu for held_gpus in grants.values() for gpu in held_gpus]
        assert len(gpus) == len(set(gpus))
        assert all(
            len({gpu // 4 for gpu in held_gpus}) <= -(-len(held_gpus) // 4)
            for held_gpus in grants.values()
        )

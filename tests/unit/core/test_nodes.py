"""Jobs that may run on some nodes only: counted by node, placed there, never forgotten."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.grant_overrides import StarvedJobs
from hermes_ops.core.model import (
    Gpu,
    Grant,
    Job,
    JobId,
    Phase,
    Plan,
    Point,
    Reason,
    Snapshot,
)
from hermes_ops.core.nodes import NodeCapacity, unplaceable, usable
from hermes_ops.core.plan import check
from hermes_ops.errors import PlanError
from hermes_ops.policies.toolbox.answer import forced_reason
from hermes_ops.policies.toolbox.fill import fill
from tests.builders import arriving

POOL = (Gpu(0, "a"), Gpu(1, "a"), Gpu(2, "b"), Gpu(3, "b"))


def job(number: int, *nodes: str, gpus: tuple[int, ...] = (), **facts: Any) -> Job:
    phase = Phase.RUNNING if gpus else Phase.WAITING
    return arriving(number, phase, **({"gpus_held": gpus, "nodes": nodes} | facts))


def world(*jobs: Job, pool: tuple[Gpu, ...] = POOL) -> Snapshot:
    return Snapshot(100.0, pool, jobs)


def filled(snapshot: Snapshot, *order: Job, **options: Any) -> dict[str, tuple[int, ...]]:
    return {g.job: g.gpus for g in fill(snapshot, order, **options)}


def test_a_plan_that_places_a_job_on_another_node_is_refused() -> None:
    snapshot = world(job(0, "a"))
    check(snapshot, Plan((Grant(JobId("s/0"), (1,)),)))
    with pytest.raises(PlanError, match="its checkpoints are on a"):
        check(snapshot, Plan((Grant(JobId("s/0"), (2,)),)))


def test_a_gang_of_some_nodes_is_of_one_of_them() -> None:
    snapshot = world(job(0, "a", "b", min_gpus=2, max_gpus=2))
    with pytest.raises(PlanError):
        check(snapshot, Plan((Grant(JobId("s/0"), (1, 2)),)))
    assert filled(snapshot, *snapshot.jobs) == {"s/0": (0, 1)}


def test_a_job_that_stays_where_it_should_not_be_is_left_alone() -> None:
    snapshot = world(job(0, "a", gpus=(2,)))
    check(snapshot, Plan((Grant(JobId("s/0"), (2,)),)))


def test_the_last_served_on_the_jobs_own_node_gives_way_to_it() -> None:
    held = [job(n, gpus=(n,)) for n in range(4)]
    bound = job(9, "a")
    found = filled(world(*held, bound), bound, held[3], held[2], held[1], held[0])
    assert found == {"s/9": (0,), "s/1": (1,), "s/2": (2,), "s/3": (3,)}


def test_whoever_may_run_anywhere_leaves_the_node_to_the_one_that_may_not() -> None:
    anywhere, bound = job(0), job(1, "a")
    pool = (Gpu(0, "a"), Gpu(1, "b"))
    assert filled(world(anywhere, bound, pool=pool), anywhere, bound) == {"s/0": (1,), "s/1": (0,)}


def test_a_job_of_two_nodes_leaves_one_of_them_to_whom_has_no_other() -> None:
    pool = (Gpu(0, "a"), Gpu(1, "b"))
    either, held, bound = job(0, "a", "b"), job(1, "a", gpus=(0,)), job(2, "a")
    assert filled(world(either, held, pool=pool), either, held) == {"s/0": (1,), "s/1": (0,)}
    assert filled(world(either, bound, pool=pool), either, bound) == {"s/0": (1,), "s/2": (0,)}


def test_a_job_whose_node_is_busy_or_gone_keeps_nobody_from_the_other() -> None:
    firm = [job(n, gpus=(n,), preemptible=False) for n in (0, 1)]
    busy, gone, other = job(5, "a"), job(6, "c"), job(7)
    snapshot = world(*firm, busy, gone, other)
    assert filled(snapshot, busy, gone, other)["s/7"] == (2,)
    assert "s/5" not in filled(snapshot, busy, gone, other)
    assert filled(snapshot, gone, other, backfill=False, preempt=False)["s/7"] == (2,)
    assert "s/7" not in filled(snapshot, busy, other, backfill=False, preempt=False)


@given(
    sizes=st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)),
    wishes=st.lists(st.sets(st.sampled_from("abc"), min_size=1), max_size=5),
)
def test_nobody_of_one_gpu_is_refused_whom_some_distribution_would_serve(
    sizes: tuple[int, int, int], wishes: list[set[str]]
) -> None:
    nodes = [node for node, size in zip("abc", sizes, strict=True) for _ in range(size)]
    pool = tuple(Gpu(n, node) for n, node in enumerate(nodes))
    capacity = NodeCapacity(world(pool=pool))
    taken: list[set[str]] = []
    for number, wish in enumerate(wishes):
        possible = distributable([*taken, wish], nodes)
        assert capacity.promise(job(number, *sorted(wish))) == possible
        taken += [wish] if possible else []


def distributable(wishes: list[set[str]], nodes: list[str]) -> bool:
    """Whether all of them find a GPU each, by trying everything."""
    choices = product(*(sorted(wish) for wish in wishes))
    return any(all(c.count(n) <= nodes.count(n) for n in c) for c in choices)


def test_a_job_without_nodes_is_not_counted_and_may_use_all() -> None:
    capacity, free = NodeCapacity(world()), {0, 3}
    assert all(capacity.promise(job(n)) for n in range(9))
    assert capacity.usable_for(job(0), free) is free
    assert usable(world(), job(0), free) is free
    assert usable(world(), job(0, "a"), free) == {0}


def test_aging_serves_a_job_on_its_own_node_whoever_has_run_longer_elsewhere() -> None:
    curve = (Point(1, 1.0, 1.0), Point(2, 0.99, 2.0))
    held = [job(n, gpus=(n,), started_s=float(n), curve=curve) for n in range(4)]
    bound = job(9, "b", waiting_since_s=0.0, curve=curve[:1])
    snapshot = Snapshot(5_000.0, POOL, (*held, bound))
    turn = StarvedJobs(snapshot, Plan(tuple(snapshot.retained.values())), {})
    assert turn.serve(bound)
    assert turn.served == [Grant(bound.id, (2,))]


def test_a_bound_gang_reserves_its_own_node_and_the_next_one_is_served_elsewhere() -> None:
    curve = (Point(1, 1.0, 1.0), Point(2, 0.99, 2.0))
    held = [
        job(0, gpus=(0,), preemptible=True, curve=()),
        *(job(n, gpus=(n,), started_s=float(n), curve=curve) for n in range(1, 4)),
    ]
    gang = job(8, "a", min_gpus=2, max_gpus=2, waiting_since_s=0.0)
    other = job(9, "b", waiting_since_s=1.0)
    turn = StarvedJobs(Snapshot(5_000.0, POOL, (*held, gang, other)), Plan(), {})
    assert turn.serve(gang)  # GPU 0 has not finished a slice: it is not to be had now
    assert turn.reserved == {1}
    assert turn.serve(other)
    assert turn.served == [Grant(other.id, (2,))]


def test_a_job_whose_node_has_left_the_pool_is_told_so() -> None:
    gone, small = job(0, "c"), job(1, "a", min_gpus=3, max_gpus=3)
    snapshot = world(gone, small, job(2, "a"))
    assert [unplaceable(snapshot, j) for j in snapshot.jobs] == [True, True, False]
    said = forced_reason(snapshot, gone)
    assert isinstance(said, Reason)
    assert said.text == "waits: its checkpoints are on c, where the pool has no GPU"
    assert "--from-scratch" in said.would_change
    too_large = forced_reason(snapshot, small)
    assert isinstance(too_large, Reason)
    assert too_large.text.endswith("where the pool has no 3 GPUs")
    assert forced_reason(snapshot, snapshot.jobs[2]) is None

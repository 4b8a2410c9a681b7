"""Capacity queues in tiny worlds."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_ops.core.model import Gpu, Job, Phase, Snapshot
from hermes_ops.policies.yarn_cs import YarnCs
from tests import builders


def job(number: int, queue: str, gpus: int = 1, **facts: Any) -> Job:
    facts = {"submitted_s": float(number), "min_gpus": gpus, **facts}
    return builders.job(f"{queue}/{number}", virtual_cluster=queue, **facts)


def running(number: int, queue: str, *gpus: int, **facts: Any) -> Job:
    held: dict[str, Any] = {"phase": Phase.RUNNING, "gpus_held": gpus, "started_s": float(number)}
    return job(number, queue, len(gpus), **(held | facts))


def granted(*jobs: Job, gpus: int = 4, **parameters: Any) -> set[str]:
    snapshot = Snapshot(100.0, tuple(Gpu(i) for i in range(gpus)), jobs)
    plan, _ = YarnCs(**parameters).decide(snapshot, None)
    return {grant.job for grant in plan.grants}


def test_each_queue_gets_its_part_however_long_the_other_line_is() -> None:
    many = [job(n, "a") for n in range(6)]
    assert granted(*many, job(8, "b"), job(9, "b")) == {"a/0", "a/1", "b/8", "b/9"}


def test_a_queue_lends_what_it_does_not_use() -> None:
    assert granted(*[job(n, "a") for n in range(6)], job(9, "b")) == {"a/0", "a/1", "a/2", "b/9"}


def test_the_capacities_count_in_proportion() -> None:
    jobs = [job(n, queue) for n in range(6) for queue in ("a", "b")]
    found = granted(*jobs, capacities={"a": 3.0, "b": 1.0})
    assert found == {"a/0", "a/1", "a/2", "b/0"}


def test_without_capacities_the_weights_count() -> None:
    jobs = [job(n, queue, weight=3.0 if queue == "a" else 1.0) for n in range(6) for queue in "ab"]
    assert granted(*jobs) == {"a/0", "a/1", "a/2", "b/0"}


def test_the_head_of_a_queue_blocks_its_own_queue_only() -> None:
    assert granted(job(0, "a", 3), job(1, "a"), job(2, "b"), job(3, "b")) == {"b/2", "b/3"}


def test_a_job_larger_than_the_pool_blocks_nobody() -> None:
    assert granted(job(0, "a", 9), job(1, "a")) == {"a/1"}


def test_nothing_is_stopped_for_a_queue_below_its_guarantee() -> None:
    borrowed = [running(n, "a", n) for n in range(4)]
    assert granted(*borrowed, job(9, "b")) == {"a/0", "a/1", "a/2", "a/3"}


def test_with_reclaim_the_last_started_beyond_the_guarantee_gives_way() -> None:
    borrowed = [running(n, "a", n) for n in range(4)]
    assert granted(*borrowed, job(9, "b"), reclaim=True) == {"a/0", "a/1", "a/2", "b/9"}


def test_reclaim_never_goes_below_the_guarantee_of_the_other() -> None:
    runs = [running(n, "a", n) for n in range(4)]
    wants = [job(n, "b") for n in range(4)]
    assert granted(*runs, *wants, reclaim=True) == {"a/0", "a/1", "b/0", "b/1"}


def test_reclaim_spares_a_job_that_must_not_be_stopped() -> None:
    runs = [running(n, "a", n, preemptible=n < 3) for n in range(4)]
    assert granted(*runs, job(9, "b"), reclaim=True) == {"a/0", "a/1", "a/3", "b/9"}


def test_the_queues_can_be_the_users() -> None:
    jobs = [job(n, "a", user="ann" if n < 5 else "bob") for n in range(6)]
    assert granted(*jobs, gpus=2) == {"a/0", "a/1"}
    assert granted(*jobs, gpus=2, by="user") == {"a/0", "a/5"}


@pytest.mark.parametrize("parameters", [{"capacities": {"a": 0.0}}, {"by": "colour"}])
def test_impossible_parameters_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"capacities|by"):
        YarnCs(**parameters)


def test_a_job_whose_node_has_left_the_pool_blocks_nobody() -> None:
    assert granted(job(0, "a", nodes=("elsewhere",)), job(1, "a"), gpus=1) == {"a/1"}


def test_a_job_whose_node_is_full_leaves_the_gpus_of_others_to_the_other_queues() -> None:
    snapshot = Snapshot(
        100.0,
        (Gpu(0, "one"), Gpu(1, "two")),
        (running(0, "c", 1), job(1, "a", nodes=("two",)), job(2, "b")),
    )
    plan, _ = YarnCs().decide(snapshot, None)
    assert {grant.job for grant in plan.grants} == {"c/0", "b/2"}

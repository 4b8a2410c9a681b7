"""2D-Gittins in tiny worlds."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

import pytest

from hermes_ops.core.model import Gpu, Job, Phase, Snapshot
from hermes_ops.policies import make_policy
from hermes_ops.policies.two_d_gittins import MOST_LEARNT, GittinsMemory, Sizes, TwoDGittins
from tests.builders import arriving

job = partial(arriving, phase=Phase.WAITING)


def first(*jobs: Job, memory: GittinsMemory | None = None, **parameters: Any) -> str:
    policy = TwoDGittins(**parameters)
    snapshot = Snapshot(100.0, (Gpu(0),), jobs)
    plan, _ = policy.decide(snapshot, policy.initial() if memory is None else memory)
    return plan.grants[0].job


def test_the_published_index_of_the_papers_example_is_2_over_the_mean_of_the_larger_sizes() -> None:
    sizes = Sizes((12.0, 4.0, 8.0))
    found = [2 * sizes.index(attained, inf) for attained in (0.0, 4.0, 8.0, 12.0)]
    assert found == pytest.approx([2 / 8, 2 / 10, 2 / 12, 0.0])


def test_the_textbook_index_rises_where_the_published_one_falls() -> None:
    sizes = Sizes((4.0, 8.0, 12.0))
    assert sizes.textbook_index(0.0, inf) == pytest.approx(1 / 8)
    assert sizes.textbook_index(4.0, inf) == pytest.approx(1 / 6)
    assert sizes.index(4.0, inf) < sizes.index(0.0, inf)


def test_the_index_looks_no_further_than_delta() -> None:
    sizes = Sizes((10.0, 1_000.0))
    assert sizes.index(0.0, 100.0) == pytest.approx(0.5 / ((10 + 100) / 2))
    assert sizes.index(10.0, 100.0) == pytest.approx(1 / 1_000)
    assert sizes.textbook_index(10.0, 100.0) == 0.0


def test_a_delta_below_a_gpu_second_reaches_no_size() -> None:
    assert Sizes((10.0, 10.2)).index(10.1, 0.5) == 0.0


def test_of_one_queue_the_likelier_to_end_soon_goes_first() -> None:
    sizes = (10.0, 10.0, 10.0, 500.0, 600.0)
    fresh, past_the_hump = job(2), job(1, service_gpu_s=50.0)
    assert first(fresh, past_the_hump, sizes_gpu_s=sizes) == "s/2"


def test_a_lower_queue_waits_however_high_its_index() -> None:
    sizes = (10.0, 101.0)
    low = job(1, service_gpu_s=100.0)
    assert first(low, job(2), sizes_gpu_s=sizes, limits_gpu_s=(50.0,), index="textbook") == "s/2"
    assert first(low, job(2), sizes_gpu_s=sizes, limits_gpu_s=(), index="textbook") == "s/1"


def test_with_nothing_known_the_order_is_by_submission() -> None:
    assert first(job(3), job(1), job(2)) == "s/1"


def test_sizes_are_learnt_from_the_jobs_that_end_once_each() -> None:
    policy = TwoDGittins()
    ended = job(1, phase=Phase.ENDED, service_gpu_s=40.0)
    memory = policy.initial()
    for _ in range(3):
        _, memory = policy.decide(Snapshot(100.0, (Gpu(0),), (ended, job(2))), memory)
    assert memory.sizes_gpu_s == (40.0,)
    _, memory = policy.decide(Snapshot(101.0, (Gpu(0),), (job(2),)), memory)
    assert memory.sizes_gpu_s == (40.0,)
    assert memory.counted == ()


def test_a_user_who_gives_sizes_overrules_the_drivers() -> None:
    driver = {"sizes_gpu_s": (1.0,)}
    handed, own = (make_policy("2d-gittins", p, driver) for p in ({}, {"sizes_gpu_s": (2.0,)}))
    assert isinstance(handed, TwoDGittins)
    assert isinstance(own, TwoDGittins)
    assert (handed.given_sizes.gpu_s, own.given_sizes.gpu_s) == ((1.0,), (2.0,))


def test_learnt_sizes_decide_and_are_not_without_bound() -> None:
    memory = GittinsMemory(sizes_gpu_s=(10.0, 10.0, 500.0))
    assert first(job(1, service_gpu_s=50.0), job(2), memory=memory) == "s/2"
    full = GittinsMemory(sizes_gpu_s=(10.0,) * MOST_LEARNT)
    ended = job(1, phase=Phase.ENDED, service_gpu_s=40.0)
    _, after = TwoDGittins().decide(Snapshot(100.0, (Gpu(0),), (ended,)), full)
    assert len(after.sizes_gpu_s) == MOST_LEARNT
    assert after.sizes_gpu_s[-1] == 40.0

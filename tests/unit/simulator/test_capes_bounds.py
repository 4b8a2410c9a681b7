"""The lower bound and the fluid sharing of the jobs of Capes et al."""

from __future__ import annotations

from statistics import fmean

import pytest

from bench.capes_bounds import lower_bound_h, shared_h
from hermes_ops.simulator.capes_workload import CapesSource


def arrivals_s(contention: str, seed: int) -> list[float]:
    return [work.submitted_s for work in CapesSource(contention).draw(seed).workload.jobs]


def test_a_job_alone_is_not_sooner_than_on_its_largest_size() -> None:
    assert lower_bound_h([0.0], 64) == pytest.approx(1.40)


def test_jobs_at_once_cannot_all_have_their_largest_size() -> None:
    assert lower_bound_h([0.0] * 64, 64) > 4.0


def test_shorter_buckets_give_a_higher_bound() -> None:
    arrivals = arrivals_s("moderate", 0)
    assert lower_bound_h(arrivals, 64, 0.05) > lower_bound_h(arrivals, 64, 0.2)


@pytest.mark.parametrize(("contention", "hours"), [("none", 1.40), ("moderate", 1.76)])
def test_the_bound_is_that_of_an_independent_program(contention: str, hours: float) -> None:
    bounds = [lower_bound_h(arrivals_s(contention, seed), 64) for seed in range(20)]
    assert fmean(bounds) == pytest.approx(hours, abs=0.005)


def test_two_jobs_that_share_the_gpus_of_one_take_twice_as_long() -> None:
    assert shared_h([0.0, 0.0], 8, 8) == pytest.approx(2.80)
    assert shared_h([0.0, 0.0], 16, 8) == pytest.approx(1.40)


@pytest.mark.parametrize(
    ("contention", "requested", "hours"),
    [
        ("extreme", 8, 22.31),
        ("extreme", 4, 15.22),
        ("extreme", 2, 12.19),
        ("extreme", 1, 10.58),
        ("moderate", 8, 5.37),
        ("moderate", 4, 3.03),
        ("none", 8, 1.47),
    ],
)
def test_time_shared_rows_are_those_of_an_independent_program(
    contention: str, requested: int, hours: float
) -> None:
    shared = [shared_h(arrivals_s(contention, seed), 64, requested) for seed in range(20)]
    assert fmean(shared) == pytest.approx(hours, abs=0.006)

"""The chance to end as the best, from means and deviations alone."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.policies.frontrunner.forecast import chances, weigh_by_rank

ALL = np.array([True, True])


def test_who_is_expected_lowest_is_likeliest() -> None:
    found = chances(np.array([0.0, 1.0]), np.array([0.5, 0.5]), ALL, inf)
    assert found[0] > 0.8
    assert found.sum() == pytest.approx(1.0)


def test_of_equals_each_has_the_same_chance() -> None:
    found = chances(np.array([0.3, 0.3]), np.array([0.5, 0.5]), ALL, inf)
    assert found[0] == pytest.approx(found[1])


def test_behind_a_leader_an_uncertain_trial_has_more_chance_than_a_sure_one() -> None:
    mean, sd = np.array([0.0, 1.0, 1.0]), np.array([0.1, 0.1, 0.9])
    found = chances(mean, sd, np.array([True, True, True]), inf)
    assert found[2] > 2 * found[1]


def test_a_record_that_no_trial_should_beat_leaves_the_order_of_the_means() -> None:
    """Otherwise trials of which nothing is known would be opened before a known good one ends."""
    found = chances(np.array([0.1, 1.0]), np.array([0.2, 0.6]), ALL, -2.0)
    assert found[0] > found[1]


def test_who_is_over_has_no_chance() -> None:
    found = chances(np.array([0.0, 1.0]), np.array([0.5, 0.5]), np.array([False, True]), -3.0)
    assert found.tolist() == [0.0, pytest.approx(1.0)]
    assert not chances(np.zeros(2), np.ones(2), np.array([False, False]), 0.0).any()


NO = np.nan


def test_of_equal_chances_the_better_ranked_at_its_depth_has_more() -> None:
    found = weigh_by_rank(np.full(3, 1 / 3), np.array([[0.4], [0.2], [0.9]]), np.array([1, 1, 1]))
    assert found.argsort().tolist() == [2, 0, 1]


def test_a_trial_that_has_not_begun_stands_between_the_best_and_the_worst_that_have() -> None:
    losses = np.array([[0.1], [0.2], [0.3], [NO]])
    found = weigh_by_rank(np.full(4, 0.25), losses, np.array([1, 1, 1, 0]))
    assert found[0] > found[3] > found[2]


def test_a_trial_is_ranked_among_all_that_have_passed_its_depth() -> None:
    """Else the last one at a depth would be its best, as the better ones have gone on."""
    losses = np.array([[0.1, 0.1], [0.2, 0.15], [0.9, NO]])
    found = weigh_by_rank(np.full(3, 1 / 3), losses, np.array([2, 2, 1]))
    assert found.argmin() == 2


def test_equal_losses_share_a_rank() -> None:
    found = weigh_by_rank(
        np.full(3, 1 / 3), np.array([[0.4], [0.4], [np.inf]]), np.array([1, 1, 1])
    )
    assert found[0] == found[1] > found[2]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), depths=st.integers(1, 6), count=st.integers(1, 20))
def test_ranks_leave_a_distribution_and_who_is_over_at_none(
    seed: int, depths: int, count: int
) -> None:
    random = np.random.default_rng(seed)
    reached = random.integers(0, depths + 1, count)
    losses = np.where(np.arange(depths) < reached[:, None], random.random((count, depths)), NO)
    chance = random.random(count) * (random.random(count) < 0.7)
    found = weigh_by_rank(chance, losses, reached)
    assert found.sum() == pytest.approx(float(chance.any()))
    assert ((found > 0) == (chance > 0)).all()


@settings(max_examples=60, deadline=None)
@given(
    mean=st.lists(st.floats(-5, 5), min_size=1, max_size=20),
    seed=st.integers(0, 99),
    record=st.sampled_from([inf, 3.0, 0.0, -4.0, -400.0]),
)
def test_chances_are_a_distribution(mean: list[float], seed: int, record: float) -> None:
    random = np.random.default_rng(seed)
    sd = random.choice([0.0, 1e-3, 0.2, 3.0], len(mean))
    found = chances(np.array(mean), sd, np.ones(len(mean), bool), record)
    assert found.sum() == pytest.approx(1.0)
    assert (found > 0).all()

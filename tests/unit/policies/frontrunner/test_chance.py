"""The chance to end as the best, from means and deviations alone."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.policies.frontrunner.forecast import chances

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

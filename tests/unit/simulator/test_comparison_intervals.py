from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.simulator.comparison import Interval, mean_interval, ratio_interval


def test_one_seed_is_its_own_interval() -> None:
    assert mean_interval([3.5]) == Interval(3.5, 3.5, 3.5)


def test_the_interval_is_that_of_resampled_means() -> None:
    # Of 20 ones among 40 values the mean is 0.5, its standard error sqrt(0.25 / 40) = 0.079.
    found = mean_interval([0.0, 1.0] * 20)
    assert found.mean == 0.5
    assert found.low == pytest.approx(0.5 - 1.96 * 0.079, abs=0.02)
    assert found.high == pytest.approx(0.5 + 1.96 * 0.079, abs=0.02)
    assert found == mean_interval([0.0, 1.0] * 20)


def test_of_nothing_there_is_no_mean() -> None:
    with pytest.raises(ValueError, match="no value"):
        mean_interval([])


@settings(deadline=None)
@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30))
def test_the_mean_lies_in_its_interval_and_that_within_the_values(values: list[float]) -> None:
    found = mean_interval(values)
    slack = 1e-9 * max(map(abs, values))
    assert min(values) - slack <= found.low <= found.mean <= found.high <= max(values) + slack


def test_a_ratio_is_the_geometric_mean_of_pairs() -> None:
    found = ratio_interval([1.0, 2.0], [2.0, 16.0])  # 2 and 8 times sooner
    assert found is not None
    assert found.mean == pytest.approx(4.0)
    assert found.low < 4.0 < found.high


def test_a_policy_is_as_soon_as_itself() -> None:
    assert ratio_interval([3.0, 7.0], [3.0, 7.0]) == Interval(1.0, 1.0, 1.0)


def test_nothing_is_a_multiple_of_no_time() -> None:
    assert ratio_interval([0.0], [1.0]) is None

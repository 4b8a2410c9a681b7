from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.simulator.intervals import Interval, mean_interval, ratio_interval


def test_one_seed_is_its_own_interval() -> None:
    assert mean_interval([3.5]) == Interval(3.5, 3.5, 3.5)


def test_the_interval_is_students() -> None:
    # mean 2, deviation 1, three values: t(0.975, 2) = 4.3027
    found = mean_interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.high - 2.0 == pytest.approx(4.30265 / 3**0.5, rel=1e-5)
    assert 2.0 - found.low == pytest.approx(found.high - 2.0)


def test_of_nothing_there_is_no_mean() -> None:
    with pytest.raises(ValueError, match="no value"):
        mean_interval([])


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30))
def test_the_mean_lies_in_its_interval(values: list[float]) -> None:
    found = mean_interval(values)
    assert found.low <= found.mean <= found.high


def test_a_ratio_is_the_geometric_mean_of_pairs() -> None:
    found = ratio_interval([1.0, 2.0], [2.0, 16.0])  # 2 and 8 times sooner
    assert found is not None
    assert found.mean == pytest.approx(4.0)
    assert found.low < 4.0 < found.high


def test_a_policy_is_as_soon_as_itself() -> None:
    assert ratio_interval([3.0, 7.0], [3.0, 7.0]) == Interval(1.0, 1.0, 1.0)


def test_nothing_is_a_multiple_of_no_time() -> None:
    assert ratio_interval([0.0], [1.0]) is None

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.summary import TrialSummary
from hermes_ops.report.canvas import downsample
from hermes_ops.report.parameter_plots import axes_of, parameter_axis, valued
from tests.unit.report.sweeps import conditional, summary, trial

POINTS = st.lists(st.floats(-1e9, 1e9), min_size=0, max_size=400)


def test_far_apart_numbers_stand_on_a_logarithmic_axis() -> None:
    found = parameter_axis("rate", {0: 1e-4, 1: 1e-2, 2: 1e-3})
    assert found.is_log
    assert [found.position(n) for n in range(3)] == pytest.approx([0.0, 1.0, 0.5])
    assert [text for _, text in found.ticks()] == ["0.0001", "0.000316", "0.001", "0.00316", "0.01"]


def test_near_numbers_and_those_at_or_below_nothing_stand_on_a_linear_one() -> None:
    assert not parameter_axis("a", {0: 1, 1: 2}).is_log
    assert not parameter_axis("a", {0: 0.0, 1: 1e6}).is_log
    assert parameter_axis("a", {0: 0, 1: 10, 2: 2.5}).position(2) == 0.25


def test_a_mixture_truth_values_and_what_is_no_number_are_categories() -> None:
    for values in ({0: 1, 1: "auto"}, {0: True, 1: False}, {0: [1], 1: [2]}, {0: math.nan, 1: 1.0}):
        found = parameter_axis("a", values)
        assert len(found.categories) == 2
        assert {found.position(0), found.position(1)} == {0.0, 1.0}


def test_equal_values_stand_in_the_middle_and_an_absent_one_nowhere() -> None:
    found = parameter_axis("a", {0: 3, 1: 3})
    assert (found.position(0), found.position(2), found.varies) == (0.5, None, False)


def test_a_trial_is_on_no_axis_of_a_parameter_that_it_lacks() -> None:
    trials = [conditional(n) for n in range(4)]
    axes = {a.name: set(a.numbers) for a in axes_of(trials, summary(*trials))}
    assert axes["momentum"] == {1, 3}
    assert axes["warm"] == {0, 2}
    assert axes["rate"] == {0, 1, 2, 3}


def test_many_categories_get_few_labels() -> None:
    found = parameter_axis("a", {n: f"value {n:02}" for n in range(50)})
    assert 1 < len(found.ticks()) <= 12


def test_a_failed_trial_and_one_without_a_finite_value_do_not_count() -> None:
    trials = (
        trial(0, 0.1, state="failed"), trial(1, math.inf), TrialSummary(2, "pending"), trial(3, 0.5)
    )  # fmt: skip
    assert [t.number for t in valued(summary(*trials))] == [3]


@given(POINTS, st.integers(4, 60))
def test_a_thinned_curve_keeps_its_ends_its_extremes_and_its_order(
    values: list[float], most: int
) -> None:
    points = tuple((step, value, step) for step, value in enumerate(values, start=1))
    found = downsample(points, most, keep={7})
    assert len(found) <= most + 3  # the ends and what is to be kept come on top
    assert list(found) == sorted(set(found))
    assert set(found) <= set(points)
    if points:
        assert (found[0], found[-1]) == (points[0], points[-1])
        assert {min(v for _, v, _ in found), max(v for _, v, _ in found)} == {
            min(values),
            max(values),
        }
    if len(points) >= 7:
        assert 7 in {step for step, _, _ in found}

"""The speed of training by its number of GPUs, fitted to measured sizes."""

from __future__ import annotations

from math import inf, log2

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hermes_ops.core.all_reduce_speed import AllReduceSpeed


def true_speed(gpus: int) -> float:
    return 1 / (8 / gpus + 0.3 * log2(gpus) / gpus + 2 * (gpus - 1) / gpus**2 + 0.1)


def test_speeds_of_its_own_form_are_found_again_at_sizes_that_were_not_measured() -> None:
    model = AllReduceSpeed.fit(tuple((gpus, true_speed(gpus)) for gpus in (1, 2, 4, 8, 16)))
    assert model.error < 1e-6
    assert model.speed(32) == pytest.approx(true_speed(32), rel=1e-4)


def test_the_error_is_that_of_the_measured_sizes() -> None:
    model = AllReduceSpeed.fit(((1, 1 / 6.37), (2, 1 / 3.78), (4, 1 / 2.21), (8, 1 / 1.40)))
    assert model.measured == 4
    assert 0 < model.error < 0.05


def test_with_one_measured_size_the_speed_up_is_linear() -> None:
    model = AllReduceSpeed.fit(((2, 3.0),))
    assert [model.speed(gpus) for gpus in (1, 2, 8)] == pytest.approx([1.5, 3.0, 12.0])
    assert model.error == pytest.approx(0.0)


def test_with_two_measured_sizes_a_part_of_the_work_does_not_shrink() -> None:
    model = AllReduceSpeed.fit(((1, 1 / 10.0), (2, 1 / 6.0)))
    assert model.speed(1_000) == pytest.approx(1 / 2.0, rel=0.01)


def test_a_speed_is_never_above_that_of_the_weights_that_are_not_negative() -> None:
    model = AllReduceSpeed.fit(((1, 1.0), (2, 3.0), (4, 9.0)))  # more than linear: not its form
    assert min(model.weights) >= 0
    assert model.error > 0.1


def test_a_fit_by_which_one_gpu_takes_no_time_is_linear() -> None:
    model = AllReduceSpeed.fit(((2, 1.0), (3, 1 / 3), (6, 1e-9)))
    assert model.weights[1:] == (0.0, 0.0, 0.0)
    assert model.speed(2) == pytest.approx(2 * model.speed(1))


@pytest.mark.parametrize("speeds", [(), ((0, 1.0),), ((1, 0.0),), ((1, float("nan")),)])
def test_no_speed_or_a_wrong_one_is_refused(speeds: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        AllReduceSpeed.fit(speeds)


@given(
    st.dictionaries(st.integers(1, 16), st.floats(1e-9, 1e9), min_size=1, max_size=5),
    st.integers(1, 64),
)
@example({1: 1 / 3, 2: 1e9, 3: 10.0}, 1)  # a size far too fast: nothing is left on one GPU
def test_a_speed_is_above_0_and_finite_whatever_was_measured(
    measured: dict[int, float], gpus: int
) -> None:
    assert 0 < AllReduceSpeed.fit(tuple(measured.items())).speed(gpus) < inf


@pytest.mark.parametrize("seconds", [(1e9, 1e-9, 1.0), (1e-9, 1e9, 1.0), (1.0, 1e9, 1e-9)])
def test_speeds_that_contradict_each_other_still_give_one_to_each_size(
    seconds: tuple[float, float, float],
) -> None:
    model = AllReduceSpeed.fit(tuple(zip((1, 2, 3), (1 / s for s in seconds), strict=True)))
    assert all(0 < model.speed(gpus) < 1e300 for gpus in (1, 2, 3, 64))

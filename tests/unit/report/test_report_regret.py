from __future__ import annotations

import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.curves import PackedPoints
from hermes_ops.report.background import BestSoFar, Improvement, gpu_seconds
from hermes_ops.report.figures import band, learning_curves, measured_course
from tests.unit.report.sweeps import BEGIN_S, curve, piece, summary, trial


def test_gpu_seconds_add_up_over_gpus_and_stand_still_between_segments() -> None:
    held = [(0.0, 2.0, 1), (1.0, 3.0, 2), (10.0, 11.0, 1)]
    assert gpu_seconds([0.0, 1.0, 2.0, 5.0, 10.5, 99.0], held) == [0.0, 1.0, 4.0, 6.0, 6.5, 7.0]
    assert gpu_seconds([1.0], []) == [0.0]


@pytest.mark.parametrize(("maximize", "values"), [(False, [0.9, 0.4]), (True, [0.9, 1.5])])
def test_a_course_has_each_value_that_was_better_than_all_before(
    maximize: bool, values: list[float]
) -> None:
    seen = [(3.0, 1.5), (1.0, 0.9), (2.0, math.nan), (2.5, 0.4), (4.0, math.inf)]
    found = BestSoFar.from_values(seen, [(0.0, 6.0, 2)], maximize=maximize)
    assert [fall.value for fall in found.improvements] == values
    assert found.improvements[0] == Improvement(1.0, 2.0, 0.9)
    assert (found.end_s, found.end_gpu_s) == (6.0, 12.0)


def test_the_sweeps_own_course_leaves_failed_trials_out_and_counts_open_segments_to_the_end() -> (
    None
):
    facts = summary(trial(0, 0.5), trial(1, 0.1, state="failed"), wall_seconds=10.0)
    pieces = [piece(0, 0.0, 4.0), piece(1, 4.0, None)]
    found = measured_course(facts, {0: curve(0.7, 0.5), 1: curve(0.1)}, pieces, BEGIN_S)
    assert [(f.at_s, f.value) for f in found.improvements] == [(1.0, 0.7), (2.0, 0.5)]
    assert (found.end_s, found.end_gpu_s) == (10.0, 10.0)


@pytest.mark.law
def test_the_pictures_of_many_long_curves_hold_one_of_them_at_a_time() -> None:
    trials, steps = range(50), 4_000
    curves = {
        n: PackedPoints.from_rows((s, 7.0 * s % 11, 1_000 * s) for s in range(1, steps + 1))
        for n in trials
    }
    facts, pieces = summary(*(trial(n, 0.1) for n in trials)), [piece(0, 0.0, 4.0)]
    learning_curves(facts, {0: curves[0]}, pieces)  # imports what it needs
    tracemalloc.start()
    measured_course(facts, curves, pieces, BEGIN_S)
    learning_curves(facts, curves, pieces)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100 * len(trials) * steps


@given(st.lists(st.lists(st.floats(0, 9) | st.just(math.nan), max_size=9), max_size=4))
def test_the_sweeps_own_course_is_that_of_all_values_in_the_order_of_time(
    values: list[list[float]],
) -> None:
    late = {n: [2, 0, 1, 1, 5, 3, 8, 3, 9][: len(of)] for n, of in enumerate(values)}
    curves = {n: tuple(zip(range(9), of, late[n], strict=False)) for n, of in enumerate(values)}
    facts = summary(*(trial(n, 0.1) for n in curves))
    seen = [(ms / 1_000, value) for points in curves.values() for _, value, ms in points]
    expected = BestSoFar.from_values(seen, [], maximize=facts.direction == "maximize")
    assert measured_course(facts, curves, [], 0.0) == expected


def test_a_band_holds_every_line_from_where_all_have_begun() -> None:
    lines = [[(0.0, 9.0), (2.0, 5.0), (4.0, 1.0)], [(1.0, 7.0), (3.0, 6.0)]]
    assert band(lines) == (
        [1.0, 2.0, 3.0, 4.0],
        [7.0, 5.0, 5.0, 1.0],
        [9.0, 7.0, 6.0, 6.0],
    )


def test_a_long_band_keeps_its_end() -> None:
    line = [(float(n), 1.0 / (n + 1)) for n in range(5_000)]
    grid, low, high = band([line, line])
    assert len(grid) < 700
    assert (grid[0], grid[-1]) == (0.0, 4_999.0)
    assert low == high

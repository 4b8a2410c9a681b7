from __future__ import annotations

import math

import pytest

from hermes_ops.report.background import BestSoFar, Improvement, gpu_seconds
from hermes_ops.report.figures import band, measured_course
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

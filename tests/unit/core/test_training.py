from __future__ import annotations

from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Point
from hermes_ops.core.summary import Segment
from hermes_ops.core.training import training


def points(*pairs: tuple[int, float]) -> tuple[tuple[int, float, int], ...]:
    """(step, Unix seconds); the loss of step s is 1/s."""
    return tuple((step, 1.0 / step, round(at_s * 1000)) for step, at_s in pairs)


def held(start_s: float, end_s: float | None, outcome: str = "preempted") -> Segment:
    return Segment(0, 1, (0,), start_s, end_s, outcome=outcome)


def seconds(curve: tuple[Point, ...]) -> list[float]:
    return [round(p.seconds, 6) for p in curve]


def test_the_start_up_before_the_first_point_is_not_training() -> None:
    found = training(points((1, 107.0), (2, 109.0), (3, 111.0)), [held(100, 112.5, "finished")])
    assert seconds(found.curve) == [2.0, 4.0, 6.0]
    assert found.leads_s == (5.0,)
    assert (found.step_s, found.tail_s) == (2.0, 1.5)


def test_the_time_between_segments_and_the_second_start_up_are_not_training() -> None:
    curve = points((1, 105.0), (2, 107.0), (3, 504.0), (4, 506.0))
    found = training(curve, [held(100, 107.0), held(500, 506.0, "finished")])
    assert seconds(found.curve) == [2.0, 4.0, 6.0, 8.0]
    assert found.leads_s == (3.0, 2.0)


def test_a_part_of_an_epoch_before_a_stop_is_credited_to_its_end_after_it() -> None:
    # Stopped 1.5 s after its second point, 0.5 s of them for the checkpoint: half an epoch.
    curve = points((1, 105.0), (2, 107.0), (3, 503.0), (4, 505.0))
    segments = [held(100, 108.5), held(500, 506.0, "finished")]
    found = training(curve, segments, leave_s=0.5)
    assert seconds(found.curve) == [2.0, 4.0, 6.0, 8.0]
    assert found.leads_s == (3.0, 2.0)


def test_a_trial_of_one_point_a_segment_goes_by_the_sweeps_pace() -> None:
    curve = points((1, 105.0), (2, 204.0))
    segments = [held(100, 105.0), held(200, 204.0, "finished")]
    found = training(curve, segments, typical_step_s=2.0)
    assert seconds(found.curve) == [2.0, 4.0]
    assert (found.step_s, found.leads_s) == (None, (3.0, 2.0))


def test_without_any_pace_the_measured_start_up_is_taken_off() -> None:
    found = training(points((1, 105.0)), [held(100, 105.0)], startup_s=4.0)
    assert (seconds(found.curve), found.leads_s) == ([1.0], (None,))
    assert seconds(training(points((1, 105.0)), [held(100, 105.0)]).curve) == [5.0]


def test_a_segment_without_a_point_counts_as_no_training_and_spoils_the_next_lead() -> None:
    curve = points((1, 105.0), (2, 107.0), (3, 303.0))
    segments = [held(100, 107.0), held(200, 205.0), held(300, 303.0, "finished")]
    found = training(curve, segments)
    assert seconds(found.curve) == [2.0, 4.0, 6.0]
    assert found.leads_s == (3.0, None, None)


def test_points_that_are_not_at_every_step_are_spread_over_their_steps() -> None:
    found = training(points((10, 120.0), (20, 130.0)), [held(100, 131.0, "finished")])
    assert (found.step_s, seconds(found.curve)) == (1.0, [10.0, 20.0])


def test_a_maximised_objective_is_a_loss_and_a_nan_stays_one() -> None:
    curve = ((1, 0.5, 101_000), (2, float("nan"), 102_000))
    found = training(curve, [held(100, 102.0)], sign=-1.0).curve
    assert found[0].loss == -0.5
    assert isnan(found[1].loss)


def test_a_trial_without_segments_counts_from_its_first_point() -> None:
    assert seconds(training(points((1, 105.0), (2, 107.0)), ()).curve) == [0.0, 2.0]


def test_a_trial_without_points_has_no_curve() -> None:
    found = training((), [held(100, None, "")])
    assert (found.curve, found.step_s, found.tail_s) == ((), None, None)


@given(
    st.lists(
        st.tuples(st.floats(0.0, 9.0), st.integers(1, 4), st.floats(0.1, 50.0)),
        min_size=1,
        max_size=5,
    ),
    st.floats(0.05, 5.0),
)
def test_whatever_the_stops_a_steady_trial_has_a_steady_curve(
    parts: list[tuple[float, int, float]], step_s: float
) -> None:
    now_s, step, reported, segments = 1000.0, 0, [], []
    for lead_s, steps, gap_s in parts:
        begin_s = now_s
        now_s += lead_s
        for _ in range(steps):
            step, now_s = step + 1, now_s + step_s
            reported.append((step, now_s))
        segments.append(held(begin_s, now_s))
        now_s += gap_s
    found = training(points(*reported), segments, typical_step_s=step_s)
    wanted = [step_s * p.step for p in found.curve]
    assert [p.seconds for p in found.curve] == pytest.approx(wanted, abs=0.01 + 0.001 * step)
    leads = [lead_s for lead_s, _, _ in parts]
    assert list(found.leads_s) == pytest.approx(leads, abs=0.02 * (step + 1))


def test_an_evaluation_before_the_training_is_no_point_of_its_curve() -> None:
    trained = points((1, 107.0), (2, 109.0), (3, 111.0))
    whole = training(trained, [held(100, 112.5, "finished")])
    assert training(((0, 2.3, 101_000), *trained), [held(100, 112.5, "finished")]) == whole

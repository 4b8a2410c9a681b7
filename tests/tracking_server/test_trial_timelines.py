"""A real MLflow server: what a trial's timeline was, across ends, restarts and extensions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hermes_ops.core.summary import Segment
from hermes_ops.tracking import SweepRef, Tracker
from hermes_ops.tracking.trial_timelines import fetch_trial_timelines, with_extension

pytestmark = pytest.mark.integration


class Clock:
    """A time that a test sets."""

    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def held(epoch: int, start_s: float, end_s: float | None) -> Segment:
    return Segment(0, epoch, (0,), start_s, end_s, outcome="preempted")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(tracker: Tracker, clock: Clock) -> Iterator[Tracker]:
    timed = Tracker(tracker.uri, clock=clock)
    yield timed
    timed.close()


@pytest.fixture
def begun(timed: Tracker, request: pytest.FixtureRequest) -> SweepRef:
    return timed.ensure_sweep("timelines", request.node.name, "name: timelines\n")


def test_the_time_between_an_end_and_the_continuation_is_known_of_sweep_and_trial(
    timed: Tracker, begun: SweepRef, clock: Clock
) -> None:
    run_id = timed.open_trial(begun, 0, {})
    timed.save_segments(run_id, [held(1, 1_010.0, 1_020.0)])
    for ended_s, continued_s in ((1_030.0, 5_000.0), (6_000.0, 9_000.0)):
        clock.now_s = ended_s
        timed.finish(run_id, "cancelled")
        clock.now_s = ended_s + 1.0
        timed.finish(begun.parent_run_id, "cancelled")
        clock.now_s = continued_s
        timed.reopen(run_id)
        timed.reopen(begun.parent_run_id)
        timed.reopen(begun.parent_run_id)  # an interrupted resume is repeated
    (timeline,) = fetch_trial_timelines(timed, begun)
    assert timeline.submitted_s == 1_000.0
    assert sorted(timeline.ended_spans) == [
        (1_030.0, 5_000.0), (1_031.0, 5_000.0), (6_000.0, 9_000.0), (6_001.0, 9_000.0),
    ]  # fmt: skip


def test_what_a_trial_held_before_it_restarted_from_scratch_is_its_own(
    timed: Tracker, begun: SweepRef, clock: Clock
) -> None:
    first = timed.open_trial(begun, 0, {})
    timed.save_segments(first, [held(1, 1_010.0, 1_020.0), held(2, 1_030.0, None)])
    clock.now_s = 1_040.0
    timed.finish(first, "failed")
    clock.now_s = 2_000.0
    (trial,) = timed.trials(begun)
    timed.set_aside(trial, "the trial has begun anew from scratch")
    second = timed.open_trial(begun, 0, {})
    timed.save_segments(second, [held(3, 2_010.0, 2_020.0)])
    (timeline,) = fetch_trial_timelines(timed, begun)
    assert [(s.start_s, s.end_s) for s in timeline.segments] == [
        (1_010.0, 1_020.0), (1_030.0, 1_040.0), (2_010.0, 2_020.0),
    ]  # fmt: skip
    assert timeline.ended_spans == ((1_040.0, 2_000.0),)


def test_a_trial_of_an_extension_has_waited_since_the_extension(
    timed: Tracker, begun: SweepRef
) -> None:
    for number in range(3):
        timed.open_trial(begun, number, {})
    for trials, at_s in ((1, 3_000.0), (2, 7_000.0)):
        tags = with_extension(timed.sweep(begun).tags, trials, at_s)
        timed.set_tags(begun.parent_run_id, tags)
    timelines = fetch_trial_timelines(timed, begun)
    assert [timeline.submitted_s for timeline in timelines] == [1_000.0, 3_000.0, 7_000.0]

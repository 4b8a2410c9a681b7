"""The switch cost of scripts without the hook, by the times of their reports and checkpoints."""

from __future__ import annotations

import pytest

from hermes_ops.trial.segment_records import TrialStatus
from hermes_ops.trial.supervisor.switch_cost import PACE_REPORTS, SwitchCost

BEGAN_S = 1_000.0
STARTUP_S, STEP_S = 7.0, 4.0


class Segment:
    """A segment that trains a step in `STEP_S` from its start-up on."""

    def __init__(
        self,
        first_step: int = 0,
        reached: int = 0,
        *,
        saves_on_stop: bool = False,
    ) -> None:
        self.status = TrialStatus(epoch=1, pid=1, started_s=BEGAN_S)
        self.status.saves_on_stop = saves_on_stop
        self.timings: dict[str, float] = {}
        self.first_step = first_step
        self.cost = SwitchCost(self.status, self.timings, first_step=first_step, reached=reached)

    def at(self, step: int) -> float:
        """Return when the step is over."""
        return BEGAN_S + STARTUP_S + STEP_S * (step - self.first_step)

    def report(self, *steps: int) -> None:
        for step in steps:
            self.cost.note_report(self.at(step), step)

    def stop(self, told_s: float, left_s: float, saved_s: float | None = None) -> None:
        self.cost.note_stop(told_s, self.status.checkpointed_s)
        self.status.checkpointed_s = saved_s
        self.cost.note_end(left_s)


def test_the_start_up_is_what_comes_before_the_steps_of_the_first_report() -> None:
    segment = Segment()
    segment.report(1)
    assert segment.timings == {}  # one report tells no pace
    segment.report(2)
    assert segment.timings == {"startup_s": pytest.approx(STARTUP_S)}
    assert segment.status.timings["startup_s"] == pytest.approx(STARTUP_S)


def test_reports_that_are_read_together_count_as_one() -> None:
    segment = Segment()
    segment.cost.note_report(segment.at(2), 1)
    segment.cost.note_report(segment.at(2) + 0.01, 2)
    assert segment.timings == {}
    segment.report(3)
    assert segment.timings["startup_s"] == pytest.approx(STARTUP_S)


def test_a_pause_after_the_first_reports_does_not_change_the_start_up() -> None:
    segment = Segment()
    segment.report(*range(1, PACE_REPORTS + 2))
    segment.cost.note_report(segment.at(500), PACE_REPORTS + 2)
    assert segment.timings["startup_s"] == pytest.approx(STARTUP_S)


def test_steps_that_are_trained_again_are_the_restore_of_the_segment_and_not_its_start_up() -> None:
    segment = Segment(first_step=10, reached=13)
    segment.report(14, 15)
    assert segment.timings["startup_s"] == pytest.approx(STARTUP_S)
    assert segment.timings["restore_s"] == pytest.approx(3 * STEP_S)
    assert segment.status.timings["restore_s"] is None  # the next stop may lose more, or less


def test_what_was_expected_before_holds_until_the_segment_has_a_checkpoint_of_its_own() -> None:
    segment = Segment(first_step=10, reached=13)
    segment.status.timings["repeat_s"] = 300.0
    segment.report(14, 15)
    assert segment.status.timings["repeat_s"] == 300.0
    segment.cost.note_checkpoint(segment.at(20))
    assert segment.status.timings["repeat_s"] == pytest.approx(5 * STEP_S)


def test_a_stop_is_expected_to_lose_half_the_time_between_checkpoints() -> None:
    segment = Segment()
    segment.report(1, 2, 3)
    segment.cost.note_checkpoint(segment.at(5))
    assert segment.status.timings["repeat_s"] == pytest.approx(2.5 * STEP_S)
    segment.cost.note_checkpoint(segment.at(10))
    segment.cost.note_checkpoint(segment.at(15))
    assert segment.status.timings["repeat_s"] == pytest.approx(2.5 * STEP_S)
    assert "restore_s" not in segment.timings  # nothing was trained again


def test_a_script_that_saves_when_it_is_told_to_stop_costs_the_time_until_it_has_left() -> None:
    segment = Segment()
    segment.report(1, 2)
    segment.cost.note_checkpoint(segment.at(2))
    segment.stop(segment.at(3), segment.at(3) + 1.5, saved_s=segment.at(3) + 1.0)
    assert segment.timings["checkpoint_s"] == pytest.approx(1.5)
    assert segment.status.timings["checkpoint_s"] == pytest.approx(1.5)
    assert segment.status.timings["repeat_s"] == 0
    again = Segment(first_step=3, reached=3, saves_on_stop=segment.status.saves_on_stop)
    again.status.timings["repeat_s"] = 0.0
    again.report(4, 5)
    again.cost.note_checkpoint(again.at(40))
    assert again.status.timings["repeat_s"] == 0


def test_a_script_that_dies_of_the_stop_is_expected_to_lose_what_it_had_not_saved() -> None:
    segment = Segment(saves_on_stop=True)
    segment.report(1, 2)
    segment.status.checkpointed_s = segment.at(5)
    segment.stop(segment.at(9), segment.at(9), saved_s=segment.at(5))
    assert not segment.status.saves_on_stop
    assert "checkpoint_s" not in segment.timings


@pytest.mark.parametrize("before_s", [None, 2.0])
def test_a_clock_of_files_that_is_behind_hides_no_checkpoint_of_a_stop(
    before_s: float | None,
) -> None:
    segment = Segment()
    segment.report(1, 2)
    segment.status.checkpointed_s = None if before_s is None else segment.at(2) - before_s
    segment.stop(segment.at(2), segment.at(2) + 0.5, saved_s=segment.at(2) - 0.004)
    assert segment.status.saves_on_stop
    assert segment.timings["checkpoint_s"] == pytest.approx(0.5)


def test_a_script_that_ends_by_itself_tells_nothing_of_stops() -> None:
    segment = Segment()
    segment.report(1, 2)
    segment.status.checkpointed_s = segment.at(2)
    segment.cost.note_end(segment.at(2) + 1.0)
    assert not segment.status.saves_on_stop
    assert segment.status.timings["checkpoint_s"] is None


def test_the_step_of_a_checkpoint_is_the_last_one_reported_before_it() -> None:
    segment = Segment(first_step=10, reached=13)
    assert segment.cost.step_at(segment.at(11)) == 13
    segment.report(14, 15, 16)
    assert segment.cost.step_at(segment.at(15) + 0.1) == 15

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.report import Alternative, Background
from hermes_ops.report.story import number_range, story, switching_gpu_s
from tests.unit.report.sweeps import BEGIN_S, curve, piece, summary, trial

# Trial 0 trains a second a step from 2 s on, is stopped at 5.5 s (decided at 5.2 s), starts again
# at 10 s and trains from 13 s on.
STOPPED = piece(0, 1.0, 5.5, "preempted", last_step=3)
RESUMED = piece(0, 10.0, 16.0, first_step=3, startup_s=1.0, restore_s=0.5)
POINTS = (*curve(0.9, 0.8, 0.7, begin_s=3.0)[:2], (3, 0.7, round(1_000 * (BEGIN_S + 5.0))))
LATER = tuple((step, 0.5, round(1_000 * (BEGIN_S + 10.0 + step))) for step in (4, 5))


def story_of(best_s: float | None = 100.0, **changes: Any) -> str:
    fifo = Alternative("fifo", (100.0, 130.0), (50.0, 50.0), (0.0, 0.0), (130.0, 130.0))
    facts: dict[str, Any] = {"best_finished": 0, "time_to_best_s": best_s}
    facts |= {"alternatives": (replace(fifo, **changes),)}
    background = Background(**facts)
    return " ".join(story(summary(trial(0, 0.5)), background, (0.0, 0.0)))


def test_switching_costs_what_it_took_to_leave_and_to_train_again() -> None:
    told = Background(stops=((0, BEGIN_S + 5.2),), checkpoint_s={0: 0.2})
    low, high = switching_gpu_s({0: (*POINTS, *LATER)}, [RESUMED, STOPPED], told)
    # The first value after the resume comes 4 s after the start; its step takes 1 s, of which at
    # most the 0.5 s before the stop are already trained.
    assert low == pytest.approx(0.2 + 3.5)
    assert high == pytest.approx(0.3 + 3.5)


def test_what_cannot_be_told_of_a_resume_widens_the_bounds() -> None:
    low, high = switching_gpu_s({0: POINTS}, [STOPPED, RESUMED], Background())
    assert [low, high] == pytest.approx([1.5, 6.0 + 0.5])


def test_a_segment_that_left_no_checkpoint_is_lost_whole_on_all_its_gpus() -> None:
    lost = piece(0, 1.0, 5.5, "interrupted", gpus=(0, 1))
    assert switching_gpu_s({0: POINTS}, [lost], Background()) == (9.0, 9.0)


def test_a_retry_after_a_failure_is_no_switch() -> None:
    pieces = [replace(STOPPED, outcome="failed"), RESUMED]
    assert switching_gpu_s({0: (*POINTS, *LATER)}, pieces, Background()) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((100.0, 100.0), "after 1 min 40 s: as soon as in this sweep."),
        ((130.0, 130.0), "after 2 min 10 s: 30 s later than"),
        ((50.0, 70.0), "after 50 s to 1 min 10 s: 30 s to 50 s sooner than"),
        ((90.0, 120.0), "between 10 s sooner and 20 s later than"),
        ((100.0, 120.0), "0 s to 20 s later than"),
    ],
)
def test_a_replay_is_compared_by_its_bounds(found: tuple[float, float], said: str) -> None:
    assert said in story_of(time_to_best_s=found)


def test_a_replay_that_never_ends_a_trial_and_a_sweep_without_a_best_are_said() -> None:
    assert "under fifo, no trial comes to its end." in story_of(time_to_best_s=None)
    assert "Replayed" not in story_of(None)
    nobody = story(summary(trial(0, 0.5, state="failed")), Background(), (0.0, 0.0))
    assert "No trial has finished with a value" in " ".join(nobody)


def test_of_a_sweep_that_runs_nothing_is_said_about_its_best_trial() -> None:
    told = Background(no_alternatives="the sweep has not ended yet.")
    said = story(summary(trial(0, 0.5), trial(1, 0.7, state="running")), told, (0.0, 0.0))
    assert "finished" not in " ".join(said)
    assert said[-1] == "No replay: the sweep has not ended yet."


def test_only_curves_that_were_needed_make_bounds() -> None:
    assert "no replay needs the rest" in story_of(cut_short=(1,))
    assert "its figures are bounds" in story_of(cut_short=(1, 2), needed=(2,))
    assert "did not come to the end" not in story_of()


def test_ranges_read_as_one_number_when_they_are_one() -> None:
    assert [number_range(r) for r in (None, (3.0, 3.0), (1.26, 1_234.4))] == [
        "never",
        "3",
        "1.3 to 1,234",
    ]

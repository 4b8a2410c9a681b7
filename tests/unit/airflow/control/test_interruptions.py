"""Trials that something else than their script ends again and again wait longer each time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.airflow.control.interruptions import delayed_trials, restart_delay_s
from hermes_ops.airflow.control.pool_file import publish, read_view
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.explanation import interruption_lines, stuck_lines
from hermes_ops.airflow.page.pool_view import _problems
from hermes_ops.core.model import Gpu, Plan, Snapshot
from tests.unit.airflow.builders import SWEEP, Journal, running, segment, sweep_with, waiting

ENDED_S = 1000.0


def interrupted(number: int, times: int, **changes: Any) -> TrialRecords:
    facts = {"outcome": "infrastructure", "ended_s": ENDED_S, "reason": "its node is full"}
    return replace(
        waiting(number),
        segment=segment(running=False, interruptions=times, **{**facts, **changes}),
    )


def test_a_first_interruption_costs_no_pause_and_the_next_ones_double_it_up_to_a_minute() -> None:
    assert [restart_delay_s(interrupted(0, n).segment) for n in range(8)] == [
        0,
        0,
        5,
        10,
        20,
        40,
        60,
        60,
    ]
    assert restart_delay_s(interrupted(0, 10**9).segment) == 60


def test_a_trial_that_runs_or_has_ended_waits_for_nothing() -> None:
    assert restart_delay_s(replace(running(0), segment=segment(interruptions=9)).segment) == 0
    assert restart_delay_s(interrupted(0, 9, final="failed").segment) == 0
    assert restart_delay_s(None) == 0


@pytest.mark.parametrize(("now_s", "rest"), [
    (ENDED_S + 9.0, {3}), (ENDED_S + 10.0, set()), (ENDED_S - 9_000.0, set()),
])  # fmt: skip
def test_a_trial_rests_until_its_pause_is_over_or_the_clock_was_set_back(
    now_s: float, rest: set[int]
) -> None:
    assert delayed_trials((interrupted(3, 3), interrupted(4, 1)), now_s) == rest


@pytest.mark.parametrize(("after_s", "offered"), [(1.0, {1}), (21.0, {0, 1})])
def test_gpus_are_offered_to_the_others_while_a_trial_rests(
    after_s: float, offered: set[int]
) -> None:
    applier, world = Journal().applier(), sweep_with(interrupted(0, 4), waiting(1))
    applier.faults.clock = lambda: ENDED_S + after_s
    applier.settle(world, ENDED_S + after_s)
    assert {job.id for job in world.jobs(ENDED_S + after_s)} == {f"{SWEEP}/{n}" for n in offered}


@pytest.mark.parametrize(("times", "is_named"), [(9, False), (10, True), (500, True)])
@pytest.mark.parametrize("is_tried", [False, True])
def test_a_trial_that_is_interrupted_without_end_is_named_in_status_and_on_the_page(
    times: int, is_tried: bool, is_named: bool
) -> None:
    waits = interrupted(3, times)
    tries = replace(running(3), segment=segment(interruptions=times, step=7, steps_at_start=7))
    view = view_of(tries if is_tried else waits)
    assert stuck_lines(view) == stuck_lines(view, [SWEEP]) == _problems(view, [SWEEP])
    assert [f"interrupted {times} times" in line for line in stuck_lines(view)] == [True] * is_named
    assert all("mark its task as failed" in line for line in stuck_lines(view))
    assert stuck_lines(view, ["another"]) == []
    assert stuck_lines(None) == []


@pytest.mark.parametrize("trial", [
    interrupted(3, 50, final="failed"),
    replace(running(3), segment=segment(interruptions=50, step=8, steps_at_start=7)),
])  # fmt: skip
def test_a_trial_with_a_new_step_or_an_end_is_interrupted_no_more(trial: TrialRecords) -> None:
    view = view_of(trial)
    assert stuck_lines(view) == interruption_lines(view, SWEEP, 3) == []


def test_only_ten_of_many_interrupted_trials_are_named_and_the_others_are_counted() -> None:
    lines = stuck_lines(view_of(*(interrupted(n, 10 + n) for n in range(13))))
    assert len(lines) == 11
    assert lines[-1].startswith("3 more trials")


def view_of(*trials: TrialRecords) -> dict[str, Any]:
    publish("gpus", Snapshot(7.0, (Gpu(0),), ()), Plan(), {SWEEP: sweep_with(*trials)}, "p")
    view = read_view("gpus")
    assert view is not None
    return view


def test_the_view_and_explain_say_why_a_trial_rests() -> None:
    text = "was interrupted 4 times in a row before a new step, and waits 20 s"
    view = view_of(interrupted(0, 4))
    assert text in view["sweeps"][SWEEP]["failures"][0]
    (line,) = interruption_lines(view, SWEEP, 0)
    assert text in line
    assert line.endswith("its node is full")

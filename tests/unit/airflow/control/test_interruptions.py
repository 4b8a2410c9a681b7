"""Trials that something else than their script ends again and again wait longer each time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.airflow.control.interruptions import delayed_trials, restart_delay_s
from hermes_ops.airflow.control.pool_file import publish, read_view
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.explanation import interruption_lines
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


def test_the_view_and_explain_say_why_a_trial_rests() -> None:
    publish(
        "gpus", Snapshot(7.0, (Gpu(0),), ()), Plan(), {SWEEP: sweep_with(interrupted(0, 4))}, "p"
    )
    text = "was interrupted 4 times in a row before a new step, and waits 20 s"
    view = read_view("gpus")
    assert view is not None
    assert text in view["sweeps"][SWEEP]["failures"][0]
    (line,) = interruption_lines(view, SWEEP, 0)
    assert text in line
    assert line.endswith("its node is full")

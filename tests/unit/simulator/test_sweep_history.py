from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.errors import HermesError
from hermes_ops.simulator.replay import ReplaySettings, replay
from hermes_ops.simulator.sweep_history import (
    RecordedSweep,
    RecordedTrial,
    fetch_recorded_sweep,
    reconstruct,
)
from hermes_ops.simulator.workload import Costs, Work
from hermes_ops.trial.keras.runtime import ENDING_S
from tests.unit.simulator.recorded_sweeps import (
    BEGIN_S,
    FIRST,
    SECOND,
    Mlflow,
    config,
    piece,
    record,
    seen,
    trial,
)


def work(found: RecordedSweep, number: int) -> Work:
    return next(w for w in found.workload.jobs if w.id == f"digits-1/{number}")


def test_a_trial_trains_between_its_points_and_ends_when_its_script_has_exited() -> None:
    found = reconstruct(record(FIRST, SECOND))
    first = work(found, 0)
    assert [p.seconds for p in first.curve] == [2.0, 4.0]
    assert (first.seconds, first.total_steps, first.cut_short) == (4.5, 4, False)
    assert first.configuration == (("rate", 0.0),)


def test_what_no_trial_measures_of_a_switch_is_the_handover() -> None:
    found = reconstruct(record(FIRST, SECOND))
    # 1.5 s between the trials and 3 s of start, of which a trial knows 2 s.
    expected = Costs(startup_s=2.0, handover_s=1.5, warm_s=1.0, ending_s=ENDING_S)
    assert found.costs == expected
    assert (work(found, 0).costs, work(found, 0).starts) == (found.costs, ((3.0, 2.0, 0.0),))


def test_what_a_stopped_trial_trained_after_its_last_point_is_no_part_of_its_next_start() -> None:
    stopped = trial(
        0,
        points=seen((8, 0.9), (10, 0.8), (22.5, 0.7), (24.5, 0.6)),
        segments=(piece(0, 0, 5, 12, "preempted"), piece(0, 0, 20, 29.5)),  # exits in 5 s
    )
    found = reconstruct(record(stopped, stops=((0, BEGIN_S + 11.5),)))
    # 1.5 of the 2 s after its second point, so that 0.5 of the 2.5 s before its third one.
    assert found.costs.leave_s == 0.5
    assert [begin.lead_s for begin in work(found, 0).starts] == [1.0, 2.0]


def test_each_start_of_a_trial_is_kept_and_later_ones_are_as_it_usually_measured_them() -> None:
    again = replace(
        FIRST,
        points=seen((14, 0.9), (16, 0.8), (33, 0.7), (35, 0.6)),
        segments=(
            piece(0, 0, 5, 16, "preempted"),
            piece(0, 0, 30, 35.5, startup_s=0.25, restore_s=0.5),
        ),
        timings={"startup_s": 0.25, "restore_s": 0.5},
    )
    kept = work(reconstruct(record(again)), 0)
    # 7 s before the first step at first and 1 s later, of which it measured 0.75 s, so that
    # 0.25 s are those of a first batch.
    assert kept.starts == ((7.0, 6.75, 0.0), (1.0, 0.25, 0.5))
    assert kept.start_of(2, resumed=True) == (0.25 + 0.5 + 0.25, 0.25, 0.5)


def test_a_slow_restore_is_that_start_s_alone_and_not_the_usual_one() -> None:
    pieces = (
        piece(0, 0, 5, 10, "preempted", startup_s=1.0),
        piece(0, 0, 20, 26, "preempted", startup_s=1.0, restore_s=0.5),
        piece(0, 0, 30, 36, "preempted", startup_s=1.0, restore_s=0.7),
        piece(0, 0, 40, 55.5, startup_s=3.0, restore_s=9.0),
    )
    points = seen((9, 0.9), (25, 0.8), (35, 0.7), (55, 0.6))
    timings = {"startup_s": 3.0, "restore_s": 9.0}
    kept = work(
        reconstruct(record(replace(FIRST, points=points, segments=pieces, timings=timings))), 0
    )
    assert [begin.restore_s for begin in kept.starts] == [0.0, 0.5, 0.7, 9.0]
    assert (kept.costs.startup_s, kept.costs.restore_s) == (1.0, 0.7)


def test_a_start_up_that_nobody_measured_is_all_that_came_before_the_first_step() -> None:
    silent = replace(SECOND, timings=None, segments=(piece(1, 0, 14, 21.5),))
    found = reconstruct(record(FIRST, silent))
    assert (found.costs.startup_s, found.costs.handover_s) == (3.0, 1.5)


def test_trials_are_submitted_when_the_first_could_begin() -> None:
    found = reconstruct(record(FIRST, SECOND))
    # Training began at 8 s, after 4.5 s of handover and start.
    assert {w.submitted_s for w in found.workload.jobs} == {3.5}


def test_what_was_measured_counts_from_the_start_of_the_sweep() -> None:
    found = reconstruct(record(FIRST, SECOND)).measured
    assert (found.best, found.time_to_best_s, found.policy) == (1, 21.5, "fifo")
    assert found.gpu_hours * 3600 == pytest.approx(15.0)


def test_a_maximised_objective_is_turned_into_a_loss() -> None:
    found = reconstruct(record(FIRST, SECOND, config=config(direction="maximize")))
    assert (found.measured.best, work(found, 0).curve[0].loss) == (0, -0.9)


def test_a_stop_costs_from_its_decision_to_the_next_trial() -> None:
    stopped = replace(FIRST, segments=(piece(0, 0, 5, 12.5, "preempted"),), state="cancelled")
    found = reconstruct(record(stopped, SECOND, stops=((0, BEGIN_S + 12.0),)))
    # 0.5 s until it had left and 1.5 s of handover, which counts already.
    assert found.costs.leave_s == pytest.approx(0.5)


def test_a_replay_gives_a_trial_as_long_to_end_by_itself_as_it_has_live() -> None:
    assert reconstruct(record(FIRST, SECOND)).costs.ending_s == ENDING_S


def test_a_trial_has_its_own_costs_where_it_measured_them() -> None:
    slow = replace(FIRST, timings={"startup_s": 2.5, "checkpoint_s": 0.25})
    found = reconstruct(record(slow, SECOND))
    assert (found.costs.startup_s, work(found, 0).costs.startup_s) == (2.25, 2.5)
    assert work(found, 1).costs.checkpoint_s == 0.25


def test_trials_of_a_script_without_the_hook_repeat_what_those_that_measured_it_do() -> None:
    without = replace(FIRST, timings={"startup_s": 2.0, "repeat_s": 0.75})
    found = reconstruct(record(without, SECOND))
    assert [work(found, number).costs.repeat_s for number in range(2)] == [0.75, 0.75]
    assert reconstruct(record(FIRST, SECOND)).costs.repeat_s is None


@pytest.mark.parametrize("state", ["stopped_early", "cancelled", "failed", "waiting"])
def test_a_trial_that_did_not_finish_is_cut_short_at_its_last_point(state: str) -> None:
    cut = work(reconstruct(record(replace(FIRST, state=state), SECOND)), 0)
    assert (cut.cut_short, cut.seconds, cut.total_steps) == (True, 4.0, 4)


def test_a_trial_that_was_never_opened_is_cut_short_before_its_first_step() -> None:
    never = work(reconstruct(record(FIRST, RecordedTrial(1, "cancelled", None))), 1)
    assert (never.cut_short, never.seconds, never.curve, never.configuration) == (True, 0.0, (), ())


def test_a_trial_that_failed_at_a_value_that_is_not_finite_has_shown_all() -> None:
    nan = replace(FIRST, state="failed", points=seen((10, 0.9), (12, float("nan"))))
    found = reconstruct(record(nan, SECOND))
    assert not work(found, 0).cut_short
    assert found.measured.best == 1


def test_a_sweep_of_nothing_but_unopened_trials_is_a_workload_too() -> None:
    found = reconstruct(record(RecordedTrial(0, "cancelled", None)))
    assert found.workload.jobs[0].seconds == 0.0
    assert (found.costs, found.measured.time_to_best_s) == (Costs(ending_s=ENDING_S), None)


# -- reading ---------------------------------------------------------------------------------------


def test_a_trial_that_misses_a_bound_is_not_the_best_of_the_record_nor_of_a_replay() -> None:
    found = reconstruct(record(FIRST, replace(SECOND, can_be_best=False)))
    assert (found.measured.best, found.measured.time_to_best_s) == (0, 12.5)
    ran = replay(found, ReplaySettings("fifo", {}))
    free = replay(reconstruct(record(FIRST, SECOND)), ReplaySettings("fifo", {}))
    assert ran.time_to_best_s.low is not None
    assert free.time_to_best_s.low is not None
    assert ran.time_to_best_s.low < free.time_to_best_s.low
    assert ran.makespan_s == free.makespan_s


def test_a_sweep_is_read_from_mlflow_alone() -> None:
    mlflow: Any = Mlflow()
    found = fetch_recorded_sweep(mlflow, "digits-1")
    unopened = tuple(RecordedTrial(n, "cancelled", None) for n in (2, 3))
    facts = record(FIRST, SECOND, *unopened, stops=((0, BEGIN_S + 12.0),))
    assert found == reconstruct(facts)
    assert found.gpus == 1


def test_a_sweep_that_runs_or_is_not_known_is_refused() -> None:
    runs: Any = Mlflow(state="running")
    with pytest.raises(HermesError, match="has not ended"):
        fetch_recorded_sweep(runs, "digits-1")
    with pytest.raises(HermesError, match="knows no sweep 'digits-2'"):
        fetch_recorded_sweep(runs, "digits-2")


def test_the_time_in_which_a_sweep_had_ended_is_left_out_of_its_record() -> None:
    mlflow: Any = Mlflow()
    whole = fetch_recorded_sweep(mlflow, "digits-1")
    mlflow.tags["hermes.ended_spans"] = f"[[{BEGIN_S + 12.75}, {BEGIN_S + 13.5}]]"
    resumed = fetch_recorded_sweep(mlflow, "digits-1")
    assert whole.measured.time_to_best_s == 21.5
    assert resumed.measured.time_to_best_s == 20.75
    assert resumed.costs == replace(whole.costs, handover_s=0.75)
    assert [job.seconds for job in resumed.workload.jobs] == [
        job.seconds for job in whole.workload.jobs
    ]

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.config import SweepConfig, parse
from hermes_ops.core.summary import Segment
from hermes_ops.errors import HermesError
from hermes_ops.simulator.recorded import Record, Recorded, Trial, read, recorded
from hermes_ops.simulator.replay import Choice, replay
from hermes_ops.simulator.workload import Costs, Work
from hermes_ops.tracking import LatestMetric, SweepRef, SweepRun, TrialRun
from hermes_ops.trial.runtime import ENDING_S

BEGIN_S = 1_000.0


def config(**changes: Any) -> SweepConfig:
    space = {"rate": {"type": "uniform", "low": 0, "high": 1}}
    file = {
        "name": "digits",
        "objective": {"metric": "loss", "direction": changes.pop("direction", "minimize")},
        "search": {"algorithm": "random", "max_trials": 4, "space": space},
        "trial": {"command": ["python", "train.py", "{rate}"], "directory": "/"},
        "budget": {"max_epochs": changes.pop("max_epochs", 4)},
        **changes,
    }
    return parse(file, "digits-1", None)


def piece(
    trial: int,
    gpu: int,
    start_s: float,
    end_s: float | None,
    outcome: str = "finished",
    **measured: float,
) -> Segment:
    end = None if end_s is None else BEGIN_S + end_s
    return Segment(trial, 1, (gpu,), BEGIN_S + start_s, end, outcome=outcome, **measured)


def seen(*pairs: tuple[float, float]) -> tuple[tuple[int, float, int], ...]:
    """The points of steps 1, 2, ... as (seconds since the sweep's start, value)."""
    return tuple(
        (step, value, round((BEGIN_S + at_s) * 1000))
        for step, (at_s, value) in enumerate(pairs, start=1)
    )


def trial(number: int, state: str = "finished", **changes: Any) -> Trial:
    return Trial(number, state, {"rate": number / 10}, **changes)


def record(*trials: Trial, **changes: Any) -> Record:
    facts: dict[str, Any] = {"config": config(), "policy": "fifo", "gpus": 1, **changes}
    return Record("digits-1", started_s=BEGIN_S, trials=trials, **facts)


# Two trials one after the other on one GPU: each starts for 3 s, trains 2 s an epoch, exits in
# 0.5 s; the GPU is handed over in 1.5 s, and the first one begins 5 s after the sweep.
FIRST = trial(
    0, points=seen((10, 0.9), (12, 0.8)), segments=(piece(0, 0, 5, 12.5),), gpu_seconds=7.5
)
SECOND = trial(
    1,
    points=seen((19, 0.7), (21, 0.6)),
    segments=(piece(1, 0, 14, 21.5, startup_s=2.0),),
    timings={"startup_s": 2.0},
    gpu_seconds=7.5,
)


def work(found: Recorded, number: int) -> Work:
    return next(w for w in found.workload.jobs if w.id == f"digits-1/{number}")


def test_a_trial_trains_between_its_points_and_ends_when_its_script_has_exited() -> None:
    found = recorded(record(FIRST, SECOND))
    first = work(found, 0)
    assert [p.seconds for p in first.curve] == [2.0, 4.0]
    assert (first.seconds, first.total_steps, first.cut_short) == (4.5, 4, False)
    assert first.configuration == (("rate", 0.0),)


def test_what_no_trial_measures_of_a_switch_is_the_handover() -> None:
    found = recorded(record(FIRST, SECOND))
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
    found = recorded(record(stopped, stops=((0, BEGIN_S + 11.5),)))
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
    kept = work(recorded(record(again)), 0)
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
        recorded(record(replace(FIRST, points=points, segments=pieces, timings=timings))), 0
    )
    assert [begin.restore_s for begin in kept.starts] == [0.0, 0.5, 0.7, 9.0]
    assert (kept.costs.startup_s, kept.costs.restore_s) == (1.0, 0.7)


def test_a_start_up_that_nobody_measured_is_all_that_came_before_the_first_step() -> None:
    silent = replace(SECOND, timings=None, segments=(piece(1, 0, 14, 21.5),))
    found = recorded(record(FIRST, silent))
    assert (found.costs.startup_s, found.costs.handover_s) == (3.0, 1.5)


def test_trials_are_submitted_when_the_first_could_begin() -> None:
    found = recorded(record(FIRST, SECOND))
    # Training began at 8 s, after 4.5 s of handover and start.
    assert {w.submitted_s for w in found.workload.jobs} == {3.5}


def test_what_was_measured_counts_from_the_start_of_the_sweep() -> None:
    found = recorded(record(FIRST, SECOND)).measured
    assert (found.best, found.time_to_best_s, found.policy) == (1, 21.5, "fifo")
    assert found.gpu_hours * 3600 == pytest.approx(15.0)


def test_a_maximised_objective_is_turned_into_a_loss() -> None:
    found = recorded(record(FIRST, SECOND, config=config(direction="maximize")))
    assert (found.measured.best, work(found, 0).curve[0].loss) == (0, -0.9)


def test_a_stop_costs_from_its_decision_to_the_next_trial() -> None:
    stopped = replace(FIRST, segments=(piece(0, 0, 5, 12.5, "preempted"),), state="cancelled")
    found = recorded(record(stopped, SECOND, stops=((0, BEGIN_S + 12.0),)))
    # 0.5 s until it had left and 1.5 s of handover, which counts already.
    assert found.costs.leave_s == pytest.approx(0.5)


def test_a_replay_gives_a_trial_as_long_to_end_by_itself_as_it_has_live() -> None:
    assert recorded(record(FIRST, SECOND)).costs.ending_s == ENDING_S


def test_a_trial_has_its_own_costs_where_it_measured_them() -> None:
    slow = replace(FIRST, timings={"startup_s": 2.5, "checkpoint_s": 0.25})
    found = recorded(record(slow, SECOND))
    assert (found.costs.startup_s, work(found, 0).costs.startup_s) == (2.25, 2.5)
    assert work(found, 1).costs.checkpoint_s == 0.25


@pytest.mark.parametrize("state", ["stopped_early", "cancelled", "failed", "waiting"])
def test_a_trial_that_did_not_finish_is_cut_short_at_its_last_point(state: str) -> None:
    cut = work(recorded(record(replace(FIRST, state=state), SECOND)), 0)
    assert (cut.cut_short, cut.seconds, cut.total_steps) == (True, 4.0, 4)


def test_a_trial_that_was_never_opened_is_cut_short_before_its_first_step() -> None:
    never = work(recorded(record(FIRST, Trial(1, "cancelled", None))), 1)
    assert (never.cut_short, never.seconds, never.curve, never.configuration) == (True, 0.0, (), ())


def test_a_trial_that_failed_at_a_value_that_is_not_finite_has_shown_all() -> None:
    nan = replace(FIRST, state="failed", points=seen((10, 0.9), (12, float("nan"))))
    found = recorded(record(nan, SECOND))
    assert not work(found, 0).cut_short
    assert found.measured.best == 1


def test_a_sweep_of_nothing_but_unopened_trials_is_a_workload_too() -> None:
    found = recorded(record(Trial(0, "cancelled", None)))
    assert found.workload.jobs[0].seconds == 0.0
    assert (found.costs, found.measured.time_to_best_s) == (Costs(ending_s=ENDING_S), None)


# -- reading ---------------------------------------------------------------------------------------


class Mlflow:
    """A tracker of one ended sweep of two finished trials, FIRST and SECOND."""

    uri = "http://mlflow"

    def __init__(self, state: str = "finished", second: str = "finished") -> None:
        self.state = state
        self.artifacts = self
        facts = zip((FIRST, SECOND), ("finished", second), strict=True)
        self.runs = tuple(self._run(t, kept) for t, kept in facts)

    def _run(self, trial: Trial, state: str) -> TrialRun:
        step, value, time_ms = trial.points[-1]
        return TrialRun(
            number=trial.number,
            run_id=str(trial.number),
            config=trial.config or {},
            state=state,
            tags={
                "hermes.segment_log": json.dumps([s.to_json() for s in trial.segments]),
                "hermes.gpu_seconds": str(trial.gpu_seconds),
                **({"hermes.startup_s": "2.000"} if trial.timings else {}),
            },
            metrics={"loss": LatestMetric(value, step, time_ms)},
            status="FINISHED",
            started_ms=0,
            ended_ms=1,
        )

    def find_sweep(self, sweep: str, experiment: str | None = None) -> SweepRef | None:
        return SweepRef(sweep, "1", "parent") if sweep == "digits-1" else None

    def sweep(self, ref: SweepRef) -> SweepRun:
        tags = {"hermes.policy": "fifo", "hermes.pool_slots": "1"}
        begin_ms = round(BEGIN_S * 1000)
        return SweepRun(ref, ref.sweep_id, self.state, "FINISHED", tags, begin_ms, begin_ms + 1)

    def trials(self, sweep: SweepRef, *, open_only: bool = False) -> tuple[TrialRun, ...]:
        return self.runs

    def history(self, run_id: str, metric: str) -> tuple[LatestMetric, ...]:
        points = (FIRST, SECOND)[int(run_id)].points
        return tuple(LatestMetric(value, step, time_ms) for step, value, time_ms in points)

    def read(self, run_id: str, path: str) -> bytes:
        return config().to_yaml().encode()

    def read_decisions(self, run_id: str) -> tuple[dict[str, Any], ...]:
        start = {"action": "start", "trial": 0, "time_s": BEGIN_S + 4.0}
        return (start, {"action": "stop", "trial": 0, "time_s": BEGIN_S + 12.0})


def test_a_trial_that_misses_a_bound_is_not_the_best_of_the_record_nor_of_a_replay() -> None:
    found = recorded(record(FIRST, replace(SECOND, can_be_best=False)))
    assert (found.measured.best, found.measured.time_to_best_s) == (0, 12.5)
    ran = replay(found, Choice("fifo", {}))
    free = replay(recorded(record(FIRST, SECOND)), Choice("fifo", {}))
    assert ran.time_to_best_s.low is not None
    assert free.time_to_best_s.low is not None
    assert ran.time_to_best_s.low < free.time_to_best_s.low
    assert ran.makespan_s == free.makespan_s


def test_a_sweep_is_read_from_mlflow_alone() -> None:
    mlflow: Any = Mlflow()
    found = read(mlflow, "digits-1")
    unopened = tuple(Trial(n, "cancelled", None) for n in (2, 3))
    facts = record(FIRST, SECOND, *unopened, stops=((0, BEGIN_S + 12.0),))
    assert found == recorded(facts)
    assert found.gpus == 1


def test_a_sweep_that_runs_or_is_not_known_is_refused() -> None:
    runs: Any = Mlflow(state="running")
    with pytest.raises(HermesError, match="has not ended"):
        read(runs, "digits-1")
    with pytest.raises(HermesError, match="knows no sweep 'digits-2'"):
        read(runs, "digits-2")

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from hermes_ops.core.secondary_metrics import SecondaryMetric
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.report import Background, TrialEnding
from hermes_ops.report.background import Improvement
from hermes_ops.simulator.replay import ReplaySettings, replay
from hermes_ops.simulator.report_background import alternative, background
from hermes_ops.simulator.sweep_history import reconstruct
from hermes_ops.tracking.summary import collect
from hermes_ops.tracking.tracker import require_sweep
from tests.unit.simulator.recorded_sweeps import BEGIN_S, FIRST, SECOND, Mlflow, config, record


def told(mlflow: Any, direction: str = "minimize", **options: Any) -> Background:
    """The background of the sweep that this MLflow holds."""
    ref = require_sweep(mlflow, "digits-1")
    found = collect(mlflow, ref, metric="loss", direction=direction, max_trials=2)
    return background(mlflow, config(direction=direction), found, **options)


def test_an_ended_sweep_has_its_best_and_both_replays() -> None:
    found = told(Mlflow())
    assert (found.policy, found.started_s) == ("fifo", BEGIN_S)
    assert (found.best_finished, found.time_to_best_s) == (1, 21.5)
    assert found.stops == ((0, BEGIN_S + 12.0),)
    assert [a.policy for a in found.alternatives] == ["fifo", "asha"]
    assert found.no_alternatives == ""


def test_a_replays_figures_are_those_of_the_command() -> None:
    record_ = reconstruct(record(FIRST, SECOND))
    fifo, ran = alternative(record_, "fifo"), replay(record_, ReplaySettings("fifo", {}))
    assert fifo.time_to_best_s == (ran.time_to_best_s.low, ran.time_to_best_s.high)
    assert fifo.preemptions == (0.0, 0.0)
    assert ran.gpu_hours.low is not None
    assert fifo.gpu_s == pytest.approx((3_600 * ran.gpu_hours.low,) * 2)
    (course,) = fifo.courses
    assert course.end_gpu_s == pytest.approx(3_600 * ran.gpu_hours.low)
    assert [fall.value for fall in course.improvements] == [0.9, 0.8, 0.7, 0.6]
    assert course.improvements == tuple(sorted(course.improvements, key=lambda fall: fall.at_s))


def test_a_maximised_value_is_the_users_own_in_a_course() -> None:
    found = told(Mlflow(), direction="maximize")
    assert [fall.value for fall in found.alternatives[0].courses[0].improvements] == [0.9]
    assert isinstance(found.alternatives[0].courses[0].improvements[0], Improvement)


def test_a_cut_short_trial_gives_a_course_for_each_extreme() -> None:
    found = told(Mlflow(second="cancelled"))
    fifo = found.alternatives[0]
    assert len(fifo.courses) == 3
    assert fifo.cut_short == (1,)
    assert fifo.makespan_s is not None
    assert fifo.makespan_s[0] < fifo.makespan_s[1]


def test_the_values_of_a_failed_trial_are_in_no_course() -> None:
    found = told(Mlflow(second="failed"))
    values = {f.value for a in found.alternatives for c in a.courses for f in c.improvements}
    assert min(values) == 0.8


def test_the_values_of_a_trial_that_misses_a_bound_are_in_no_course() -> None:
    mlflow: Any = Mlflow()
    ref = require_sweep(mlflow, "digits-1")
    beside = [SecondaryMetric("loss", at_least=0.7)]  # the second trial ends at 0.6
    found = collect(mlflow, ref, metric="loss", direction="minimize", max_trials=2, others=beside)
    assert [t.violates for t in found.summary.trials] == [
        (), ("loss is 0.6, at least 0.7 is allowed",)
    ]  # fmt: skip
    said = background(mlflow, config(), found)
    assert said.best_finished == 0
    values = {f.value for a in said.alternatives for c in a.courses for f in c.improvements}
    assert min(values) == 0.8


def test_a_sweep_that_runs_has_no_replay_and_says_so() -> None:
    found = told(Mlflow(state="running"))
    assert found.alternatives == ()
    assert found.no_alternatives == "the sweep has not ended yet."


def test_a_replay_that_takes_too_long_is_left_out_with_the_command_that_waits() -> None:
    clock = count(step=1.0)
    found = told(Mlflow(), patience_s=3.0, clock=lambda: next(clock))
    assert found.alternatives == ()
    assert "under fifo: the replay takes longer than a report waits" in found.no_alternatives
    assert "`hermes replay digits-1 --policy asha` waits." in found.no_alternatives
    assert found.time_to_best_s == 21.5


def test_one_replay_that_fails_leaves_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_ops.simulator.report_background.POLICIES", ("fastest", "fifo"))
    found = told(Mlflow())
    assert [a.policy for a in found.alternatives] == ["fifo"]
    assert found.no_alternatives.startswith("under fastest: ")
    assert "\n" not in found.no_alternatives


@pytest.mark.parametrize("error", [Unavailable("MLflow is away"), KeyError("trial")])
def test_a_record_that_cannot_be_read_costs_the_replays_alone(error: Exception) -> None:
    class Damaged(Mlflow):
        def read_decisions(self, run_id: str) -> tuple[dict[str, Any], ...]:
            raise error

    found = told(Damaged())
    assert str(error.args[0]) in found.no_alternatives
    assert (found.alternatives, found.policy) == ((), "fifo")


def test_how_a_trial_ended_and_what_its_checkpoints_took_come_from_its_tags() -> None:
    mlflow = Mlflow(second="failed")
    tags = {"hermes.reason": "exit code 1", "hermes.output_tail": "boom",
            "hermes.checkpoint_s": "0.25"}  # fmt: skip
    first, second = mlflow.runs
    mlflow.runs = (first, replace(second, tags={**second.tags, **tags}))
    found = told(mlflow)
    assert found.endings[1] == TrialEnding("exit code 1", "boom")
    assert found.checkpoint_s == {1: 0.25}


def test_an_unknown_number_of_gpus_is_no_traceback() -> None:
    found = reconstruct(record(FIRST, SECOND, gpus=None))
    with pytest.raises(HermesError, match="--gpus"):
        alternative(found, "fifo")

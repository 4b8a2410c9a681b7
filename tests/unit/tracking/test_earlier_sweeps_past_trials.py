from __future__ import annotations

import json
from typing import Any

import pytest

from hermes_ops.core.model import PastTrial, Point
from hermes_ops.core.secondary_metrics import SecondaryMetric
from hermes_ops.core.summary import Segment
from hermes_ops.tracking import LatestMetric, SweepRef, SweepRun, Tracker, TrialRun
from hermes_ops.tracking.earlier_sweeps import past_trials


class Mlflow:
    """The sweeps of one experiment, newest first, each with its trials and their curves."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[str, list[TrialRun]]] = {}
        self.curves: dict[str, tuple[LatestMetric, ...]] = {}

    def add(self, sweep: str, *trials: TrialRun, state: str = "finished") -> None:
        self.held[sweep] = (state, list(trials))

    def trial(
        self, run: str, losses: list[float], rate: float, state: str = "finished", **config: Any
    ) -> TrialRun:
        """A trial that reported each second after a start-up of 3 s."""
        self.curves[run] = tuple(
            LatestMetric(loss, n, 103_000 + 1_000 * n) for n, loss in enumerate(losses, start=1)
        )
        end_s = 103.0 + len(losses)
        segment = Segment(len(self.curves), 1, (0,), 100.0, end_s, 0, len(losses), "finished")
        tags = {"hermes.segment_log": json.dumps([segment.to_json()])}
        number, given = len(self.curves), {"rate": rate, **config}
        latest = {"loss": self.curves[run][-1]} if losses else {}
        return TrialRun(number, run, given, state, tags, latest, "FINISHED", 100_000, 200_000)

    # What the tracker does

    def sweeps(self, experiment_name: str) -> tuple[SweepRun, ...]:
        return tuple(
            SweepRun(SweepRef(name, "1", name), name, state, "FINISHED", {}, 0, 1)
            for name, (state, _) in reversed(self.held.items())
            if experiment_name == "digits"
        )

    def trials(self, sweep: SweepRef, *, open_only: bool = False) -> tuple[TrialRun, ...]:
        return tuple(self.held[sweep.sweep_id][1])

    def history(self, run_id: str, metric: str) -> tuple[LatestMetric, ...]:
        return self.curves[run_id]


@pytest.fixture
def mlflow() -> Mlflow:
    return Mlflow()


def past(mlflow: Any, **changes: Any) -> tuple[PastTrial, ...]:
    asked: dict[str, Any] = {"metric": "loss", "names": ("rate",), **changes}
    tracker: Tracker = mlflow
    return past_trials(tracker, asked.pop("experiment", "digits"), **asked)


def test_a_past_trial_has_its_configuration_and_its_curve_over_seconds_of_training(
    mlflow: Mlflow,
) -> None:
    mlflow.add("a", mlflow.trial("r1", [0.5, 0.25], 0.1))
    curve = (Point(1, 0.5, 1.0), Point(2, 0.25, 2.0))
    assert past(mlflow) == (PastTrial((("rate", 0.1),), curve, 2),)


def test_a_maximised_metric_comes_as_a_loss(mlflow: Mlflow) -> None:
    mlflow.add("a", mlflow.trial("r1", [0.5, 0.75], 0.1))
    assert [p.loss for p in past(mlflow, sign=-1.0)[0].curve] == [-0.5, -0.75]


def test_a_trial_that_was_ended_early_is_one_of_more_steps_than_its_curve(mlflow: Mlflow) -> None:
    mlflow.add(
        "a",
        mlflow.trial("r1", [0.5], 0.1, state="stopped_early"),
        mlflow.trial("r2", [0.5], 0.2),
    )
    assert [p.total_steps for p in past(mlflow, total_steps=20)] == [20, 1]


def test_the_newest_sweeps_come_first_and_no_more_trials_than_wanted(mlflow: Mlflow) -> None:
    mlflow.add("old", *(mlflow.trial(f"o{n}", [0.5], n / 10) for n in range(3)))
    mlflow.add("new", *(mlflow.trial(f"n{n}", [0.5], n) for n in range(2)))
    found = past(mlflow, limit=3)
    assert [dict(p.configuration)["rate"] for p in found] == [0, 1, 0.0]


def test_only_trials_of_the_same_space_with_a_value_of_the_metric_count(mlflow: Mlflow) -> None:
    mlflow.add(
        "a",
        mlflow.trial("r1", [0.5], 0.1, depth=3),
        mlflow.trial("r2", [], 0.2),
        mlflow.trial("r3", [float("nan")], 0.3),
        mlflow.trial("r4", [0.5], 0.4, state="failed"),
        mlflow.trial("r5", [0.5], 0.5),
    )
    assert [dict(p.configuration) for p in past(mlflow)] == [{"rate": 0.5}]


def test_of_bounds_only_trials_whose_last_value_keeps_them_count(mlflow: Mlflow) -> None:
    kept, missed, silent = (mlflow.trial(f"r{n}", [0.5], float(n)) for n in range(3))
    for trial, value in ((kept, 20.0), (missed, 20.1)):
        trial.metrics["latency_ms"] = LatestMetric(value, 1, 103_000)  # type: ignore[index]
    mlflow.add("a", kept, missed, silent)
    keeping = [SecondaryMetric("latency_ms", at_most=20.0)]
    assert [dict(p.configuration) for p in past(mlflow, keeping=keeping)] == [{"rate": 0.0}]
    assert len(past(mlflow)) == 3


def test_a_parameter_under_a_choice_may_be_there_or_not(mlflow: Mlflow) -> None:
    mlflow.add(
        "a",
        mlflow.trial("r1", [0.5], 0.1, momentum=0.9),
        mlflow.trial("r2", [0.5], 0.2),
        mlflow.trial("r3", [0.5], 0.3, depth=3),
    )
    found = past(mlflow, sometimes=("momentum",))
    assert [dict(p.configuration)["rate"] for p in found] == [0.1, 0.2]


def test_a_sweep_that_still_runs_and_another_experiment_teach_nothing(mlflow: Mlflow) -> None:
    mlflow.add("a", mlflow.trial("r1", [0.5], 0.1), state="running")
    assert past(mlflow) == ()
    mlflow.add("b", mlflow.trial("r2", [0.5], 0.1))
    assert len(past(mlflow)) == 1
    assert past(mlflow, experiment="other") == ()

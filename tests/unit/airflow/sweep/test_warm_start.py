from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.sweep import warm_start
from hermes_ops.airflow.sweep.tasks import PlanOperator
from hermes_ops.airflow.sweep.warm_start import add_warm_start, best_first
from hermes_ops.config import parse
from hermes_ops.core.model import PastTrial, Point
from tests.unit.airflow.builders import sweep_file

TRACKER: Any = object()
RUN = "digits-20261129-080000-a1b2"
SPACE = {"rate": {"type": "uniform", "low": 0.0, "high": 1.0}}


def config(warm: int = 2, points: tuple[float, ...] = (), **search: Any) -> Any:
    known = [{"rate": p} for p in points]
    given = {"algorithm": "random", "max_trials": 4, "space": SPACE, "warm_start": warm, **search}
    return parse(sweep_file(search={**given, "points_to_evaluate": known}), "test", None)


def past(rate: float, *losses: float, **others: Any) -> PastTrial:
    curve = tuple(Point(n, loss, float(n)) for n, loss in enumerate(losses, start=1))
    return PastTrial((("rate", rate), *others.items()), curve, 4)


class Asked:
    """What was asked of MLflow's history, and what it answers."""

    def __init__(self, *trials: PastTrial) -> None:
        self.trials, self.questions = trials, list[dict[str, Any]]()

    def __call__(self, tracker: Any, experiment: str, **question: Any) -> Any:
        self.questions.append({"experiment": experiment, **question})
        return self.trials


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> Any:
    def given(*trials: PastTrial) -> Asked:
        asked = Asked(*trials)
        monkeypatch.setattr(warm_start, "past_trials", asked)
        return asked

    return given


def points(found: Any) -> list[float]:
    return [p["rate"] for p in found.search.points_to_evaluate]


def test_the_best_configurations_of_earlier_sweeps_follow_the_known_ones(history: Any) -> None:
    asked = history(past(0.1, 0.9, 0.5), past(0.2, 0.1, 0.8), past(0.3, 0.7), past(0.2, 0.3))
    said: list[str] = []
    assert points(add_warm_start(config(points=(0.9,)), TRACKER, RUN, said.append)) == [
        0.9,
        0.2,
        0.1,
    ]
    assert said[0].startswith("2 configurations of earlier sweeps")
    question = asked.questions[0]
    assert (question["experiment"], question["metric"]) == ("digits", "val_loss")
    assert (question["sign"], question["names"], question["total_steps"]) == (1.0, ("rate",), 20)


def test_a_search_that_goes_on_from_earlier_sweeps_draws_other_configurations_than_they_did(
    history: Any,
) -> None:
    def drawn(run_id: str, **seed: Any) -> Any:
        warm = add_warm_start(config(warm=1, **seed), TRACKER, run_id, print)
        return warm.search.to_sampler().ask(3, ())

    history()
    first = drawn("first")
    history(past(0.1, 0.5))
    assert len({repr(x) for x in (first, drawn("second"), drawn("third"))}) == 3
    assert drawn("second") == drawn("second")
    assert drawn("second", seed=7) == drawn("third", seed=7)


def test_two_sweeps_of_one_run_of_a_dag_draw_different_configurations(history: Any) -> None:
    history(past(0.1, 0.5))
    mlflow: Any = SimpleNamespace(find_sweep=lambda *_: None)

    def drawn(sweep: str) -> Any:
        plan = PlanOperator(task_id="plan", trial_task="trial")
        begun = plan._begin(config(warm=1), mlflow, sweep, {"run_id": "manual:1"})
        return begun.search.to_sampler().ask(3, ())

    assert drawn("train:small:manual:1") != drawn("train:large:manual:1")


def test_earlier_trials_are_asked_to_keep_the_bounds_of_today(history: Any) -> None:
    asked = history(past(0.1, 0.5))
    metrics = [{"name": "latency_ms", "at_most": 20}]
    search = {"algorithm": "random", "max_trials": 4, "space": SPACE, "warm_start": 1}
    add_warm_start(
        parse(sweep_file(search=search, metrics=metrics), "test", None), TRACKER, RUN, print
    )
    assert [m.bound for m in asked.questions[0]["keeping"]] == ["at most 20"]


def test_a_known_configuration_is_not_tried_twice_nor_are_there_more_than_trials(
    history: Any,
) -> None:
    history(*(past(n / 10, n / 10) for n in range(1, 9)))
    warm = add_warm_start(config(warm=9, points=(0.1, 0.5)), TRACKER, RUN, print)
    assert points(warm) == [0.1, 0.5, 0.2, 0.3]


def test_without_warm_start_mlflow_is_not_asked(history: Any) -> None:
    asked = history(past(0.1, 0.5))
    cold = config(warm=0)
    assert add_warm_start(cold, TRACKER, RUN, print) is cold
    assert asked.questions == []


def test_what_the_space_or_the_constraints_exclude_is_left_out() -> None:
    narrow = config(constraints=["rate < 0.5"])
    found = best_first([past(0.7, 0.1), past(2.0, 0.1), past(0.2, 0.4), past(0.1, 0.3)], narrow)
    assert found == [{"rate": 0.1}, {"rate": 0.2}]


def test_a_trial_without_a_finite_value_comes_last() -> None:
    found = best_first([past(0.1, float("inf")), past(0.2, 5.0)], config())
    assert found == [{"rate": 0.2}, {"rate": 0.1}]

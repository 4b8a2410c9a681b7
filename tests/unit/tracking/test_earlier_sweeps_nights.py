from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.core.summary import SweepSummary, TrialSummary
from hermes_ops.tracking.earlier_sweeps import earlier_nights, last_best_config, log_outcome
from hermes_ops.tracking.runs import SweepRef, SweepRun


def run(name: str, started_s: float, state: str = "finished", **tags: str) -> SweepRun:
    own = {"hermes.nightly": "n", "hermes.name": "digits", **tags}
    started_ms = int(started_s * 1_000)
    return SweepRun(SweepRef(name, "7", f"run-{name}"), name, state, "FINISHED", own, started_ms, 1)


class Mlflow:
    """MLflow; its sweeps, newest first, and the tags that were set."""

    def __init__(self, *sweeps: SweepRun) -> None:
        self.found, self.tags = sweeps, {}  # type: tuple[SweepRun, ...], dict[str, dict[str, str]]

    def sweeps(self, experiment: str) -> tuple[SweepRun, ...]:
        assert experiment == "digits"
        return self.found

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        self.tags[run_id] = tags


def best(value: str, config: str) -> dict[str, str]:
    return {"hermes.best": value, "hermes.best_config": config, "hermes.gpu_seconds": "12.5"}


def test_what_a_night_came_to_is_read_back_by_the_next_one() -> None:
    trials = (TrialSummary(0, "finished", {"rate": 0.1, "kind": "a"}, 2.0, 1.0, 5,
                           gpu_seconds=12.5),)  # fmt: skip
    summary = SweepSummary("old", "finished", trials, "loss", "minimize", 60.0)
    mlflow: Any = Mlflow()
    collected: Any = SimpleNamespace(summary=summary, run=run("old", 1.0))
    log_outcome(mlflow, collected)
    after: Any = Mlflow(run("old", 1.0, **mlflow.tags["run-old"]))
    assert last_best_config(after, "digits", "n", "minimize loss") == {"rate": 0.1, "kind": "a"}
    (night,) = earlier_nights(after, run("new", 2.0, "running"), 7)
    assert (night.sweep, night.best, night.gpu_seconds) == ("old", 1.0, 12.5)
    assert night.objective == "minimize loss"


def test_an_ended_sweep_names_its_best_trial_though_that_has_left_no_model() -> None:
    trials = tuple(TrialSummary(n, "finished", {}, best=1.0 - n) for n in (0, 1))
    summary = SweepSummary("old", "finished", trials, "loss", "minimize", 60.0)
    mlflow: Any = Mlflow()
    collected: Any = SimpleNamespace(summary=summary, run=run("old", 1.0))
    log_outcome(mlflow, collected)
    assert mlflow.tags["run-old"]["hermes.best_trial"] == "1"


def test_only_ended_sweeps_of_the_same_schedule_count_and_those_without_a_best_do_not_teach() -> (
    None
):
    mlflow: Any = Mlflow(
        run("under way", 5.0, "running", **best("0", '{"rate": 5}')),
        run("without", 4.0),
        run("by hand", 3.0, **{**best("0", '{"rate": 3}'), "hermes.nightly": "other"}),
        run("good", 2.0, **best("0.5", '{"rate": 2}')),
    )
    assert last_best_config(mlflow, "digits", "n", "minimize loss") == {"rate": 2}
    found = earlier_nights(mlflow, run("tonight", 6.0), 7)
    assert [n.sweep for n in found] == ["without", "good"]
    assert last_best_config(mlflow, "digits", "nobody's", "minimize loss") is None


def test_a_night_with_another_objective_does_not_teach_the_next_one() -> None:
    mlflow: Any = Mlflow(
        run("other metric", 3.0, **best("9", '{"rate": 3}'), **{"hermes.objective": "maximize f1"}),
        run("same", 2.0, **best("0.5", '{"rate": 2}'), **{"hermes.objective": "minimize loss"}),
    )
    assert last_best_config(mlflow, "digits", "n", "minimize loss") == {"rate": 2}
    assert last_best_config(mlflow, "digits", "n", "maximize loss") is None
    found = earlier_nights(mlflow, run("tonight", 6.0), 7)
    assert [n.objective for n in found] == ["maximize f1", "minimize loss"]


def test_as_many_nights_are_compared_as_the_sweep_asks_for_and_none_that_came_later() -> None:
    sweeps = [run(str(n), float(n)) for n in (4, 3, 2, 1)]
    mlflow: Any = Mlflow(*sweeps)
    assert [n.sweep for n in earlier_nights(mlflow, sweeps[1], 1)] == ["2"]
    assert earlier_nights(mlflow, sweeps[0], 0) == ()


def test_a_sweep_of_no_schedule_asks_nothing_of_mlflow() -> None:
    alone = run("alone", 1.0)
    tags = {"hermes.name": "digits"}
    alone = SweepRun(alone.ref, "alone", "finished", "FINISHED", tags, 1, 1)
    mlflow: Any = pytest.fail
    assert earlier_nights(mlflow, alone, 7) == ()

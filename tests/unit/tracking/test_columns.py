from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.core.secondary_metrics import MetricOutcome, SecondaryMetric
from hermes_ops.core.summary import Segment, SweepSummary, TrialSummary
from hermes_ops.errors import Refused, Unavailable
from hermes_ops.tracking import LatestMetric, SweepRef, SweepRun, TrialRun
from hermes_ops.tracking.rest import legal_name
from hermes_ops.tracking.summary import COLUMNS, CollectedSweep, collect, log_columns, log_sizes

RUN = TrialRun(0, "run-0", {}, "finished", {}, {}, "FINISHED", 1_000, 9_000)
TRIAL = TrialSummary(0, "finished", {}, 0.5, 0.4, 3, 2, 1, 7.5)


class Mlflow:
    """Keeps the newest value of each metric, as MLflow's table shows it."""

    def __init__(self, failures: Mapping[str, Exception] | None = None) -> None:
        self.failures = failures or {}
        self.logged: dict[str, list[Mapping[str, Any]]] = {}
        self.tags: dict[str, Mapping[str, str]] = {}

    def log_metrics(self, run_id: str, metrics: Sequence[Mapping[str, Any]]) -> None:
        if run_id in self.failures:
            raise self.failures[run_id]
        self.logged.setdefault(run_id, []).extend(metrics)

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        self.tags[run_id] = tags

    def table(self, run_id: str) -> dict[str, float]:
        return {m["key"]: m["value"] for m in self.logged[run_id]}


def collected(*pairs: tuple[TrialRun, TrialSummary], metrics: Any = ()) -> CollectedSweep:
    runs, trials = zip(*pairs, strict=True)
    unopened = TrialSummary(99, "cancelled")
    summary = SweepSummary(
        "s", "finished", (*trials, unopened), "loss", "minimize", 9.0, metrics=metrics
    )
    sweep = SweepRun(SweepRef("s", "1", "parent"), "s", "finished", "FINISHED", {}, 0, 9_000)
    return CollectedSweep(summary, {}, (), sweep, runs)


def logged(mlflow: Any, *pairs: tuple[TrialRun, TrialSummary]) -> Any:
    log_columns(mlflow, collected(*pairs))
    return mlflow


def test_each_opened_trial_has_its_figures_as_numbers_in_the_table() -> None:
    mlflow = logged(Mlflow(), (RUN, TRIAL))
    assert mlflow.table("run-0") == {
        "hermes.best": 0.4,
        "hermes.final": 0.5,
        "hermes.steps": 3.0,
        "hermes.segments": 2.0,
        "hermes.preemptions": 1.0,
        "hermes.gpu_seconds": 7.5,
    }
    assert len(COLUMNS) == 6
    assert set(mlflow.logged) == {"run-0"}


def test_a_repeated_report_logs_the_very_same_points() -> None:
    mlflow = logged(Mlflow(), (RUN, TRIAL))
    once = list(mlflow.logged["run-0"])
    assert logged(mlflow, (RUN, TRIAL)).logged["run-0"] == [*once, *once]
    assert {point["timestamp"] for point in once} == {9_000}


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_trial_without_a_number_has_no_best(value: float | None) -> None:
    mlflow = logged(Mlflow(), (RUN, replace(TRIAL, best=value, final=value)))
    assert "hermes.best" not in mlflow.table("run-0")
    assert "hermes.final" not in mlflow.table("run-0")
    assert mlflow.table("run-0")["hermes.steps"] == 3.0


def test_a_deleted_run_is_left_out_and_an_absent_server_is_told() -> None:
    other = (replace(RUN, number=1, run_id="run-1"), replace(TRIAL, number=1))
    mlflow = logged(Mlflow({"run-0": Refused("deleted", "INVALID_STATE")}), (RUN, TRIAL), other)
    assert set(mlflow.logged) == {"run-1"}
    with pytest.raises(Unavailable):
        logged(Mlflow({"run-0": Unavailable("away")}), (RUN, TRIAL), other)


def test_metrics_beside_the_objective_have_columns_and_bounds_a_tag() -> None:
    metrics = (SecondaryMetric("top1%", "maximize", at_least=0.9), SecondaryMetric("size"))
    seen = {"top1%": MetricOutcome(0.8, 0.85), "size": MetricOutcome(3.0)}
    missed = replace(TRIAL, metrics=seen, violates=("top1% is 0.8", "and so on"))
    kept = replace(TRIAL, number=1, metrics=seen)
    mlflow: Any = Mlflow()
    other = replace(RUN, number=1, run_id="run-1")
    log_columns(mlflow, collected((RUN, missed), (other, kept), metrics=metrics))
    found = mlflow.table("run-0")
    assert found[legal_name("hermes.best.top1%")] == 0.85
    assert found[legal_name("hermes.final.top1%")] == 0.8
    assert found["hermes.final.size"] == 3.0
    assert "hermes.best.size" not in found
    kept_marks = [mlflow.table(run)["hermes.bounds_kept"] for run in ("run-0", "run-1")]
    assert kept_marks == [0.0, 1.0]
    assert mlflow.tags == {
        "run-0": {"hermes.bounds": "top1% is 0.8; and so on"},
        "run-1": {"hermes.bounds": "kept"},
    }


def test_without_a_bound_there_is_no_tag_of_bounds() -> None:
    mlflow: Any = Mlflow()
    log_columns(mlflow, collected((RUN, TRIAL), metrics=(SecondaryMetric("size"),)))
    assert mlflow.tags == {}
    assert "hermes.bounds_kept" not in mlflow.table("run-0")


def test_the_gpus_and_the_batch_of_each_segment_are_metrics_over_the_steps() -> None:
    segments = [
        Segment(0, 1, (0,), 10.0, 14.0, 0, 4, batch=32),
        Segment(0, 2, (0, 1), 20.0, None, 4, batch=64),
    ]
    mlflow: Any = Mlflow()
    log_sizes(mlflow, "run-0", segments)
    shown = [(m["key"], m["value"], m["step"], m["timestamp"]) for m in mlflow.logged["run-0"]]
    assert shown == [
        ("hermes.workers", 1.0, 0, 10_000),
        ("hermes.workers", 1.0, 4, 14_000),
        ("hermes.batch", 32.0, 0, 10_000),
        ("hermes.batch", 32.0, 4, 14_000),
        ("hermes.workers", 2.0, 4, 20_000),
        ("hermes.batch", 64.0, 4, 20_000),
    ]


def test_of_a_trial_that_has_had_one_gpu_only_no_size_is_a_metric() -> None:
    mlflow: Any = Mlflow()
    log_sizes(mlflow, "run-0", [Segment(0, 1, (3,), 10.0, 14.0, 0, 4)])
    log_sizes(mlflow, "run-0", [])
    assert mlflow.logged == {}


@pytest.mark.parametrize(("state", "wall_s"), [("finished", 9.0), ("running", 60.0)])
def test_a_sweep_that_goes_on_has_taken_the_time_until_now_not_until_its_earlier_end(
    state: str, wall_s: float
) -> None:
    class Server:
        """A server whose only sweep keeps the time of its first end."""

        def sweep(self, ref: SweepRef) -> SweepRun:
            return SweepRun(ref, "s", state, "RUNNING", {}, 0, 9_000)

        def trials(self, ref: SweepRef, *, open_only: bool = False) -> tuple[TrialRun, ...]:
            return ()

    server: Any = Server()
    ref = SweepRef("s", "1", "parent")
    found = collect(
        server, ref, metric="loss", direction="minimize", max_trials=2, clock=lambda: 60.0
    )
    assert found.summary.wall_seconds == wall_s


@pytest.mark.parametrize(
    ("state", "totals"), [("finished", (1, 1, 10.0)), ("running", (3, 2, 21.0))]
)
def test_the_totals_of_a_trial_that_goes_on_are_those_of_now_not_of_its_earlier_end(
    state: str, totals: tuple[int, int, float]
) -> None:
    segments = [
        Segment(0, n, (0,), 100.0 * n, 100.0 * n + 7.0, outcome=outcome)
        for n, outcome in enumerate(("preempted", "preempted", "failed"))
    ]
    tags = {
        "hermes.segments": "1",
        "hermes.preemptions": "1",
        "hermes.gpu_seconds": "10.000",
        "hermes.segment_log": json.dumps([segment.to_json() for segment in segments]),
        "mlflow.parentRunId": "parent",
    }
    run = replace(RUN, state=state, tags=tags)

    class Server:
        """A server with one trial."""

        def sweep(self, ref: SweepRef) -> SweepRun:
            return SweepRun(ref, "s", "running", "RUNNING", {}, 0, None)

        def trials(self, ref: SweepRef, *, open_only: bool = False) -> tuple[TrialRun, ...]:
            return (run,)

        def history(self, run_id: str, metric: str) -> tuple[LatestMetric, ...]:
            return ()

    server: Any = Server()
    ref = SweepRef("s", "1", "parent")
    (trial,) = collect(
        server, ref, metric="loss", direction="minimize", max_trials=1
    ).summary.trials
    assert (trial.segments, trial.preemptions, trial.gpu_seconds) == totals

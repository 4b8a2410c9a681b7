from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.core.summary import SweepSummary, TrialSummary
from hermes_ops.errors import Refused, Unavailable
from hermes_ops.tracking import SweepRef, SweepRun, TrialRun
from hermes_ops.tracking.columns import COLUMNS, log_columns
from hermes_ops.tracking.summary import Collected

RUN = TrialRun(0, "run-0", {}, "finished", {}, {}, "FINISHED", 1_000, 9_000)
TRIAL = TrialSummary(0, "finished", {}, 0.5, 0.4, 3, 2, 1, 7.5)


class Mlflow:
    """Keeps the newest value of each metric, as MLflow's table shows it."""

    def __init__(self, failures: Mapping[str, Exception] | None = None) -> None:
        self.failures = failures or {}
        self.logged: dict[str, list[Mapping[str, Any]]] = {}

    def log_metrics(self, run_id: str, metrics: Sequence[Mapping[str, Any]]) -> None:
        if run_id in self.failures:
            raise self.failures[run_id]
        self.logged.setdefault(run_id, []).extend(metrics)

    def table(self, run_id: str) -> dict[str, float]:
        return {m["key"]: m["value"] for m in self.logged[run_id]}


def collected(*pairs: tuple[TrialRun, TrialSummary]) -> Collected:
    runs, trials = zip(*pairs, strict=True)
    unopened = TrialSummary(99, "cancelled")
    summary = SweepSummary("s", "finished", (*trials, unopened), "loss", "minimize", 9.0)
    sweep = SweepRun(SweepRef("s", "1", "parent"), "s", "finished", "FINISHED", {}, 0, 9_000)
    return Collected(summary, {}, (), sweep, runs)


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

"""Metrics beside the objective: their bounds, and which trial is the best under them."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from hermes_ops.core.secondary_metrics import (
    MetricOutcome,
    SecondaryMetric,
    violations,
    why_no_best,
)
from hermes_ops.core.summary import SweepSummary, TrialSummary

LATENCY = SecondaryMetric("latency_ms", "minimize", at_most=20.0)


def trial(number: int, best: float | None, latency: float | None, **changes: Any) -> TrialSummary:
    facts = {"state": "finished", "config": {}, "final": best, **changes}
    missed = violations([LATENCY], {"latency_ms": latency})
    return TrialSummary(
        number,
        best=best,
        metrics={"latency_ms": MetricOutcome(latency, latency)},
        violates=missed,
        **facts,
    )


def sweep(*trials: TrialSummary) -> SweepSummary:
    return SweepSummary("s", "finished", trials, "loss", "minimize", 1.0, metrics=(LATENCY,))


@pytest.mark.parametrize("value", [20.0, -5.0, 0.0, -inf])
def test_a_value_up_to_the_bound_keeps_it(value: float) -> None:
    assert LATENCY.violation(value) == ""


@pytest.mark.parametrize("value", [20.000001, inf, nan, None])
def test_a_value_beyond_the_bound_and_no_value_miss_it(value: float | None) -> None:
    assert "at most 20 is allowed" in LATENCY.violation(value)


def test_both_bounds_hold_at_once() -> None:
    within = SecondaryMetric("rate", None, at_most=0.5, at_least=0.1)
    missed = [value for value in (0.05, 0.1, 0.5, 0.6) if within.violation(value)]
    assert missed == [0.05, 0.6]
    assert within.violation(0.05) == "rate is 0.05, at least 0.1 and at most 0.5 is allowed"


def test_a_metric_without_a_bound_is_never_missed() -> None:
    assert violations([SecondaryMetric("accuracy", "maximize")], {}) == ()


@pytest.mark.parametrize(
    ("direction", "best"), [("minimize", 1.0), ("maximize", 3.0), (None, None)]
)
def test_the_best_value_is_that_of_the_direction_and_the_last_is_the_last(
    direction: str | None, best: float | None
) -> None:
    seen = SecondaryMetric("m", direction).outcome([2.0, 1.0, inf, 3.0, nan, 2.5])
    assert seen == MetricOutcome(2.5, best)
    assert SecondaryMetric("m", direction).outcome([]) == MetricOutcome()


def test_the_least_loss_is_not_the_best_where_its_trial_misses_a_bound() -> None:
    found = sweep(trial(0, 0.1, 31.0), trial(1, 0.5, 20.0), trial(2, 0.4, None), trial(3, 0.6, 1.0))
    document = found.to_document()
    assert document["best"] == document["trials"][1]
    assert document["best"]["metrics"] == {"latency_ms": {"last": 20.0, "best": 20.0}}
    assert [len(t["violates"]) for t in document["trials"]] == [1, 0, 1, 0]


def test_where_no_trial_keeps_the_bounds_there_is_no_best_and_the_reason_names_values() -> None:
    document = sweep(*(trial(n, 0.1, 30.0 + n) for n in range(5))).to_document()
    assert document["best"] is None
    said = why_no_best(document)
    assert "trial 0: latency_ms is 30, at most 20 is allowed" in said
    assert "and 2 more" in said


def test_a_trial_that_reported_no_objective_is_not_said_to_miss_a_bound() -> None:
    document = sweep(trial(0, None, None), trial(1, 0.1, 30.0, state="failed")).to_document()
    assert why_no_best(document, "loss") == "No trial that did not fail has reported loss."


def test_a_document_without_such_metrics_has_no_keys_of_them() -> None:
    assert "violates" not in TrialSummary(0, "finished", {}, 0.5, 0.5).to_document()
    assert "metrics" not in TrialSummary(0, "finished", {}, 0.5, 0.5).to_document()

"""Metrics beside the objective, from a script's output to the best trial, through the stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

MILLISECONDS = [10, 15, 40]  # the slowest has the least loss
LATENCY = {"name": "latency_ms", "pattern": "in (?P<value>\\S+) ms"}
SIZE = {"name": "size_mb"}
HABITS = ["baseline", "batches", "thousands", "mlflow"]


def bounded(harness: Any, at_most: float) -> Any:
    metrics = [{**LATENCY, "at_most": at_most}, SIZE]
    space = {"milliseconds": MILLISECONDS}
    command = ("latency.py", "{milliseconds}")
    return harness.config("bounded", space, *command, metrics=metrics, budget={"max_epochs": 3})


@pytest.fixture(scope="module")
def others(lab: Any, harness: Any) -> dict[str, Any]:
    """Sweeps that are looked at once they have ended; meanwhile the tests go on."""
    space, budget = {"habit": HABITS}, {"max_epochs": 3}
    habits = harness.config("habits", space, "habits.py", "{habit}", budget=budget)
    return {"none": lab.start(bounded(harness, 5)), "habits": lab.start(habits)}


@pytest.fixture(scope="module")
def told(lab: Any, harness: Any, others: Any) -> Any:
    """A sweep whose trial of the least loss is too slow, and the document that was printed."""
    file = lab.file(bounded(harness, 20))
    said = lab.hermes("sweep", "run", str(file), "--json")
    assert said.returncode == 0, said.stderr
    document = json.loads(said.stdout)
    return harness.Sweep(lab, document["sweep"]), document


def test_the_least_loss_is_not_the_best_where_it_misses_a_bound(told: Any) -> None:
    _, document = told
    trials = document["trials"]
    assert [t["state"] for t in trials] == ["finished"] * 3
    least = min(trials, key=lambda t: t["best"])
    assert least["number"] == 2
    assert least["violates"] == ["latency_ms is 40, at most 20 is allowed"]
    assert document["best"] == trials[1]
    assert trials[1]["metrics"] == {
        "latency_ms": {"last": 15.0, "best": 15.0},
        "size_mb": {"last": 7.0, "best": None},
    }


def test_mlflow_has_the_metrics_as_columns_and_says_which_trial_keeps_the_bound(told: Any) -> None:
    sweep, _ = told
    assert sweep.tag(1, "hermes.bounds") == "kept"
    assert "latency_ms is 40" in sweep.tag(2, "hermes.bounds")
    for number, kept in ((0, 1.0), (1, 1.0), (2, 0.0)):
        (run,) = sweep.runs()[number]
        found = {m["key"]: m["value"] for m in run["data"]["metrics"]}
        assert found["hermes.bounds_kept"] == kept
        assert found["hermes.best.latency_ms"] == MILLISECONDS[number]
        assert found["hermes.final.size_mb"] == 7
        steps = [step for step, _ in sweep.lab.history(run["info"]["run_id"], "latency_ms")]
        assert steps == [1, 2, 3]
    assert sweep.parent["tags"]["hermes.best"] == repr(sweep.document()["best"]["best"])


def test_the_report_and_the_table_at_the_end_mark_the_trial_that_misses_it(
    told: Any, lab: Any, tmp_path: Path
) -> None:
    sweep, _ = told
    assert lab.hermes("sweep", "report", sweep.id, "--out", str(tmp_path)).returncode == 0
    page = (tmp_path / "report.html").read_text()
    assert '<tr id="trial-1" class="best">' in page
    assert "latency_ms is 40, at most 20 is allowed" in page
    watched = lab.hermes("sweep", "watch", sweep.id)
    assert "Best: trial 1" in watched.stdout
    assert "Trial 2 misses a bound: latency_ms is 40" in watched.stdout


def test_a_sweep_in_which_no_trial_keeps_the_bound_has_no_best_and_says_why(
    lab: Any, others: Any
) -> None:
    sweep = others["none"]
    sweep.await_end()
    assert sweep.state == "failed"
    assert "No trial keeps every bound" in sweep.log("report")
    assert set(sweep.states().values()) == {"finished"}
    watched = lab.hermes("sweep", "watch", sweep.id, "--json")
    assert watched.returncode == 1
    assert json.loads(watched.stdout)["best"] is None
    assert "hermes.best" not in sweep.parent["tags"]


@pytest.mark.parametrize("first", ["loss", "latency"])
def test_a_target_ends_the_sweep_once_the_bound_is_kept_too_whichever_is_reported_first(
    lab: Any, harness: Any, first: str
) -> None:
    objective = {"metric": "loss", "target": 1}
    metrics = [{"name": "latency_ms", "at_most": 20}, SIZE]
    space = {"order": ["never", first]}
    sweep = lab.run(
        harness.config(
            "settling", space, "settling.py", "{order}", objective=objective, metrics=metrics
        )
    )
    assert sweep.state == "success"
    expected = "trial 1 reached objective.target 1: loss 0.5, latency_ms 15 (at most 20)"
    assert sweep.parent["tags"]["hermes.reached"] == expected
    assert set(sweep.states().values()) == {"stopped_early"}
    best = sweep.document()["best"]
    assert (best["number"], best["best"], best["violates"]) == (1, 0.5, [])
    assert sweep.live() == []


def test_curves_are_those_that_scripts_mean_and_none_is_cut_off_at_its_last_epoch(
    lab: Any, others: Any
) -> None:
    sweep = others["habits"]
    sweep.await_end()
    assert sweep.state == "success"
    curve = [(1, 9500.0), (2, 5000.0), (3, 3500.0)]
    for number, habit in enumerate(HABITS):
        (run,) = sweep.runs()[number]
        before = [(0, 9.5)] if habit == "baseline" else []
        assert lab.history(run["info"]["run_id"], "loss") == before + curve, habit
        folder = lab.home / "sweeps" / sweep.id / "trials" / str(number)
        assert (folder / "saved").read_text() == habit
    assert [t["steps"] for t in sweep.document()["trials"]] == [3, 3, 3, 3]
    assert (run["info"]["status"], run["info"]["run_name"]) == ("FINISHED", "trial-003")
    assert run["params"]["habit"] == "mlflow"
    assert int(run["params"]["process"]) > 1
    assert [step for step, _ in lab.history(run["info"]["run_id"], "batch_loss")] == [100, 200, 300]

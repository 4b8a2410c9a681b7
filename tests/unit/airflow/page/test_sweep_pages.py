from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from hermes_ops.airflow.metadata_rows import PastRun, RunRow
from hermes_ops.core.secondary_metrics import SecondaryMetric
from hermes_ops.errors import Refused
from tests.unit.airflow.builders import SWEEP, sweep_record
from tests.unit.airflow.page.builders import (
    Database,
    Get,
    Mlflow,
    Text,
    Users,
    decide,
    ended,
    read,
    sweep_run,
    trial_run,
)


def test_a_sweep_that_has_ended_stays_on_the_page_with_its_best_and_its_links(
    get: Get, database: Database, mlflow: Mlflow
) -> None:
    database.runs = ()
    database.ended = [ended(2), ended(1, "failed")]
    database.tasks["hermes_sweep", "old-2", "trial"] = {"success": 5, "skipped": 2, "": 1}
    mlflow.runs = {"parent-2": sweep_run(2, "cancelled", **{"hermes.best": "0.0123456"}),
                   "parent-1": sweep_run(1, "failed")}  # fmt: skip
    decide("start", "it was the first", sweep="old-2")
    answer = get()
    seen = read(answer)
    assert re.search(
        r"old-2 cancelled 1970-01-01 00:00:20 UTC 30 s 7 of 8 0\.01235 val_loss "
        r"compare trials report old-1 failed",
        seen,
    ), seen
    assert "it was the first" in seen.partition("Last decisions")[2]
    assert "experiments/7/runs/parent-2/artifacts/report/report.html" in answer.text


def test_a_resumed_sweep_is_shown_with_its_first_start_and_without_the_time_between(
    get: Get, database: Database, mlflow: Mlflow
) -> None:
    past = ended(200)
    first_start = {**past.run.sweep, "planned_s": 20.0}
    database.runs, database.ended = (), [replace(past, run=replace(past.run, sweep=first_start))]
    spans = {"hermes.ended_spans": "[[120.0, 2000.0]]"}
    mlflow.runs = {"parent-200": sweep_run(200, **spans)}
    assert "old-200 finished 1970-01-01 00:00:20 UTC 2 min 10 s" in read(get("/sweeps"))


def test_of_a_running_sweep_the_best_so_far_is_shown_and_no_report(
    get: Get, mlflow: Mlflow
) -> None:
    mlflow.best = 0.25
    seen = read(get("/sweeps"))
    assert re.search(r"digits-1 running .* 0 of 8 0\.25 val_loss compare trials(?! report)", seen)


def test_the_best_so_far_in_the_list_is_asked_for_within_the_bounds(
    get: Get, database: Database, mlflow: Mlflow
) -> None:
    bounds = [{"name": "latency", "at_most": 5}, {"name": "lr"}]
    database.runs = (replace(database.runs[0], sweep=sweep_record(metrics=bounds)),)
    read(get("/sweeps"))
    assert mlflow.bounded == [SecondaryMetric("latency", at_most=5.0)]


def test_of_a_resumed_sweep_the_best_is_that_of_now_not_of_its_earlier_end(
    get: Get, database: Database, mlflow: Mlflow
) -> None:
    mlflow.best = 0.25
    earlier = {"hermes.best": "0.75"}
    mlflow.runs = {"parent": replace(sweep_run(1, "running", **earlier), ended_ms=1)}
    assert "0 of 8 0.25 val_loss" in read(get("/sweeps"))
    past = PastRun(replace(database.runs[0], state="success"), 90.0)
    database.runs, database.ended = (), [past]
    mlflow.runs = {"parent": sweep_run(1, "finished", **earlier)}
    assert "0 of 8 0.75 val_loss" in read(get("/sweeps"))


@pytest.mark.parametrize(
    ("report", "state"),
    [({}, "running"), ({"": 1}, "running"), ({"success": 1}, "finished"),
     ({"upstream_failed": 1}, "failed"), ({"skipped": 1}, "skipped")],
)  # fmt: skip
def test_a_sweep_in_a_group_of_a_dag_has_the_state_of_its_own_last_task(
    get: Get, database: Database, users: Users, report: dict[str, int], state: str
) -> None:
    users.dags["ann"].add("mine")
    found = ended(2)
    run = replace(found.run, dag_id="mine", plan_task="digits.plan", state="running")
    database.ended = [replace(found, run=run)]
    database.tasks["mine", "old-2", "digits.report"] = report
    assert f"mine:digits:old-2 {state}" in read(get("/sweeps"))


def test_the_list_of_sweeps_has_pages(get: Get, database: Database) -> None:
    database.ended = [ended(n) for n in range(120, 0, -1)]
    first, last = get("/sweeps"), get("/sweeps", page="3")
    assert "old-120" in first.text
    assert "old-70 " not in read(first)
    assert "sweeps?page=2" in first.text
    assert "old-1 " in read(last)
    assert "sweeps?page=2" in last.text
    assert "sweeps?page=4" not in last.text
    assert "all sweeps" in read(get())
    assert get("/sweeps", page="0").status_code == 422


def test_a_silent_mlflow_costs_the_list_its_best_values_alone_and_is_not_asked_each_time(
    get: Get, mlflow: Mlflow
) -> None:
    mlflow.away = True
    seen = [read(get()) for _ in range(3)]
    assert all("MLflow does not answer" in s and "digits-1 running" in s for s in seen)
    assert "secret.internal" not in "".join(seen)
    assert mlflow.asked == 1


def test_a_run_that_was_deleted_in_mlflow_costs_the_other_pages_nothing(
    get: Get, database: Database, mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(run_id: str, path: str) -> tuple[str, ...]:
        raise Refused(f"Run {run_id} not found", "RESOURCE_DOES_NOT_EXIST")

    database.ended = [ended(1)]
    monkeypatch.setattr(mlflow, "files", gone)
    assert "old-1" in read(get("/sweep", sweep="old-1"))
    mlflow.best = 0.25
    seen = read(get("/sweeps"))
    assert "MLflow does not answer" not in seen
    assert "0.25" in seen


def test_a_sweep_has_a_page_of_its_own_with_curves_timeline_trials_and_decisions(
    get: Get, database: Database, mlflow: Mlflow
) -> None:
    database.ended = [ended(2)]
    closed = {"hermes.closed": "stopped by its user", "hermes.sweep": "old-2",
              "hermes.failures": "trial 2 failed: no data\nand <b>another</b>"}  # fmt: skip
    mlflow.runs = {"parent-2": sweep_run(2, "cancelled", **closed)}
    mlflow.opened = (trial_run(0, "finished", 0.5), trial_run(1, "finished", 0.25),
                     trial_run(2, "failed", 0.1, tags={"hermes.reason": "no data"}))  # fmt: skip
    mlflow.points = {"run-0": ((1, 0.7, 101_000), (3, 0.5, 103_000))}
    decide("start", "it was the first", sweep="old-2")
    answer = get("/sweep", sweep="old-2")
    seen = read(answer)
    assert "It ended because: stopped by its user" in seen
    assert "trial 2 failed: no data and <b>another</b>" in seen
    assert "Best val_loss: trial 1: 0.25 with rate=0.5" in seen
    assert "5 never begun, 2 finished, 1 failed" in seen
    assert re.search(r"trial 1 finished 0\.25 0\.25 .* trial 0 finished 0\.5 0\.5 3", seen)
    assert re.search(r"trial 2 failed no data", seen)
    assert "it was the first" in seen.partition("Last decisions")[2]
    pictures = re.findall(
        r'<img src="data:image/svg\+xml;base64,[\w+/=]+" alt="([^:]*)', answer.text
    )
    assert pictures == ["Learning curves", "Who held which GPU"]


def test_the_page_of_a_running_sweep_grows_and_says_what_its_open_trials_do(
    get: Get, mlflow: Mlflow
) -> None:
    mlflow.opened = (trial_run(0, "running", 0.5, tags={"hermes.segment_log": ""}),)
    answer = get("/sweep", sweep=SWEEP)
    assert "data-refresh-s" in answer.text
    assert re.search(r"trial 0 running 0\.5", read(answer))
    assert 'alt="Who held which GPU' in answer.text  # the segment under way, which MLflow has not
    mlflow.opened = (trial_run(0, "running", 0.5), trial_run(1, "running", 0.75))
    for _ in range(100):  # until it is read again
        if "trial 1 waiting 0.75" in (seen := read(get("/sweep", sweep=SWEEP))):
            break
    assert "trial 1 waiting 0.75" in seen


def test_the_page_of_a_sweep_shows_the_gpus_of_a_trial_that_had_several(
    get: Get, mlflow: Mlflow
) -> None:
    stored = '[[1, [0, 1], 10.0, 20.0, 0, 3, "preempted"], [2, [0], 30.0, 40.0, 3, 5, "finished"]]'
    mlflow.opened = (
        trial_run(0, "finished", 0.5, tags={"hermes.segment_log": stored}),
        trial_run(1, "finished", 0.7),
    )
    seen = read(get("/sweep", sweep=SWEEP))
    assert "30 s 2 → 1 GPUs" in seen
    assert seen.count(" GPUs") == 1


@pytest.mark.parametrize(
    ("query", "code", "words"),
    [
        ({"sweep": "nothing"}, 404, "knows no sweep"),
        ({"sweep": "x" * 600}, 422, "wrong sweep"),
        ({"sweep": SWEEP, "page": "-1"}, 422, "wrong page"),
        ({"sweep": SWEEP, "before": "x"}, 422, "wrong before"),
    ],
)
def test_a_sweep_that_is_none_is_a_sentence(
    get: Get, query: dict[str, str], code: int, words: str
) -> None:
    answer = get("/sweep", **query)
    assert (answer.status_code, words in Text(answer.text).text) == (code, True), answer.text


def test_the_page_of_a_sweep_stands_without_mlflow_and_before_its_plan(
    get: Get, database: Database, mlflow: Mlflow
) -> None:
    mlflow.away = True
    decide("start", "it was the first")
    seen = read(get("/sweep", sweep=SWEEP))
    assert "MLflow does not answer" in seen
    assert "it was the first" in seen
    database.runs = (RunRow(1, "hermes_sweep", SWEEP, "plan", "running", 50.0, {"odd": 1}),)
    assert "digits-1" in read(get("/sweep", sweep=SWEEP))


def test_earlier_decisions_are_pages_of_bounded_size(get: Get) -> None:
    for number in range(300):
        decide("start", f"reason {number:03d} " + "x" * 400)
    first = get("/sweep", sweep=SWEEP)
    assert "reason 299" in first.text
    assert "reason 000" not in first.text
    found = set(re.findall(r"reason (\d+)", first.text))
    answer = first
    while before := re.search(r"before=(\d+)", answer.text):
        answer = get("/sweep", sweep=SWEEP, before=before[1])
        page = set(re.findall(r"reason (\d+)", answer.text))
        assert page
        assert not page & found
        found |= page
    assert len(found) == 300


def test_decisions_that_another_machine_has_on_disk_are_those_of_mlflow(
    get: Get, mlflow: Mlflow
) -> None:
    one = {"time_s": 100.0, "sweep": SWEEP, "trial": 0, "action": "start", "gpus": [0],
           "reason": "it was the first", "terms": {}}  # fmt: skip
    mlflow.chunks = {"decisions/000001.jsonl": json.dumps(one) + "\ntorn"}
    assert "it was the first" in read(get("/sweep", sweep=SWEEP))

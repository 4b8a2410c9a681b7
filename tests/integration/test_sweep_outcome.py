"""One sweep of six trials from the command line to its report: every account of it agrees."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

RATES = [0.01, 0.02, 0.5, 0.6, 0.7, 0.8]  # the last ones fall fastest, so the first are preempted
EPOCHS, PAUSE_S = 16, 0.5
MLFLOW_STATUS = {"finished": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
AIRFLOW_STATE = {"finished": "success", "failed": "failed", "cancelled": "skipped"}
TRIAL_KEYS = {
    "number", "state", "config", "final", "best", "steps", "segments", "preemptions",
    "gpu_seconds", "sizes",
}  # fmt: skip


@pytest.fixture(scope="module")
def told(lab: Any, harness: Any) -> Any:
    """The sweep, the document that `hermes sweep run --follow --json` printed, and the samples."""
    file = lab.file(harness.stub("six", RATES, EPOCHS, PAUSE_S))
    with lab.policy("hermes", guard_k=0), lab.sampled() as sampler:
        said = lab.hermes("sweep", "run", str(file), "--follow", "--json")
    assert said.returncode == 0, said.stderr
    document = json.loads(said.stdout)
    return harness.Sweep(lab, document["sweep"]), document, sampler


def test_the_document_has_exactly_the_promised_shape(told: Any) -> None:
    _, document, _ = told
    assert list(document) == [
        "sweep", "state", "trials", "best", "wall_seconds", "pool_slots", "max_slots_used",
        "warnings",
    ]  # fmt: skip
    assert all(set(trial) == TRIAL_KEYS for trial in document["trials"])
    assert [trial["number"] for trial in document["trials"]] == list(range(len(RATES)))
    assert [trial["config"] for trial in document["trials"]] == [{"rate": r} for r in RATES]
    assert document["state"] == "finished"
    assert document["pool_slots"] == 2


def test_every_trial_is_in_one_final_state_and_all_accounts_agree(told: Any) -> None:
    sweep, document, _ = told
    tasks, runs = sweep.tasks(), sweep.runs()
    assert sweep.state == "success"
    assert set(runs) == set(range(len(RATES)))
    for trial in document["trials"]:
        (run,) = runs[trial["number"]]
        assert trial["state"] == "finished"
        assert run["tags"]["hermes.state"] == trial["state"]
        assert run["info"]["status"] == MLFLOW_STATUS[trial["state"]]
        assert tasks["trial", trial["number"]]["state"] == AIRFLOW_STATE[trial["state"]]
        assert trial["steps"] == EPOCHS
        assert int(run["tags"]["hermes.steps"]) == EPOCHS
    assert sweep.parent["info"]["status"] == "FINISHED"


def test_no_step_is_missing_or_logged_twice(told: Any, lab: Any) -> None:
    sweep, _, _ = told
    for number, (run,) in sweep.runs().items():
        steps = [step for step, _ in lab.history(run["info"]["run_id"])]
        assert steps == list(range(1, EPOCHS + 1)), f"trial {number}"


def test_preempted_trials_have_the_curve_of_one_never_interrupted(told: Any, harness: Any) -> None:
    sweep, document, _ = told
    preempted = [t for t in document["trials"] if t["preemptions"]]
    assert preempted, "the policy preempted nobody: the test shows nothing"
    for trial in preempted:
        rate = trial["config"]["rate"]
        sweep.assert_whole(trial["number"], rate, EPOCHS)
        alone = harness.plain_curve(rate, EPOCHS)
        assert trial["final"] == pytest.approx(alone[-1], abs=1e-9)
        assert trial["best"] == pytest.approx(min(alone), abs=1e-9)


def test_preemptions_are_counted_and_cost_neither_run_nor_try(told: Any) -> None:
    sweep, document, _ = told
    tasks = sweep.tasks()
    stops = Counter(d["trial"] for d in sweep.decisions() if d["action"] == "stop")
    for trial in document["trials"]:
        number = trial["number"]
        segments = sweep.segments(number)
        outcomes = [segment["outcome"] for segment in segments]
        assert outcomes == ["preempted"] * trial["preemptions"] + ["finished"]
        assert trial["segments"] == len(segments)
        assert trial["preemptions"] <= stops[number]
        assert len(sweep.runs()[number]) == 1
        assert tasks["trial", number]["try_number"] == 1
        gpu_s = sum(segment["end_s"] - segment["start_s"] for segment in segments)
        assert trial["gpu_seconds"] == pytest.approx(gpu_s, abs=0.1)


def test_live_trials_never_hold_more_than_the_pool_nor_a_gpu_twice(told: Any) -> None:
    _, document, sampler = told
    assert sampler.most == 2
    assert document["max_slots_used"] == 2
    assert sampler.doubly_held == []
    assert {gpu for sample in sampler.samples for gpu in sample.gpus} == {0, 1}


def test_the_report_lies_at_the_parent_run(told: Any, lab: Any) -> None:
    sweep, document, _ = told
    parent = sweep.parent["info"]["run_id"]
    wanted = {"trials.csv", "curves.png", "gpus.png", "report.html", "best.json", "summary.json"}
    assert lab.artifacts(parent, "report") >= {f"report/{name}" for name in wanted}
    assert lab.artifacts(parent, "model")
    assert sweep.parent["tags"]["hermes.best_trial"] == str(document["best"]["number"])
    assert document["best"]["best"] == min(trial["best"] for trial in document["trials"])


def test_every_decision_is_recorded_with_its_reason(told: Any, lab: Any) -> None:
    sweep, document, _ = told
    decisions = sweep.decisions()
    starts = Counter(d["trial"] for d in decisions if d["action"] == "start")
    assert all(starts[t["number"]] >= t["segments"] for t in document["trials"])
    assert all(d["reason"] and d["policy"] == "hermes" for d in decisions)
    assert lab.artifacts(sweep.parent["info"]["run_id"], "decisions")


def test_a_trials_checkpoints_are_freed_at_the_end(told: Any) -> None:
    sweep, _, _ = told
    assert list(sweep.folder.glob("trials/*/checkpoints/*")) == []


def test_explain_says_why_a_trial_ran(told: Any, lab: Any) -> None:
    sweep, _, _ = told
    said = lab.hermes("explain", f"{sweep.id}/0", "--last", "50")
    assert said.returncode == 0, said.stderr
    assert "start on GPU" in said.stdout
    unknown = lab.hermes("explain", "no-such-sweep/0")
    assert unknown.returncode == 1
    assert "hermes sweep list" in unknown.stderr


def test_list_watch_and_report_know_the_sweep(told: Any, lab: Any, tmp_path: Path) -> None:
    sweep, document, _ = told
    listed = json.loads(lab.hermes("sweep", "list", "--json").stdout)
    assert {"finished"} == {r["state"] for r in listed if r["dag_run_id"] == sweep.id}
    assert "Best: trial" in lab.hermes("sweep", "watch", sweep.id).stdout
    written = lab.hermes("sweep", "report", sweep.id, "--out", str(tmp_path))
    assert written.returncode == 0, written.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["trials"] == document["trials"]
    assert summary["best"] == document["best"]


def test_stopping_a_sweep_that_has_ended_changes_nothing(told: Any, lab: Any) -> None:
    sweep, _, _ = told
    said = lab.hermes("sweep", "stop", sweep.id)
    assert said.returncode == 0
    assert "already ended" in said.stdout

"""Sweeps that go on after their end, end at their target, and keep what they were told to keep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_ops.config import parse
from hermes_ops.search.interface import Observation

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "sgd" / "conditional.yaml"
EXAMPLE_EPOCHS = 4
TPE = {
    "algorithm": "tpe",
    "startup_trials": 2,
    "max_trials": 4,
    "space": {"rate": {"type": "uniform", "low": 0.1, "high": 2.0}},
}


def _ended_again(harness: Any, sweep: Any) -> None:
    """Wait until the run goes on, then until it has ended."""
    harness.await_(lambda: sweep.state in ("queued", "running"), 60.0, 0.05)
    sweep.await_end()


def _trial_tasks(sweep: Any) -> dict[int, dict[str, Any]]:
    return {n: t for (task, n), t in sweep.tasks().items() if task == "trial"}


def _stop(lab: Any, sweep: Any) -> None:
    assert lab.hermes("sweep", "stop", sweep.id, "--reason", "enough of it").returncode == 0
    sweep.await_end()


@pytest.fixture(scope="module")
def grown(lab: Any, harness: Any) -> Any:
    """A sweep of four trials that was extended by three, and its tasks before that."""
    sweep = lab.run(harness.stub("grown", [1.0], 4, 0.1, search=TPE))
    before = _trial_tasks(sweep), sweep.runs()
    said = lab.hermes("sweep", "extend", sweep.id, "--trials", "3")
    assert said.returncode == 0, said.stdout + said.stderr
    assert "7 in all" in said.stdout
    _ended_again(harness, sweep)
    return sweep, before


def test_an_extended_sweep_runs_its_new_trials_and_no_old_one_again(grown: Any) -> None:
    sweep, (tasks, runs) = grown
    assert sweep.state == "success"
    assert sweep.states() == dict.fromkeys(range(7), "finished")
    now = _trial_tasks(sweep)
    assert {n: t["state"] for n, t in now.items()} == dict.fromkeys(range(7), "success")
    for number, task in tasks.items():
        assert now[number]["start_date"] == task["start_date"]
        assert len(sweep.segments(number)) == 1
        assert sweep.runs()[number][0]["info"]["run_id"] == runs[number][0]["info"]["run_id"]


def test_the_new_trials_of_an_extended_sweep_begin_in_the_order_of_their_numbers(
    grown: Any,
) -> None:
    sweep, _ = grown
    starts = [d["trial"] for d in sweep.decisions() if d["action"] == "start" and d["trial"] > 3]
    assert list(dict.fromkeys(starts)) == [4, 5, 6]


def test_the_search_of_an_extended_sweep_knows_all_results_so_far(grown: Any) -> None:
    sweep, _ = grown
    plan = sweep.lab.airflow.get(
        f"/api/v2/dags/hermes_sweep/dagRuns/{sweep.id}/taskInstances/plan/state-store/hermes_sweep"
    ).json()["value"]
    config = parse(plan["config"], sweep.id, None)
    assert config.search.max_trials == 7
    trials = {t["number"]: t for t in sweep.document()["trials"]}
    told = [Observation(n, trials[n]["config"], trials[n]["best"], "finished") for n in range(4)]
    first = next(d["trial"] for d in sweep.decisions() if d["action"] == "start" and d["trial"] > 3)
    assert trials[first]["config"] == config.search.to_sampler().ask(first, told)
    assert trials[first]["config"] != config.search.to_sampler().ask(first, ())


def test_the_report_and_the_sweeps_own_run_tell_of_all_trials(grown: Any, lab: Any) -> None:
    sweep, _ = grown
    parent = sweep.parent
    assert parent["tags"]["hermes.state"] == "finished"
    assert parent["info"]["status"] == "FINISHED"
    assert len(sweep.document()["trials"]) == 7
    query = {"run_uuid": parent["info"]["run_id"], "path": "sweep.yaml"}
    text = lab.mlflow.get(f"{lab.stack.mlflow_url}/get-artifact", params=query).text
    assert yaml.safe_load(text)["search"]["max_trials"] == 7


def test_a_grid_or_a_running_sweep_is_not_extended(lab: Any, harness: Any, tmp_path: Path) -> None:
    slow = harness.slow_file(tmp_path)
    sweep = lab.start(harness.stub("busy", harness.alike(1), harness.LONG, 0.2, slow_while=slow))
    early = lab.hermes("sweep", "extend", sweep.id, "--trials", "1")
    assert early.returncode == 1
    assert "has not ended" in early.stderr
    slow.unlink()
    sweep.await_end()
    late = lab.hermes("sweep", "extend", sweep.id, "--trials", "1")
    assert late.returncode == 1
    assert "a grid has no further combinations" in late.stderr


@pytest.fixture(scope="module")
def resumed(lab: Any, harness: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A sweep that was stopped in its midst and resumed; what each trial had come to before."""
    slow = harness.slow_file(tmp_path_factory.mktemp("halted"))
    content = harness.stub("halted", harness.alike(3), harness.LONG, 0.25, slow_while=slow)
    sweep = lab.start(content)
    harness.await_(lambda: sweep.lines(0) > 5 and sweep.lines(1) > 5, 120.0)
    _stop(lab, sweep)
    slow.unlink()
    assert set(sweep.states().values()) == {"cancelled"}
    before = {n: sweep.lines(n) for n in sweep.runs()}
    said = lab.hermes("sweep", "resume", sweep.id)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "goes on with 3 trials: 0, 1, 2" in said.stdout
    _ended_again(harness, sweep)
    return sweep, before


def test_a_stopped_sweep_that_is_resumed_finishes_every_trial_in_its_own_run(resumed: Any) -> None:
    sweep, _ = resumed
    assert sweep.state == "success"
    assert sweep.states() == dict.fromkeys(range(3), "finished")
    assert {len(runs) for runs in sweep.runs().values()} == {1}
    assert {r[0]["info"]["status"] for r in sweep.runs().values()} == {"FINISHED"}
    assert sweep.parent["tags"]["hermes.state"] == "finished"
    assert "hermes.closed" not in sweep.parent["tags"]


def test_resumed_trials_go_on_from_their_checkpoints_with_the_curve_of_one_never_stopped(
    resumed: Any, harness: Any
) -> None:
    sweep, before = resumed
    for number, rate in enumerate(harness.alike(3)):
        sweep.assert_whole(number, rate)
    for number in before:
        first = sweep.segments(number)
        assert len(first) > 1
        assert first[-1]["first_step"] >= before[number] - 1


def test_nothing_is_resumed_twice(resumed: Any, lab: Any) -> None:
    sweep, _ = resumed
    said = lab.hermes("sweep", "resume", sweep.id)
    assert said.returncode == 1
    assert "nothing to resume" in said.stderr


def test_a_sweep_that_has_reached_its_target_ends_in_order(lab: Any, harness: Any) -> None:
    content = harness.stub(
        "reached", harness.alike(4), 1000, 0.2, objective={"metric": "loss", "target": 95.0}
    )
    sweep = lab.run(content)
    assert sweep.state == "success"
    parent = sweep.parent
    assert parent["tags"]["hermes.state"] == "finished"
    assert "objective.target 95" in parent["tags"]["hermes.reached"]
    assert set(sweep.states().values()) == {"stopped_early"}
    document = sweep.document()
    assert document["best"]["best"] <= 95.0
    assert "report/report.html" in lab.artifacts(parent["info"]["run_id"], "report")
    assert sweep.live() == []


@pytest.fixture(scope="module")
def thrifty(lab: Any, harness: Any) -> Any:
    """A sweep that a budget ended, what was said to a plain resume, and its end with more."""
    content = harness.stub("thrift", harness.alike(3), 25, 0.2, budget={"gpu_seconds": 5})
    sweep = lab.run(content)
    first = sweep.parent, sweep.document()
    refused = lab.hermes("sweep", "resume", sweep.id)
    said = lab.hermes("sweep", "resume", sweep.id, "--gpu-seconds", "500")
    assert said.returncode == 0, said.stderr
    _ended_again(harness, sweep)
    return sweep, first, refused


def test_a_spent_budget_ends_the_sweep_with_the_best_so_far_reported(thrifty: Any) -> None:
    _, (parent, document), _ = thrifty
    assert "budget.gpu_seconds (5) is spent" in parent["tags"]["hermes.closed"]
    assert document["state"] == "cancelled"
    assert document["best"]["best"] < 100


def test_a_spent_budget_is_raised_by_name_before_the_sweep_goes_on(thrifty: Any) -> None:
    sweep, _, refused = thrifty
    assert refused.returncode == 1
    assert "--gpu-seconds" in refused.stderr
    assert sweep.states() == dict.fromkeys(range(3), "finished")


def test_a_failed_trial_is_tried_again_from_its_last_checkpoint(lab: Any, harness: Any) -> None:
    content = harness.config("stumbles", {"n": [1]}, "stumbles.py", budget={"max_epochs": 6})
    sweep = lab.run(content)
    assert sweep.states() == {0: "finished"}
    assert [s["outcome"] for s in sweep.segments(0)] == ["failed", "finished"]
    log = sweep.log("trial", 0)
    begun = [log.count(f"begin {epoch}") for epoch in range(1, 7)]
    assert begun == [2, 2, 2, 1, 1, 1]  # the first three also as the last lines of the failure
    assert [step for step, _ in sweep.curve(0)] == [1, 2, 3, 4, 5, 6]


def test_a_trial_keeps_its_newest_and_best_checkpoints_for_the_stated_time(
    lab: Any, harness: Any
) -> None:
    keeping = {"keep_last": 2, "keep_seconds": 20}
    sweep = lab.start(harness.config("kept", {"n": [1]}, "many.py", checkpoints=keeping))
    folder = sweep.folder / "trials" / "0" / "checkpoints"
    harness.await_(lambda: sweep.lines(0) > 10, 120.0)
    assert lab.hermes("sweep", "stop", sweep.id).returncode == 0
    harness.await_(lambda: not sweep.live())
    kept = sorted(int(p.stem.partition("-")[2]) for p in folder.glob("epoch-*.txt"))
    assert kept[0] == 3  # the best
    assert 3 <= len(kept) <= 4  # one may have been written on the way out
    assert kept[-1] >= 10
    sweep.await_end()
    harness.await_(lambda: not folder.exists())


def test_the_best_model_is_registered_with_its_signature_and_alias(lab: Any, harness: Any) -> None:
    content = harness.config(
        "registered",
        {"alpha": [0.0001, 10.0]},
        "classifier.py",
        "{alpha}",
        model={"register_as": "classifier", "alias": "champion"},
        trial={"environment": {"OMP_NUM_THREADS": "1"}},
        budget={"max_epochs": 3},
    )
    sweep = lab.run(content)
    best = sweep.document()["best"]["number"]
    assert sweep.parent["tags"]["hermes.registered"] == "models:/classifier/1"
    query = {"name": "classifier", "alias": "champion"}
    found = lab.mlflow.get("/registered-models/alias", params=query).json()["model_version"]
    assert found["run_id"] == sweep.runs()[best][0]["info"]["run_id"]
    script = (
        "import mlflow, numpy; m = mlflow.pyfunc.load_model('models:/classifier@champion');"
        "print(m.metadata.signature.inputs); print(m.predict(numpy.ones((2, 3))).tolist())"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "MLFLOW_TRACKING_URI": lab.stack.mlflow_url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert loaded.returncode == 0, loaded.stderr
    assert "float64" in loaded.stdout
    assert "[1, 1]" in loaded.stdout


def test_the_best_of_earlier_sweeps_is_tried_first_and_their_cost_estimated(
    grown: Any, lab: Any, harness: Any, tmp_path: Path
) -> None:
    earlier, _ = grown
    content = harness.stub("grown", [1.0], 4, 0.1, search={**TPE, "warm_start": 2})
    file = tmp_path / "warm.json"
    file.write_text(json.dumps(content))
    said = lab.hermes("sweep", "check", str(file))
    assert "earlier sweeps of stub.py" in said.stdout, said.stdout + said.stderr
    sweep = lab.run(content)
    ranked = sorted(earlier.document()["trials"], key=lambda t: t["best"])
    configs = [t["config"] for t in sweep.document()["trials"]]
    assert configs[:2] == [ranked[0]["config"], ranked[1]["config"]]


@pytest.fixture(scope="module")
def conditional(lab: Any) -> Any:
    """The example of a conditional space with fewer epochs, run from the command line."""
    content = yaml.safe_load(EXAMPLE.read_text())
    content["trial"]["directory"] = str(EXAMPLE.parent)
    content["trial"]["command"][-1] = f"--epochs={EXAMPLE_EPOCHS}"
    content["budget"]["max_epochs"] = EXAMPLE_EPOCHS
    said = lab.hermes("sweep", "run", str(lab.file(content)), "--json")
    assert said.returncode == 0, said.stdout + said.stderr
    return json.loads(said.stdout)


def test_a_conditional_sweep_gives_each_trial_what_its_choices_bring(conditional: Any) -> None:
    assert conditional["state"] == "finished"
    assert len(conditional["trials"]) == 12
    assert {t["state"] for t in conditional["trials"]} == {"finished"}
    for trial in conditional["trials"]:
        config = trial["config"]
        assert ("l1_ratio" in config) == (config["penalty"] == "elasticnet")
        assert ("power_t" in config) == (config["schedule"] == "invscaling")
        assert config["alpha"] * config["eta0"] <= 0.001
        assert trial["steps"] == EXAMPLE_EPOCHS
    kinds = {(t["config"]["penalty"], t["config"]["schedule"]) for t in conditional["trials"]}
    assert len(kinds) > 2


def test_a_conditional_sweep_has_its_columns_and_its_report(
    conditional: Any, lab: Any, harness: Any
) -> None:
    sweep = harness.Sweep(lab, conditional["sweep"])
    for number, (run,) in sweep.runs().items():
        config = conditional["trials"][number]["config"]
        assert set(run["params"]) == set(config)
        metrics = {m["key"]: m["value"] for m in run["data"]["metrics"]}
        assert metrics["hermes.best"] == pytest.approx(conditional["trials"][number]["best"])
        assert metrics["hermes.steps"] == EXAMPLE_EPOCHS
    parent = sweep.parent["info"]["run_id"]
    assert {"report/report.html", "report/trials.csv"} <= lab.artifacts(parent, "report")
    query = {"run_uuid": parent, "path": "report/trials.csv"}
    table = lab.mlflow.get(f"{lab.stack.mlflow_url}/get-artifact", params=query).text
    header = table.splitlines()[0]
    assert all(name in header for name in ("alpha", "l1_ratio", "power_t"))

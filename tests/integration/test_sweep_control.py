"""Stopping, tasks of others in the pool, MLflow away, and what a script finds and may do."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.stack.layout import Layout
from hermes_ops.stack.supervisor_client import SupervisorClient

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STOP_WITHIN_S = 25.0  # less than the grace of a trial that is only preempted
SHORT = 15  # epochs of a trial that ends while MLflow is away
GUESTS = 6  # trials of the sweep beside tasks of another DAG
FOREIGN = "/api/v2/dags/foreign/dagRuns"
NASTY = "$(touch hacked); echo \"x\" | cat > '*' && {name} \\ `id` #é"


def _stop(lab: Any, harness: Any, sweep: Any) -> None:
    """Stop the sweep and wait for the last of its processes, as long as is promised."""
    assert lab.hermes("sweep", "stop", sweep.id, "--reason", "enough of it").returncode == 0
    harness.await_(lambda: not sweep.live(), STOP_WITHIN_S, 0.1)


@pytest.fixture(scope="module")
def stopped(lab: Any, harness: Any) -> Any:
    """Two sweeps that were stopped: trials that obey SIGTERM, and others that ignore it.

    The pattern of the latter never ends on a line that they print.
    """
    endless = harness.stub("endless", harness.alike(5), 10_000, 0.2)
    deaf = harness.config(
        "deaf",
        {"n": [1, 2]},
        "stubborn.py",
        "{n}",
        trial={"metric_pattern": r"epoch=(?P<step>\d+) (?P<name>loss)=(?P<value>\S+)|^(a+)+$"},
        budget={"max_epochs": 9999},
    )
    sweeps = []
    for content in (endless, deaf):
        sweep = lab.start(content)
        harness.await_(lambda s=sweep: s.lines(0) > 1 and s.lines(1) > 1)
        _stop(lab, harness, sweep)
        sweeps.append(sweep)
    for sweep in sweeps:
        sweep.await_end()
    return sweeps


def test_stopping_a_sweep_leaves_every_trial_cancelled_and_no_process(stopped: Any) -> None:
    for sweep in stopped:
        assert sweep.live() == []
        document = sweep.document()
        assert document["state"] == "cancelled"
        assert {t["state"] for t in document["trials"]} == {"cancelled"}
        assert {t["state"] for (task, _), t in sweep.tasks().items() if task == "trial"} == {
            "skipped"
        }
        assert {runs[0]["info"]["status"] for runs in sweep.runs().values()} == {"KILLED"}


def test_a_stopped_sweep_says_why_and_has_its_report(stopped: Any, lab: Any) -> None:
    for sweep in stopped:
        parent = sweep.parent
        closed = parent["tags"]["hermes.closed"]
        assert re.fullmatch(
            r"enough of it \(stopped by \S+@\S+, Airflow user hermes-controller\)", closed
        )
        assert closed in lab.hermes("sweep", "show", sweep.id).stdout.replace("\n", " ")
        assert re.search(r"UTC: stop by \S+@\S+, Airflow user", parent["tags"]["hermes.actions"])
        assert parent["tags"]["hermes.state"] == "cancelled"
        assert "report/report.html" in lab.artifacts(parent["info"]["run_id"], "report")
        assert sweep.tag(0, "hermes.reason") == closed


def test_a_line_on_which_a_pattern_never_ends_is_said_in_the_trials_log(stopped: Any) -> None:
    for number in (0, 1):
        assert "trial.metric_pattern takes more than 1 s on this line" in stopped[1].log(
            "trial", number
        )


def test_trials_that_had_not_begun_have_no_run(stopped: Any) -> None:
    assert set(stopped[0].runs()) < set(range(5))


def _hold_a_slot(lab: Any, harness: Any, run: str) -> None:
    answer = lab.airflow.post(FOREIGN, json={"dag_run_id": run, "logical_date": None})
    assert answer.status_code in (200, 409), answer.text
    harness.await_((lab.home / f"{run}.held").exists)


def _let_go(lab: Any, harness: Any, run: str, sweep: Any) -> tuple[float, float]:
    """Free the slot when a trial has trained beside it; a time in which it was held."""
    begin, before = time.time(), _epochs(sweep)
    harness.await_(lambda: _epochs(sweep) >= before + 4)
    end = time.time()
    (lab.home / f"{run}.held").unlink()
    return begin, end


def _epochs(sweep: Any) -> int:
    return sum(sweep.lines(n) for n in range(GUESTS))


@pytest.fixture(scope="module")
def shared_pool(lab: Any, harness: Any) -> Any:
    """A sweep beside two tasks of another DAG: one was there first, one comes in between."""
    first, second = (f"run-{time.time_ns()}-{n}" for n in (1, 2))
    harness.await_(lambda: lab.airflow.get("/api/v2/dags/foreign").status_code == 200)
    with lab.sampled() as sampler:
        _hold_a_slot(lab, harness, first)
        sweep = lab.start(harness.stub("guests", harness.alike(GUESTS), 30, 0.3))
        spans = [_let_go(lab, harness, first, sweep)]
        harness.await_(lambda: len(sweep.live()) >= 2)
        _hold_a_slot(lab, harness, second)
        spans.append(_let_go(lab, harness, second, sweep))
        sweep.await_end()
    return sweep, sampler, spans


def test_a_foreign_task_counts_against_the_pool(shared_pool: Any) -> None:
    _, sampler, spans = shared_pool
    for begin, end in spans:
        during = [s for s in sampler.samples if begin <= s.time_s <= end]
        assert during
        assert max(len(s.gpus) for s in during) == 1
    assert sampler.most == 2
    assert sampler.doubly_held == []


def test_trials_beside_foreign_tasks_all_finish(shared_pool: Any) -> None:
    sweep, _, _ = shared_pool
    assert list(sweep.states().values()) == ["finished"] * GUESTS
    assert {t["try_number"] for (task, _), t in sweep.tasks().items() if task == "trial"} == {1}


@pytest.fixture(scope="module")
def cut_off(lab: Any, harness: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A sweep whose MLflow was away while one trial trained on and the other one ended."""
    supervisor = SupervisorClient(Layout(lab.home))
    slow = harness.slow_file(tmp_path_factory.mktemp("cut-off"))
    # Of two trials the longer one writes its epochs into the outage and beyond.
    content = harness.config(
        "cut-off",
        {"epochs": [SHORT, harness.LONG]},
        "stub.py", "--pause", "0.4", "--epochs", "{epochs}", "--slow-while", str(slow),
    )  # fmt: skip
    sweep = lab.start(content)
    harness.await_(lambda: sweep.lines(0) > 3 and sweep.lines(1) > 3, 120.0)
    supervisor.stop_programs(["mlflow"])
    try:
        at_outage = sweep.lines(1)
        harness.await_(lambda: sweep.lines(1) >= at_outage + 10 and sweep.lines(0) == SHORT)
        during = sweep.lines(1)
    finally:
        supervisor.start_program("mlflow")
    slow.unlink()
    sweep.await_end()
    return sweep, at_outage, during


def test_trials_train_on_while_mlflow_is_away(cut_off: Any) -> None:
    sweep, at_outage, during = cut_off
    assert during >= at_outage + 10
    assert [len(sweep.segments(n)) for n in (0, 1)] == [1, 1]
    assert sweep.states() == {0: "finished", 1: "finished"}
    assert sweep.state == "success"


def test_no_metric_of_the_outage_is_lost_or_doubled(cut_off: Any, harness: Any) -> None:
    sweep, _, _ = cut_off
    for number, epochs in ((0, SHORT), (1, harness.LONG)):
        assert [step for step, _ in sweep.curve(number)] == list(range(1, epochs + 1))


@pytest.fixture(scope="module")
def probed(lab: Any, harness: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trial that wrote down what it found, with a parameter that a shell would act on."""
    file = tmp_path_factory.mktemp("probe") / "facts.json"
    changes = {"environment": {"PROBE_FILE": str(file), "PLAIN": "$HOME"}}
    sweep = lab.run(harness.config("probe", {"text": [NASTY]}, "probe.py", "{text}", trial=changes))
    return sweep, json.loads(file.read_text())


def test_parameters_reach_the_script_as_text_that_no_shell_has_read(probed: Any) -> None:
    sweep, facts = probed
    assert facts["argv"] == [NASTY]
    assert facts["environment"]["HERMES_PARAM_TEXT"] == NASTY
    assert facts["environment"]["PLAIN"] == "$HOME"
    assert sweep.runs()[0][0]["params"]["text"] == NASTY
    assert not (Path(__file__).parent / "scripts" / "hacked").exists()


def test_the_scripts_own_metric_lands_in_the_trials_run(probed: Any, lab: Any) -> None:
    sweep, facts = probed
    (run,) = sweep.runs()[0]
    assert facts["environment"]["MLFLOW_RUN_ID"] == run["info"]["run_id"]
    assert lab.history(run["info"]["run_id"], "own_metric") == [(1, 42.0)]
    assert lab.history(run["info"]["run_id"], "loss") == [(1, 0.5)]
    assert run["tags"]["hermes.state"] == "finished"
    assert run["info"]["status"] == "FINISHED"


def test_a_script_finds_its_gpu_and_none_of_the_services_secrets(probed: Any, lab: Any) -> None:
    _, facts = probed
    environment = facts["environment"]
    secrets = [f.read_text().strip() for f in (lab.home / "secrets").glob("*.password")]
    secrets += [f.read_text().strip() for f in (lab.home / "secrets").glob("*.key")]
    assert environment["CUDA_VISIBLE_DEVICES"] in {"0", "1"}
    assert environment["HERMES_GPUS"] == environment["CUDA_VISIBLE_DEVICES"]
    assert [name for name in environment if "AIRFLOW" in name.upper()] == []
    assert [n for n, v in environment.items() if any(secret in v for secret in secrets)] == []

"""Scripts that fail, configs that are refused: what users read, and that the rest goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

LAST_WORDS = {  # script -> what must be read in the log and on the run
    "exits.py": "the data set is gone",
    "nan.py": "loss=nan",
    "silent.py": "nobody heard a loss",
    "hangs.py": "waiting for a file that never comes",
    "syntax_error.txt": "SyntaxError",
    "no_such_script.py": "No such file or directory",
}
REASONS = {
    "exits.py": "exit code 1",
    "nan.py": "loss is NaN at step 2",
    "silent.py": "without ever reporting 'loss'",
    "hangs.py": "time limit: 5 s are over",
    "syntax_error.txt": "exit code 1",
    "no_such_script.py": "exit code 2",
}
BAD = list(LAST_WORDS)
TRIED_AGAIN = {"exits.py", "hangs.py"}  # the others would fail again in the same way


@pytest.fixture(scope="module")
def zoo(lab: Any, harness: Any) -> Any:
    """Six scripts that fail and two good ones; all have slots at once."""
    content = harness.config(
        "zoo",
        {"script": [*BAD, "stub.py", "./stub.py"]},
        "{script}",
        trial={"time_limit_seconds": 5, "max_failures": 1},
    )
    with lab.pool(8):
        return lab.run(content)


@pytest.fixture(scope="module")
def gone(lab: Any, harness: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A sweep whose working directory is not there when its trials start."""
    missing = tmp_path_factory.mktemp("work") / "gone"
    changes = {"directory": str(missing), "max_failures": 0}
    return lab.run(harness.stub("gone", harness.alike(2), 3, 0.1, trial=changes))


@pytest.mark.parametrize("script", BAD)
def test_a_failing_script_ends_failed_and_is_retried_where_it_may_help(
    zoo: Any, script: str
) -> None:
    number = BAD.index(script)
    (run,) = zoo.runs()[number]
    assert run["tags"]["hermes.state"] == "failed"
    assert run["info"]["status"] == "FAILED"
    assert zoo.tasks()["trial", number]["state"] == "failed"
    tries = 2 if script in TRIED_AGAIN else 1
    assert [s["outcome"] for s in zoo.segments(number)] == ["failed"] * tries


@pytest.mark.parametrize("script", BAD)
def test_its_last_lines_are_in_the_airflow_log_and_on_the_mlflow_run(zoo: Any, script: str) -> None:
    number = BAD.index(script)
    log = zoo.log("trial", number)
    assert LAST_WORDS[script] in log
    assert REASONS[script] in log
    assert LAST_WORDS[script] in zoo.tag(number, "hermes.output_tail")
    assert REASONS[script] in zoo.tag(number, "hermes.reason")


def test_a_script_that_hangs_has_its_whole_time_at_each_try(zoo: Any) -> None:
    spans = [s["end_s"] - s["start_s"] for s in zoo.segments(BAD.index("hangs.py"))]
    assert [span >= 5 for span in spans] == [True, True]


def test_the_other_trials_go_on(zoo: Any) -> None:
    document = zoo.document()
    assert [t["state"] for t in document["trials"]] == ["failed"] * len(BAD) + ["finished"] * 2
    assert document["best"]["number"] >= len(BAD)
    assert [step for step, _ in zoo.curve(len(BAD))] == [1, 2, 3, 4, 5]
    assert zoo.state == "success"


def test_a_missing_working_directory_fails_the_trials_and_is_named(gone: Any) -> None:
    assert gone.states() == {0: "failed", 1: "failed"}
    assert "working directory" in gone.log("trial", 0)
    assert "trial.directory" in gone.tag(0, "hermes.reason")
    document = gone.document()
    assert document["best"] is None
    assert gone.state == "failed"


def test_the_failure_budget_ends_the_sweep(lab: Any, harness: Any) -> None:
    content = harness.config(
        "doomed",
        {"script": ["exits.py", "./exits.py", "stub.py", ".//exits.py", "./stub.py"]},
        "{script}", "--epochs", "1000",
        trial={"max_failures": 0},
        budget={"failed_trials": 2},
    )  # fmt: skip
    sweep = lab.run(content)
    states = [t["state"] for t in sweep.document()["trials"]]
    assert states[:2] == ["failed", "failed"]
    assert set(states[2:]) <= {"cancelled", "failed"}
    assert "cancelled" in states
    assert "failed_trials" in sweep.parent["tags"]["hermes.closed"]
    assert sweep.live() == []


def test_a_sweep_whose_script_cannot_run_ends_by_itself_and_says_why_once_everywhere(
    lab: Any, harness: Any
) -> None:
    sweep = lab.run(harness.config("alike", {"n": [*range(12)]}, "no_package.py", "{n}"))
    document = sweep.document()
    states = [t["state"] for t in document["trials"]]
    assert 3 <= states.count("failed") <= 4  # two train at once
    assert set(states) == {"failed", "cancelled"}
    assert {len(sweep.segments(n)) for n, s in enumerate(states) if s == "failed"} == {1}
    why = "ModuleNotFoundError: No module named 'no_such_package_anywhere'"
    listed = json.loads(lab.hermes("sweep", "list", "--json").stdout)
    (row,) = (r for r in listed if r["sweep"] == sweep.id)
    tags = sweep.parent["tags"]
    assert (row["state"], document["state"], tags["hermes.state"], sweep.state) == ("failed",) * 4
    for words in (row["reason"], document["reason"], tags["hermes.failed"]):
        # Two slots: a fourth trial may have failed before the sweep was ended.
        assert re.match("the first [34] trials failed alike: exit code 1", words)
        assert why in words
    shown = lab.hermes("sweep", "show", sweep.id).stdout
    assert "".join(shown.split()).count("Nomodulenamed") == 1
    failed = states.index("failed")
    explained = lab.hermes("explain", f"{sweep.id}/{failed}").stdout
    assert f"{sweep.id}/{failed} has ended: failed, because: exit code 1: {why}" in explained


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "low above high": (
        {"search": {"space": {"rate": {"type": "uniform", "low": 2, "high": 1}}}},
        "search.space.rate",
        "Fix",
    ),
    "a grid over a range": (
        {"search": {"space": {"rate": {"type": "uniform", "low": 1, "high": 2}}}},
        "search.space.rate",
        "Fix",
    ),
    "an unknown key": ({"budgets": {"max_epochs": 3}}, "budgets", "Fix"),
    "a relative directory": ({"trial": {"directory": "here"}}, "trial.directory", "Fix"),
}


def _known(lab: Any) -> list[str]:
    """The ids of all sweeps, newest first."""
    return [run["dag_run_id"] for run in json.loads(lab.hermes("sweep", "list", "--json").stdout)]


def _spoilt(harness: Any, changes: dict[str, Any]) -> Any:
    content = harness.stub("refused", [1.0], 3, 0.1)
    return content | {key: {**content.get(key, {}), **value} for key, value in changes.items()}


@pytest.fixture(scope="module")
def refused(lab: Any, harness: Any) -> Any:
    """One sweep for each bad config, triggered over REST."""
    sweeps = {what: lab.start(_spoilt(harness, bad[0])) for what, bad in REFUSED.items()}
    for sweep in sweeps.values():
        sweep.await_end()
    return sweeps


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_config_over_rest_is_refused_by_the_plan_and_nothing_starts(
    refused: Any, lab: Any, what: str
) -> None:
    sweep, (_, path, fix) = refused[what], REFUSED[what]
    tasks = sweep.tasks()
    assert tasks["plan", -1]["state"] == "failed"
    assert tasks["plan", -1]["try_number"] == 1
    log = sweep.log("plan")
    assert path in log
    assert fix in log
    assert {t["state"] for (task, _), t in tasks.items() if task == "trial"} == {"upstream_failed"}
    assert sweep.state == "failed"
    assert lab.runs(sweep.id) == []
    assert not (sweep.folder / "trials").exists()


def test_what_the_trigger_form_can_check_is_refused_at_once(lab: Any, harness: Any) -> None:
    before = _known(lab)
    content = _spoilt(harness, {"trial": {"comand": ["x"]}})
    answer = lab.airflow.post(harness.DAG, json={"conf": content, "logical_date": None})
    assert answer.status_code == 400
    assert "'comand' was unexpected" in answer.text
    assert _known(lab) == before


def test_a_bad_file_on_the_command_line_triggers_nothing(lab: Any, harness: Any) -> None:
    before = _known(lab)
    content = _spoilt(
        harness, {"search": {"space": {"rate": {"type": "uniform", "low": 2, "high": 1}}}}
    )
    said = lab.hermes("sweep", "run", str(lab.file(content)))
    assert said.returncode == 1
    assert "search.space.rate" in said.stderr
    assert "Traceback" not in said.stderr
    assert _known(lab) == before


def test_check_prints_what_a_file_means_and_starts_nothing(lab: Any, harness: Any) -> None:
    before = _known(lab)
    said = lab.hermes("sweep", "check", str(lab.file(harness.stub("fine", [0.5, 1.5], 7, 0.1))))
    assert said.returncode == 0
    assert "0.5" in said.stdout
    assert "1.5" in said.stdout
    assert _known(lab) == before


def test_a_sweep_that_is_not_there_is_named_in_one_line(lab: Any, tmp_path: Path) -> None:
    for command in (("watch", "none"), ("stop", "none"), ("report", "none")):
        said = lab.hermes("sweep", *command)
        assert said.returncode == 1
        assert len(said.stderr.strip().splitlines()) == 1

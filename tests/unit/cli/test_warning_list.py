"""Warnings of a sweep file on the command line, and what those who follow a sweep are told."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops import cli
from hermes_ops.airflow.credentials import AirflowCredentials
from hermes_ops.cli import live_view
from hermes_ops.cli.connection import Connection
from hermes_ops.cli.live_view import Notices, not_preemptible
from hermes_ops.cli.sweep_location import SweepLocation
from hermes_ops.config import SweepConfig, dag_params_schema, parse
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.tracking import tracker as tracker_module

SWEEP: dict[str, Any] = {
    "name": "digits",
    "objective": {"metric": "val_accuracy"},
    "search": {"algorithm": "random", "max_trials": 9,
               "space": {"x": {"type": "choice", "values": [1, 2]}}},
    "trial": {"command": ["python", "train.py", "{x}"], "gpus": 5},
    "budget": {"max_epochs": 2},
}  # fmt: skip
WHERE = ["trial.gpus", "search.max_trials", "objective.direction", "trial.command[1]"]


@dataclass
class Airflow:
    """An Airflow with one pool of two slots."""

    credentials: AirflowCredentials
    timeout_s: float = 30.0
    slots: int = 2
    paused: bool = False
    stale: bool = False
    away: bool = False
    configurations: list[Mapping[str, Any]] = field(default_factory=list)

    def pool(self, name: str) -> dict[str, Any]:
        if self.away:
            raise Unavailable("Airflow did not answer")
        return {"name": name, "slots": self.slots}

    def dag(self, dag_id: str) -> dict[str, Any] | None:
        return None if dag_id == "nowhere" else self._dag()

    def dag_fields(self, dag_id: str) -> frozenset[str] | None:
        fields = {"nowhere": None, "etl": frozenset({"day"}), "nightly_digits": frozenset[str](),
                  "own_form": frozenset({"budget"})}  # fmt: skip
        return fields.get(dag_id, frozenset(dag_params_schema()))

    def _dag(self) -> dict[str, Any]:
        return {"is_paused": self.paused, "is_stale": self.stale}

    def user_name(self) -> str:
        return self.credentials.user

    def trigger(self, dag_id: str, run_id: str, conf: Mapping[str, Any], note: str) -> None:
        STARTED.append(run_id)
        self.configurations.append(conf)


STARTED: list[str] = []


def reached(airflow: Airflow) -> Any:
    outside: Any = airflow
    tracker: Any = None
    return Connection(outside, tracker, "gpus", airflow.credentials.url, "http://mlflow")


@pytest.fixture(autouse=True)
def airflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Airflow:
    for name in [n for n in os.environ if n.startswith(("HERMES_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HERMES_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    found = Airflow(AirflowCredentials("http://127.0.0.1:8080", "me", tmp_path / "none"))
    monkeypatch.setattr(
        "hermes_ops.cli.connection.Connection.from_home", lambda home: reached(found)
    )
    monkeypatch.setattr("hermes_ops.airflow.client.AirflowClient", lambda *_, **__: found)
    monkeypatch.setattr("hermes_ops.cli.sweep_check.estimate_or_reason", lambda *_: None)
    STARTED.clear()
    (tmp_path / "sweep.json").write_text(json.dumps(SWEEP))
    return found


def hermes(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hermes", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def numbered(text: str) -> list[str]:
    """The places of the warnings in a list, which is numbered from 1."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    found = [line.split() for line in lines if line[:1].isdigit() and "Fix: " in line]
    assert [words[0] for words in found] == [f"{n}." for n in range(1, len(found) + 1)]
    return [words[1].rstrip(":") for words in found]


def test_a_sweep_is_run_resolved_but_for_a_seed_that_its_file_leaves_open(
    airflow: Airflow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in ({}, {"seed": 0}):
        (tmp_path / "sweep.json").write_text(json.dumps(SWEEP | {"search": SWEEP["search"] | seed}))
        assert hermes(capsys, "sweep", "run", "sweep.json")[0] == 0
    without, with_seed = (conf["search"] for conf in airflow.configurations)
    assert with_seed == without | {"seed": 0}
    assert "startup_trials" in without
    assert "seed" not in without


def test_check_lists_the_warnings_behind_what_the_file_means(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = hermes(capsys, "sweep", "check", "sweep.json")
    preview, _, warnings = out.partition("4 warnings:")
    assert (code, err, numbered(warnings)) == (0, "", WHERE)
    assert "First trials:" in preview


def test_a_folder_that_cannot_be_copied_for_each_trial_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_ops.trial.workspace.MOST_FILES", 1)
    for directory, said in (("copy", True), (".", False)):
        trial = {**SWEEP["trial"], "directory": directory}
        (tmp_path / "sweep.json").write_text(json.dumps({**SWEEP, "trial": trial}))
        (tmp_path / "train.py").write_text("")
        found = numbered(hermes(capsys, "sweep", "check", "sweep.json")[1])
        assert ("trial.workspace" in found) == said


def test_check_prints_one_document_with_the_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = hermes(capsys, "sweep", "check", "sweep.json", "--json")
    document = json.loads(out)
    assert code == 0
    assert [w["where"] for w in document["warnings"]] == WHERE
    assert all(w["found"] and w["leads_to"] and w["fix"] for w in document["warnings"])
    assert document["config"]["name"] == "digits"
    assert len(document["first_trials"]) == 9


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_class_that_the_user_may_not_use_starts_nothing(
    capsys: pytest.CaptureFixture[str], command: str, tmp_path: Path
) -> None:
    quota = {"teams": [], "classes": [{"name": "interactive", "users": ["ann"]}]}
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "quota-gpus.json").write_text(json.dumps({"quota": quota}))
    (tmp_path / "sweep.json").write_text(json.dumps({**SWEEP, "class": "interactive"}))
    code, _, err = hermes(capsys, "sweep", command, "sweep.json")
    assert (code, STARTED) == (1, [])
    assert "class: found user me may not use the class 'interactive'; allowed: one of normal" in (
        " ".join(err.split())
    )


def test_a_class_in_a_pool_without_a_quota_is_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({**SWEEP, "class": "interactive"}))
    code, out, _ = hermes(capsys, "sweep", "check", "sweep.json")
    assert code == 0
    assert "class" in numbered(out)
    assert "the class has no effect" in out


@pytest.mark.parametrize("command", ["check", "run"])
def test_strict_refuses_warnings_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    code, _, err = hermes(capsys, "sweep", command, "sweep.json", "--strict")
    assert (code, numbered(err), STARTED) == (2, WHERE, [])
    assert "Nothing was started" in err


def test_strict_starts_a_sweep_without_warnings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("")
    sound = {**SWEEP, "objective": {"metric": "val_loss"},
             "search": {**SWEEP["search"], "max_trials": 2},
             "trial": {"command": SWEEP["trial"]["command"]}}  # fmt: skip
    (tmp_path / "sweep.json").write_text(json.dumps(sound))
    code, _, err = hermes(capsys, "sweep", "run", "sweep.json", "--strict")
    assert (code, err, len(STARTED)) == (0, "", 1)


def test_run_says_the_warnings_and_starts(
    capsys: pytest.CaptureFixture[str], airflow: Airflow
) -> None:
    airflow.paused = True
    code, out, err = hermes(capsys, "sweep", "run", "sweep.json")
    assert (code, numbered(err), len(STARTED)) == (0, [*WHERE, "Airflow"], 1)
    assert "the DAG hermes_sweep is paused" in err
    assert "has started" in out


@pytest.mark.parametrize("by_variable", [False, True])
def test_run_starts_the_sweep_in_the_dag_that_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, by_variable: bool
) -> None:
    if by_variable:
        monkeypatch.setenv("HERMES_DAG", "vision_sweep")
    named = () if by_variable else ("--dag", "vision_sweep")
    code, out, _ = hermes(capsys, "sweep", "run", "sweep.json", *named)
    (run,) = STARTED
    assert code == 0
    assert f"Sweep vision_sweep:{run} has started" in out
    assert f"/dags/vision_sweep/runs/{run}\n" in out
    assert f"hermes sweep watch vision_sweep:{run}" in out


def test_run_starts_nothing_in_a_dag_that_is_not_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = hermes(capsys, "sweep", "run", "sweep.json", "--dag", "nowhere")
    assert (code, STARTED) == (1, [])
    assert "Airflow has no DAG 'nowhere'" in err


def test_run_starts_the_sweep_in_a_dag_whose_form_is_not_the_whole_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert hermes(capsys, "sweep", "run", "sweep.json", "--dag", "own_form")[0] == 0
    assert len(STARTED) == 1


@pytest.mark.parametrize("dag", ["etl", "nightly_digits"])
def test_run_starts_nothing_in_a_dag_that_would_not_run_the_sweep_of_the_file(
    capsys: pytest.CaptureFixture[str], dag: str
) -> None:
    code, _, err = hermes(capsys, "sweep", "run", "sweep.json", "--dag", dag)
    assert (code, STARTED) == (1, [])
    assert f"the DAG {dag!r} runs no sweep that is sent to it" in err


def test_an_airflow_that_is_away_leaves_what_the_file_says(
    capsys: pytest.CaptureFixture[str], airflow: Airflow
) -> None:
    airflow.away = True
    _, out, _ = hermes(capsys, "sweep", "check", "sweep.json")
    assert numbered(out.partition("warnings:")[2]) == WHERE[1:]


def test_no_script_is_looked_for_where_airflow_is_on_another_machine(
    capsys: pytest.CaptureFixture[str], airflow: Airflow
) -> None:
    airflow.credentials = AirflowCredentials("https://airflow.example.org", "me", Path("none"))
    _, out, _ = hermes(capsys, "sweep", "check", "sweep.json")
    assert numbered(out.partition("warnings:")[2]) == WHERE[:-1]


# -- following -----------------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the plan has left: the configuration (None: nothing yet) and the sweep's tags."""
    left: dict[str, Any] = {"config": parse(SWEEP, "", None), "tags": {}}

    def fetch_config(connection: Connection, place: SweepLocation) -> SweepConfig:
        if left["config"] is None:
            raise HermesError("has not been planned")
        config: SweepConfig = left["config"]
        return config

    monkeypatch.setattr(live_view, "fetch_config", fetch_config)
    monkeypatch.setattr(tracker_module, "require_sweep", lambda *_: None)
    return left


def following(airflow: Airflow, planned: dict[str, Any], warnings: Any = None) -> Notices:
    outside: Any = airflow
    tracker: Any = SimpleNamespace(sweep=lambda _: SimpleNamespace(tags=planned["tags"]))
    connection = Connection(outside, tracker, "gpus", "", "")
    return Notices(connection, SweepLocation.in_main_dag("digits-1"), warnings)


def test_a_sweep_that_can_never_start_is_said_once(
    airflow: Airflow, planned: dict[str, Any]
) -> None:
    notices = following(airflow, planned)
    (line,) = notices.due(0.0, None)
    assert "a trial needs 5 GPUs and the pool gpus has 2 slots: no trial can ever start" in line
    assert [*notices.due(100.0, None)] == []
    airflow.slots = 0
    (line,) = notices.due(200.0, None)
    assert "the pool gpus has 0 slots" in line


def test_a_paused_dag_is_said_before_the_sweep_is_planned(
    airflow: Airflow, planned: dict[str, Any]
) -> None:
    airflow.paused, planned["config"] = True, None
    (line,) = following(airflow, planned).due(0.0, None)
    assert "The DAG hermes_sweep is paused" in line


def test_a_dag_that_is_no_longer_in_its_folder_is_said_with_the_remedy(
    airflow: Airflow, planned: dict[str, Any]
) -> None:
    airflow.stale, planned["config"] = True, None
    (line,) = following(airflow, planned).due(0.0, None)
    assert "The DAG hermes_sweep is no longer in Airflow's DAG folder" in line
    assert "until you put its file back, or correct it" in line


def test_what_the_plan_found_is_said_to_those_who_were_not_told(
    airflow: Airflow, planned: dict[str, Any]
) -> None:
    seen = {"where": "trial.gpus", "found": "5 GPUs", "leads_to": "it waits", "fix": "write 2"}
    planned["tags"] = {"hermes.warnings": json.dumps([seen])}
    notices = following(airflow, planned)
    assert [*notices.due(0.0, None)] == ["Warning: trial.gpus: 5 GPUs; it waits. Fix: write 2"]
    assert notices.warnings == [seen]
    assert [*following(airflow, planned, [seen]).due(0.0, None)] == []


def test_nothing_keeps_a_sweep_from_starting_that_has_ended(
    airflow: Airflow, planned: dict[str, Any]
) -> None:
    seen = {"where": "search.space", "found": "x", "leads_to": "y", "fix": "z"}
    planned["tags"], airflow.paused = {"hermes.warnings": json.dumps([seen])}, True
    notices = following(airflow, planned)
    assert [*notices.due(0.0, None, over=True)] == ["Warning: search.space: x; y. Fix: z"]
    assert notices.warnings == [seen]


def test_services_that_are_away_are_no_news(airflow: Airflow, planned: dict[str, Any]) -> None:
    airflow.away = True
    assert [*following(airflow, planned, []).due(0.0, None)] == []


def test_why_trials_cannot_be_preempted_is_said_once_a_reason(
    airflow: Airflow, planned: dict[str, Any]
) -> None:
    reasons = {"0": "it writes no checkpoint", "3": "it writes no checkpoint"}
    view = {"sweeps": {"digits-1": {"not_preemptible": reasons}}}
    airflow.slots = 8
    notices = following(airflow, planned, [])
    (line,) = notices.due(0.0, view)
    assert "cannot be preempted while they train: it writes no checkpoint" in line
    assert [*notices.due(0.1, view)] == []
    assert [*not_preemptible({}, "digits-1")] == []


def test_values_that_are_not_read_are_said_once_a_sweep(
    airflow: Airflow, planned: dict[str, Any]
) -> None:
    airflow.slots = 8
    notices = following(airflow, planned, [])
    view = {"sweeps": {"digits-1": {"advice": {"2": "no value of 'val_loss' has been read"}}}}
    assert [*notices.due(0.0, view)] == ["Trial 2: no value of 'val_loss' has been read"]
    view["sweeps"]["digits-1"]["advice"] = {"3": "no value of 'val_loss' either"}
    assert [*notices.due(0.1, view)] == []


def test_trials_as_processes_are_warned_of_where_their_executor_refuses_them(
    tmp_path: Path, airflow: Airflow, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").mkdir()
    view = {"process_refusal": "CeleryExecutor runs the trials' tasks, on any of its workers"}
    (tmp_path / "home/pool-gpus.json").write_text(json.dumps(view))
    warnings = json.loads(hermes(capsys, "sweep", "check", "sweep.json", "--json")[1])["warnings"]
    (told,) = [w for w in warnings if w["where"] == "trial.run_in"]
    assert "CeleryExecutor" in told["found"]
    assert "run_in: pod" in told["fix"]
    pods = {**SWEEP, "trial": {**SWEEP["trial"], "run_in": "pod", "directory": "/work"}}
    (tmp_path / "sweep.json").write_text(json.dumps(pods))
    warnings = json.loads(hermes(capsys, "sweep", "check", "sweep.json", "--json")[1])["warnings"]
    assert "trial.run_in" not in [w["where"] for w in warnings]

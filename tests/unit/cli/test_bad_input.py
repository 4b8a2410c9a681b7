from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops import cli
from hermes_ops.airflow.records import CLOSE_KEY, REACHED_TAG, CloseRecord, encode
from hermes_ops.cli.sweep_location import SweepLocation
from hermes_ops.errors import NotPermitted, Unavailable
from hermes_ops.stack.layout import Layout
from hermes_ops.stack.record import StackRecord, save


class Airflow:
    """An Airflow that knows the runs that it is given."""

    def __init__(self, *runs: str, away: bool = False) -> None:
        self.runs, self.away = runs, away
        self.put: list[Any] = []
        self.notes: list[Any] = []
        self.may_edit = True
        self.plan_state = "failed"

    def confirm_pool_edit(self, name: str) -> None:
        if not self.may_edit:
            raise NotPermitted("Airflow refused PATCH /api/v2/pools/gpus (403): Forbidden")

    def dag_run(self, dag: str, run: str) -> dict[str, Any] | None:
        if self.away:
            raise Unavailable("Airflow at http://a did not answer")
        return {"state": "running"} if run in self.runs else None

    def task_instance(self, task: Any) -> dict[str, Any]:
        return {"state": self.plan_state}

    def get_state(self, task: Any, key: str) -> Any:
        return next((record[2] for record in self.put if record[:2] == (task, key)), None)

    def put_state(self, *record: Any) -> None:
        self.put.append(record)

    def user_name(self) -> str:
        return "anna"

    def note(self, task: Any, text: str) -> None:
        self.notes.append((task, text))

    def pool(self, name: str) -> dict[str, Any]:
        return {"name": name, "slots": 2}

    def dag(self, dag: str) -> dict[str, Any]:
        return {"is_paused": False}


SIMULATED = ("--poisson", "2", "--gpus", "1", "--policy", "fifo")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["sweep", "check", "~no-such-user/sweep.yaml"], "~no-such-user/sweep.yaml"),
        (["status", "--home", "~no-such-user/hermes"], "there is no user 'no-such-user' here"),
        (["status", "--home", "/dev/null"], "/dev/null/stack.json: Not a directory"),
        (["simulate", *SIMULATED, "--teams", "~no-such-user/q.yaml"], "~no-such-user/q.yaml"),
    ],
)
def test_a_path_that_cannot_be_is_one_error_and_no_trace(
    command: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["hermes", *command])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code not in (0, None)
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


class Sweeps:
    """An MLflow that knows no sweep."""

    def find_sweep(self, *_: object) -> None:
        return None

    uri = "http://m"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [n for n in os.environ if n.startswith(("HERMES_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HERMES_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def airflow(monkeypatch: pytest.MonkeyPatch) -> Airflow:
    found = Airflow("known")
    reached = SimpleNamespace(airflow=found, tracker=Sweeps(), pool="gpus", airflow_url="http://a")
    monkeypatch.setattr("hermes_ops.cli.connection._system_user", lambda: "an")
    monkeypatch.setattr("socket.gethostname", lambda: "laptop")
    monkeypatch.setattr("hermes_ops.cli.connection.Connection.from_home", lambda home: reached)
    return found


class Said:
    """What `hermes ARGUMENTS` printed and how it ended."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["hermes", *arguments])
            with pytest.raises(SystemExit) as ended:
                cli.main()
        self.code = ended.value.code
        self.out, self.err = capsys.readouterr()

    @property
    def line(self) -> str:
        """The one line that it said to the user."""
        assert self.code == 1
        assert self.out == ""
        (line,) = self.err.splitlines()
        return line


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_missing_sweep_file_is_named(
    capsys: pytest.CaptureFixture[str], command: str, airflow: Airflow
) -> None:
    said = Said(capsys, "sweep", command, "gone.yaml")
    assert said.code == 1
    assert "gone.yaml" in said.err
    assert "Traceback" not in said.err
    assert len(said.err.splitlines()) <= 2


@pytest.mark.parametrize("command", ["watch", "stop", "report"])
def test_an_unknown_sweep_is_said_to_be_unknown(
    capsys: pytest.CaptureFixture[str], command: str, airflow: Airflow
) -> None:
    line = Said(capsys, "sweep", command, "nobody's").line
    assert line == (
        "hermes: there is no sweep \"nobody's\": `hermes sweep list` shows them."
    )  # fmt: skip


def test_a_sweep_that_was_never_planned_has_no_report(
    capsys: pytest.CaptureFixture[str], airflow: Airflow
) -> None:
    line = Said(capsys, "sweep", "report", "known").line
    assert "'known' has not been planned" in line
    assert line.endswith("/dags/hermes_sweep/runs/known/tasks/plan")


def test_a_sweep_whose_record_was_deleted_is_not_said_to_be_unplanned(
    capsys: pytest.CaptureFixture[str], airflow: Airflow
) -> None:
    airflow.plan_state = "success"
    line = Said(capsys, "sweep", "report", "known").line
    assert "has been deleted from Airflow" in line
    assert line.endswith("MLflow has nothing of it either")


@pytest.mark.parametrize("trial", ["digits-1", "digits-1/", "/3", "digits-1/x", "digits-1/-1"])
def test_a_malformed_trial_is_no_trial(
    capsys: pytest.CaptureFixture[str], airflow: Airflow, trial: str
) -> None:
    line = Said(capsys, "explain", trial).line
    assert f"{trial!r} is no trial: write SWEEP/NUMBER" in line


@pytest.mark.parametrize(
    "arguments",
    [("sweep", "list"), ("sweep", "watch", "x"), ("sweep", "stop", "x"), ("explain", "x/1")],
)
def test_without_a_stack_the_remedy_is_said(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert "hermes up" in Said(capsys, *arguments).line


def test_a_service_that_is_away_is_one_line(
    capsys: pytest.CaptureFixture[str], airflow: Airflow
) -> None:
    airflow.away = True
    assert Said(capsys, "sweep", "stop", "known").line == (
        "hermes: Airflow at http://a did not answer"
    )  # fmt: skip


def test_a_sweep_for_another_pool_starts_nothing(
    capsys: pytest.CaptureFixture[str], airflow: Airflow, tmp_path: Path
) -> None:
    sweep = {
        "name": "digits", "pool": "other",
        "objective": {"metric": "loss", "direction": "minimize"},
        "search": {"algorithm": "random", "max_trials": 2,
                   "space": {"x": {"type": "uniform", "low": 0, "high": 1}}},
        "trial": {"command": ["python", "train.py"]},
        "budget": {"max_epochs": 2},
    }  # fmt: skip
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    said = Said(capsys, "sweep", "run", "sweep.json")
    assert "pool is 'other', but this stack serves 'gpus'" in said.err
    assert "--pool other" in said.err


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_sweep_of_processes_is_refused_before_it_is_sent_where_trials_are_pods(
    capsys: pytest.CaptureFixture[str], airflow: Airflow, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, command: str,
) -> None:  # fmt: skip
    sweep = {
        "name": "digits",
        "objective": {"metric": "loss"},
        "search": {"algorithm": "random", "max_trials": 2,
                   "space": {"x": {"type": "uniform", "low": 0, "high": 1}}},
        "trial": {"command": ["python", "train.py"], "run_in": "process"},
        "budget": {"max_epochs": 2},
    }  # fmt: skip
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    monkeypatch.setenv("HERMES_RUN_IN", "pod")
    said = Said(capsys, "sweep", command, "sweep.json")
    assert said.code != 0
    assert "trial.run_in: found process; allowed: pod" in said.err
    assert "Traceback" not in said.err


def test_a_bad_policy_changes_nothing(
    capsys: pytest.CaptureFixture[str], airflow: Airflow, home: Path
) -> None:
    for arguments in (
        ("fastest",),
        ("srtf",),
        ("flowcon",),
        ("hermes", "--option", "colour=red"),
        ("hermes", "--option", "guard_k=x"),
        ("hermes", "--option", "guard_k"),
    ):
        said = Said(capsys, "policy", *arguments)
        assert said.code != 0
        assert "Traceback" not in said.err
    assert not (home / "policy.json").exists()


def test_options_without_a_policy_are_refused_instead_of_left_out(
    capsys: pytest.CaptureFixture[str], airflow: Airflow, home: Path
) -> None:
    said = Said(capsys, "policy", "--option", "guard_k=2")
    assert said.code == 2
    assert "name the policy" in said.err
    assert not (home / "policy.json").exists()


def test_stopping_a_sweep_that_runs_closes_it_with_the_users_reason(
    capsys: pytest.CaptureFixture[str], airflow: Airflow
) -> None:
    said = Said(capsys, "sweep", "stop", "known", "--reason", "wrong data")
    why = "wrong data (stopped by an@laptop, Airflow user anna)"
    assert (said.code, said.out) == (0, f"Sweep known ends: {why}.\n")
    ((task, key, value),) = airflow.put
    assert (task.run_id, task.task_id, key) == ("known", "plan", "hermes_close")
    assert (value["reason"], value["state"]) == (why, "cancelled")
    ((noted, note),) = airflow.notes  # the request by which Airflow's audit log knows the user
    assert noted == task
    assert note.endswith(": stop by an@laptop, Airflow user anna")


def test_stopping_a_sweep_that_ends_by_its_target_leaves_it_that_end(
    capsys: pytest.CaptureFixture[str], airflow: Airflow
) -> None:
    place = SweepLocation.in_main_dag("known")
    reached = encode(CloseRecord("trial 3 reached it", "stopped_early", 7.0, REACHED_TAG))
    airflow.put_state(place.plan, CLOSE_KEY, reached)
    said = Said(capsys, "sweep", "stop", "known")
    assert (said.code, said.out) == (0, "Sweep known ends already: trial 3 reached it.\n")
    assert len(airflow.put) == 1


def test_without_a_reason_the_person_is_the_reason(
    capsys: pytest.CaptureFixture[str], airflow: Airflow
) -> None:
    Said(capsys, "sweep", "stop", "known")
    ((_, _, value),) = airflow.put
    assert value["reason"] == "stopped by an@laptop, Airflow user anna"


def test_a_good_policy_is_written_for_a_home_that_is_not_there_yet(
    capsys: pytest.CaptureFixture[str], airflow: Airflow, home: Path
) -> None:
    said = Said(capsys, "policy", "fifo", "--option", "guard_k=2")
    assert (said.code, said.err) == (0, "")
    written = json.loads((home / "policy.json").read_text())
    assert (written["policy"], written["options"]) == ("fifo", {"guard_k": 2})
    assert written["by"] == "an@laptop, Airflow user anna"
    assert "by an@laptop, Airflow user anna.\n" in Said(capsys, "policy").out


def test_a_user_who_may_not_edit_the_pool_changes_no_policy(
    capsys: pytest.CaptureFixture[str], airflow: Airflow, home: Path
) -> None:
    airflow.may_edit = False
    line = Said(capsys, "policy", "fifo").line
    assert line == (
        "hermes: The Airflow user anna may not edit the pool gpus, so neither its policy: nothing "
        "was changed. Ask an administrator of Airflow."
    )
    assert not (home / "policy.json").exists()
    assert "There are: " in Said(capsys, "policy").out  # everybody may read it


def test_a_report_is_not_written_over_a_file(
    capsys: pytest.CaptureFixture[str], airflow: Airflow, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("mine")
    line = Said(capsys, "sweep", "report", "known", "--out", "taken").line
    assert line == "hermes: taken is a file: name a folder with --out."


TEAMS = "teams: [{name: vision, guaranteed: 1, users: [ann]}, {name: speech}]\n"


def test_a_setting_in_a_folder_of_no_controller_is_not_said_to_be_in_force(
    capsys: pytest.CaptureFixture[str], airflow: Airflow, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "teams.yaml").write_text(TEAMS)
    orders = [("policy", "fifo"), ("pool", "quota", "teams.yaml"), ("pool", "quota", "--remove")]
    for words in orders:
        said = Said(capsys, *words)
        assert f"once its controller has the state folder {home}, where none has" in said.out
    (home / "pool-gpus.json").write_text("{}")
    for words in orders:
        assert "from now on" in Said(capsys, *words).out


def test_a_good_quota_is_written_with_the_person_and_shown(
    capsys: pytest.CaptureFixture[str], airflow: Airflow, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "teams.yaml").write_text(TEAMS + "users: [{name: ann, gpus: 1}]")
    assert "has no quota: `hermes pool quota FILE`" in Said(capsys, "pool", "quota").out
    home.mkdir(exist_ok=True)
    (home / "pool-gpus.json").write_text("{}")
    said = Said(capsys, "pool", "quota", "teams.yaml")
    assert (said.code, said.err) == (0, "")
    assert "from now on: 2 teams, 1 of 2 GPUs guaranteed" in said.out
    written = json.loads((home / "quota-gpus.json").read_text())
    assert written["quota"]["teams"][0]["users"] == ["ann"]
    assert written["by"] == "an@laptop, Airflow user anna"
    shown = Said(capsys, "pool", "quota").out
    for words in ("vision", "speech", "others", "GPUs at once", "by an@laptop, Airflow user anna."):
        assert words in shown
    assert json.loads(Said(capsys, "pool", "quota", "--json").out)["quota"] == written
    assert Said(capsys, "pool", "quota", "--remove").code == 0
    assert json.loads(Said(capsys, "pool", "quota", "--json").out) == {
        "pool": "gpus",
        "quota": None,
    }
    assert Said(capsys, "pool", "quota", "--remove").code == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("teams: [{name: a, guaranteed: 3}]", "at most 2, which the pool has"),
        ("teams: [{name: a, users: [x]}, {name: b, users: [x]}]", "each user in one team"),
        ("teams: [{name: a, guaranteed: -1}]", "teams.yaml:1 teams[0].guaranteed"),
        ("teams: [", "teams.yaml"),
    ],
)
def test_a_bad_quota_is_refused_with_its_place_and_the_one_in_force_stays(
    capsys: pytest.CaptureFixture[str],
    airflow: Airflow,
    home: Path,
    tmp_path: Path,
    text: str,
    words: str,
) -> None:
    (tmp_path / "teams.yaml").write_text(TEAMS)
    Said(capsys, "pool", "quota", "teams.yaml")
    before = (home / "quota-gpus.json").read_bytes()
    (tmp_path / "teams.yaml").write_text(text)
    said = Said(capsys, "pool", "quota", "teams.yaml")
    assert said.code == 1
    assert words in said.err
    assert "Traceback" not in said.err
    assert (home / "quota-gpus.json").read_bytes() == before


def test_a_user_who_may_not_edit_the_pool_changes_no_quota(
    capsys: pytest.CaptureFixture[str], airflow: Airflow, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "teams.yaml").write_text(TEAMS)
    airflow.may_edit = False
    for arguments in (("teams.yaml",), ("--remove",)):
        line = Said(capsys, "pool", "quota", *arguments).line
        assert "The Airflow user anna may not edit the pool gpus" in line
        assert "Ask an administrator" in line
    assert not (home / "quota-gpus.json").exists()


def test_a_quota_is_not_set_and_removed_at_once(
    capsys: pytest.CaptureFixture[str], airflow: Airflow
) -> None:
    said = Said(capsys, "pool", "quota", "teams.yaml", "--remove")
    assert said.code == 2
    assert "not both" in said.err


def test_who_may_read_the_administrators_password_sets_the_quota_as_that_user(
    capsys: pytest.CaptureFixture[str],
    airflow: Airflow,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (home / "secrets").mkdir(parents=True)
    (home / "secrets" / "admin.password").write_text("secret")
    stack = StackRecord(str(home), "http://a", "http://m", "gpus", 2, "fifo", {}, False, 0, 0.0)
    save(Layout(home), stack)
    (tmp_path / "teams.yaml").write_text(TEAMS)
    airflow.may_edit = False
    edited: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "hermes_ops.airflow.client.AirflowClient.confirm_pool_edit",
        lambda self, pool: edited.append((self.credentials.user, pool)),
    )
    assert Said(capsys, "pool", "quota", "teams.yaml").code == 0
    assert edited == [("admin", "gpus")]
    written = json.loads((home / "quota-gpus.json").read_text())
    assert written["by"] == "an@laptop, Airflow user admin"


def test_another_airflow_is_not_told_the_administrators_password_of_this_stack(
    capsys: pytest.CaptureFixture[str],
    airflow: Airflow,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (home / "secrets").mkdir(parents=True)
    (home / "secrets" / "admin.password").write_text("secret")
    (tmp_path / "teams.yaml").write_text(TEAMS)
    airflow.may_edit = False
    asked: list[str] = []
    monkeypatch.setattr(
        "hermes_ops.airflow.client.AirflowClient.confirm_pool_edit",
        lambda self, pool: asked.append(pool),
    )
    for port in ("", ":8080"):
        line = Said(capsys, "pool", "quota", "teams.yaml").line
        assert "may not edit the pool gpus" in line
        url = f"http://b{port}"
        save(Layout(home), StackRecord(str(home), url, url, "gpus", 2, "fifo", {}, False, 0, 0.0))
    assert asked == []

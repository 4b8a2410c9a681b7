from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from hermes_ops.airflow.prune import dag as prune_dag_module
from hermes_ops.airflow.prune.dag import PruneOperator, passed_on, prune_dag

DAG_FILE = Path(__file__).parents[4] / "dags" / "hermes_prune.py"


@pytest.fixture
def logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hidden")
    monkeypatch.setenv("HERMES_AIRFLOW_URL", "http://airflow")
    monkeypatch.setenv("HERMES_AIRFLOW_USER", "hermes-controller")
    monkeypatch.setenv("HERMES_AIRFLOW_PASSWORD_FILE", str(tmp_path / "password"))


def loaded() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(DAG_FILE.read_text(), str(DAG_FILE), "exec"), names)
    return names


def answer(monkeypatch: pytest.MonkeyPatch, code: int, out: str, err: str = "") -> list[Any]:
    asked: list[Any] = []

    def run(command: list[str], **more: Any) -> Any:
        asked.append((command, more))
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    monkeypatch.setattr(prune_dag_module, "subprocess", SimpleNamespace(
        run=run, DEVNULL=subprocess.DEVNULL))  # fmt: skip
    return asked


def document(**changes: Any) -> str:
    return json.dumps({"dry_run": False, "removed": [], "left": {}, "kept": {}, **changes})


@pytest.mark.usefixtures("logged_in")
def test_the_dag_is_paused_at_first_and_runs_one_task_each_night() -> None:
    dag = loaded()["hermes_prune"]
    assert dag.is_paused_upon_creation is True
    assert (dag.catchup, dag.max_active_runs, list(dag.task_dict)) == (False, 1, ["prune"])


@pytest.mark.parametrize(
    ("form", "variables", "age"),
    [
        (None, {}, "90d"),
        (None, {"hermes_prune_older_than": "8w"}, "8w"),
        ("12h", {"hermes_prune_older_than": "8w"}, "12h"),
    ],
)
def test_the_age_is_that_of_the_form_else_of_the_variable_else_90_days(
    form: str | None, variables: dict[str, str], age: str
) -> None:
    task: Any = prune_dag().get_task("prune")
    found = {"params": {"older_than": form, "keep_best": False}, "var": {"value": variables}}
    task.render_template_fields(found)
    assert (task.older_than, task.keep_best) == (age, "False")


def test_there_is_no_dag_where_tasks_cannot_log_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HERMES_AIRFLOW_PASSWORD_FILE", raising=False)
    assert "hermes_prune" not in loaded()


@pytest.mark.parametrize("age", ["90", "3m", "90d; rm", "-1d"])
def test_an_age_in_the_form_that_is_none_is_refused(age: str) -> None:
    dag = prune_dag(older_than="90d")
    dag.params["older_than"] = "12h"
    with pytest.raises(ValueError, match="Invalid input for param older_than"):
        dag.params["older_than"] = age


def test_the_command_gets_no_variable_but_those_of_its_services() -> None:
    environ = {
        "PATH": "/bin",
        "HERMES_HOME": "/h",
        "MLFLOW_TRACKING_URI": "http://m",
        "AWS_PROFILE": "p",
        "AIRFLOW__CORE__FERNET_KEY": "key",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "postgresql://",
        "MY_TOKEN": "token",
    }
    assert passed_on(environ).keys() == {
        "PATH",
        "HERMES_HOME",
        "MLFLOW_TRACKING_URI",
        "AWS_PROFILE",
    }


@pytest.mark.usefixtures("logged_in")
def test_it_returns_what_was_removed_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    removed = [{"sweep": "old", "bytes": 7}]
    asked = answer(monkeypatch, 0, f"a line\n{document(removed=removed, kept={'new': 'young'})}\n")
    own = PruneOperator(task_id="prune", older_than="90d", keep_best="True")
    assert own.execute({}) == {"removed": ["old"]}
    ((command, more),) = asked
    assert command[-6:] == ["prune", "--older-than", "90d", "--yes", "--json", "--keep-best"]
    assert more["stdin"] == subprocess.DEVNULL
    assert "AIRFLOW_HOME" not in more["env"]
    assert "--keep-best" not in PruneOperator(task_id="p", older_than="90d").command()


@pytest.mark.usefixtures("logged_in")
def test_what_is_left_fails_the_task_with_the_reason_to_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = PruneOperator(task_id="prune", older_than="90d")
    answer(monkeypatch, 1, document(left={"old": "its store did not obey"}))
    with pytest.raises(AirflowException, match="its store did not obey"):
        own.execute({})
    assert not issubclass(AirflowException, AirflowFailException)
    answer(monkeypatch, 1, "", "hermes: MLflow does not answer")
    with pytest.raises(AirflowException, match="MLflow does not answer"):
        own.execute({})


def test_a_task_that_cannot_log_in_says_what_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HERMES_AIRFLOW_URL", raising=False)
    with pytest.raises(AirflowFailException, match="HERMES_AIRFLOW_URL is not set"):
        PruneOperator(task_id="prune", older_than="90d").execute({})

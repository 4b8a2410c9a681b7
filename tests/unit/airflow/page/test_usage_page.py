"""The page's table of who used how much, what it counts for whom, and that it blocks nobody."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.airflow.control.quota_settings import QuotaSettings
from hermes_ops.airflow.metadata_rows import PastRun
from hermes_ops.airflow.page import usage_view
from hermes_ops.config.pool_quota import parse_quota
from hermes_ops.errors import Unavailable
from tests.unit.airflow.page.builders import (
    HOSTILE,
    Database,
    Get,
    Mlflow,
    Users,
    ended,
    read,
    trial_run,
)

TEAMS = {
    "teams": [{"name": "vision", "guaranteed": 1, "users": ["ann"]}],
    "rate": 36.0,
}


def of_user(past: PastRun, user: str, dag: str = "hermes_sweep") -> PastRun:
    return replace(past, run=replace(past.run, triggered_by=user, dag_id=dag))


@pytest.fixture(autouse=True)
def used(database: Database, mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sweeps of ann and bob, with one trial each that held a GPU for 30 s."""
    monkeypatch.setattr(usage_view, "PATIENCE_S", 60.0)
    database.runs = ()
    database.ended = [of_user(ended(9), "ann"), of_user(ended(8), "bob")]

    def every_run(ref: Any) -> Any:
        mlflow.asked += 1
        return None, (trial_run(0 if ref.sweep_id == "old-9" else 1, "finished", 0.5),)

    monkeypatch.setattr(mlflow, "every_run", every_run, raising=False)


def test_the_use_of_each_user_is_a_table_and_a_file(get: Get) -> None:
    seen = read(get("/usage"))
    assert "ann 1 30 30 0" in seen
    assert "bob 1 30 30 0" in seen
    answer = get("/usage", form="csv")
    assert answer.headers["content-type"].startswith("text/csv")
    assert "attachment" in answer.headers["content-disposition"]
    head, *rows = answer.text.splitlines()
    assert head.startswith("user,trials,gpu_seconds,trained_gpu_seconds,lost_gpu_seconds")
    assert [row.split(",")[:3] for row in rows] == [["ann", "1", "30.0"], ["bob", "1", "30.0"]]
    document = get("/usage", form="json", by="sweep").json()
    assert [(row["key"], row["gpu_seconds"]) for row in document["usage"]] == [
        ("old-8", 30.0), ("old-9", 30.0),
    ]  # fmt: skip


def test_teams_prices_and_loans_are_those_of_the_quota_in_force(get: Get) -> None:
    QuotaSettings(parse_quota(TEAMS, "test")).write(QuotaSettings.file("gpus"))
    rows = {row["key"]: row for row in get("/usage", form="json", by="team").json()["usage"]}
    assert rows["vision"]["borrowed_gpu_seconds"] == 0.0
    assert rows[""]["borrowed_gpu_seconds"] == 30.0
    assert rows["vision"]["price"] == pytest.approx(0.3)
    assert "none 1 30 30" in read(get("/usage", by="team"))


def test_of_sweeps_that_a_reader_may_not_see_nothing_is_counted(
    get: Get, database: Database
) -> None:
    database.ended[1] = of_user(ended(8), "bob", "private")
    seen = read(get("/usage"))
    assert "ann 1 30" in seen
    assert "bob" not in seen
    assert "Sweeps that you may not see are left out" in seen
    assert "borrowed" not in seen  # which would follow from all sweeps
    assert "bob" not in get("/usage", form="csv").text


def test_readers_of_different_sweeps_do_not_share_a_table(
    get: Get, database: Database, users: Users
) -> None:
    database.ended[1] = of_user(ended(8), "bob", "private")
    users.dags["eve"] = {"hermes_sweep", "private"}
    assert "bob 1 30" in read(get("/usage", user="eve"))
    assert "bob" not in read(get("/usage"))


def test_another_pool_has_a_table_of_its_own(get: Get, users: Users, database: Database) -> None:
    database.ended[1] = of_user(ended(8, pool="other"), "bob")
    assert "bob" not in read(get("/usage"))
    assert get("/usage", pool="other").status_code == 404


def test_an_ended_sweep_is_read_once_whatever_is_asked(get: Get, mlflow: Mlflow) -> None:
    for by in ("user", "team", "sweep", "day"):
        read(get("/usage", by=by))
    assert mlflow.asked == 2


def test_nobody_waits_for_a_reading_that_takes_long(
    get: Get, mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(usage_view, "PATIENCE_S", 0.0)
    monkeypatch.setattr(mlflow, "every_run", lambda ref: (None, goes_on.wait(60) and ()))
    answer = get("/usage")
    assert "It is being read." in read(answer)
    assert "data-refresh-s" in answer.text
    assert get("/usage", form="csv").status_code == 503
    monkeypatch.setattr(usage_view, "PATIENCE_S", 60.0)
    goes_on.set()
    assert "No trial held GPUs" in read(get("/usage"))


def test_a_silent_mlflow_is_said_without_its_address_and_is_asked_again(
    get: Get, mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(ref: Any) -> Any:
        raise Unavailable("MLflow at secret.internal did not answer")

    with monkeypatch.context() as patch:
        patch.setattr(mlflow, "every_run", away)
        answer = get("/usage")
    assert "MLflow did not answer" in read(answer)
    assert "secret.internal" not in answer.text
    assert "ann 1 30" in read(get("/usage"))


@pytest.mark.parametrize("query", [{"by": "team;"}, {"days": "0"}, {"form": "xml"}])
def test_a_question_that_is_none_is_refused(get: Get, query: dict[str, str]) -> None:
    assert get("/usage", **query).status_code == 422


def test_a_hostile_user_is_text(get: Get, database: Database) -> None:
    database.ended[1] = of_user(ended(8), HOSTILE)
    assert HOSTILE not in get("/usage").text
    assert HOSTILE in read(get("/usage"))


def test_a_user_whose_name_is_a_formula_is_text_in_the_file(get: Get, database: Database) -> None:
    database.ended[1] = of_user(ended(8), "=cmd()")
    assert "\n'=cmd(),1,30.0" in get("/usage", form="csv").text
    assert "=cmd() 1 30" in read(get("/usage"))
    keys = [row["key"] for row in get("/usage", form="json").json()["usage"]]
    assert "=cmd()" in keys

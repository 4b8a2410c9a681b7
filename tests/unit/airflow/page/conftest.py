"""The page of a planned sweep, with a stand-in for the log-in, the database and MLflow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.airflow.page.builders import Database, Get, Mlflow, Users, page_of, planned


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> Users:
    from airflow.api_fastapi.app import _AuthManagerState

    users = Users()
    monkeypatch.setattr(_AuthManagerState, "instance", users)
    return users


@pytest.fixture
def database(users: Users) -> Database:
    return planned()


@pytest.fixture
def mlflow() -> Mlflow:
    return Mlflow()


@pytest.fixture
def get(database: Database, mlflow: Mlflow) -> Iterator[Get]:
    with page_of(database, mlflow) as get:
        yield get

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hermes_ops.cli.connection import Connection
from hermes_ops.errors import HermesError, StackError


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The caller's variables out of the way, and back again whatever `connect` sets."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HERMES_", "MLFLOW_"))}
    monkeypatch.setattr(os, "environ", {**clean, "HERMES_HOME": str(tmp_path / "none")})


def outside(folder: Path) -> None:
    os.environ.update({
        "HERMES_AIRFLOW_URL": "http://airflow", "HERMES_AIRFLOW_USER": "me",
        "HERMES_AIRFLOW_PASSWORD_FILE": str(folder / "p"), "MLFLOW_TRACKING_URI": "http://mlflow",
    })  # fmt: skip


def test_an_airflow_that_is_already_there_is_reached_by_the_environment(tmp_path: Path) -> None:
    outside(tmp_path)
    os.environ["HERMES_POOL"] = "mine"
    found = Connection.from_home(None)
    assert (found.airflow_url, found.mlflow_url, found.pool) == (
        "http://airflow",
        "http://mlflow",
        "mine",
    )
    found.airflow.close()
    found.tracker.close()


def test_the_named_home_is_the_one_that_is_read_and_written(tmp_path: Path) -> None:
    from hermes_ops.airflow.folders import home

    outside(tmp_path)
    found = Connection.from_home(tmp_path / "theirs")
    assert home() == tmp_path / "theirs"
    found.airflow.close()
    found.tracker.close()


def test_without_a_stack_and_without_an_environment_there_is_nothing_to_reach() -> None:
    with pytest.raises(StackError, match="hermes up"):
        Connection.from_home(None)


def test_half_an_environment_is_named(tmp_path: Path) -> None:
    outside(tmp_path)
    del os.environ["HERMES_AIRFLOW_USER"]
    with pytest.raises(HermesError, match="HERMES_AIRFLOW_USER is not set"):
        Connection.from_home(None)

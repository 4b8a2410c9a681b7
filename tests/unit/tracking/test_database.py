"""MLflow's tables are made and upgraded by a program that has the address in its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError

from hermes_ops.tracking import database


def program(url: str) -> None:
    subprocess.run(
        [sys.executable, "-P", "-m", "hermes_ops.tracking.database", "upgrade"],
        env={**os.environ, "MLFLOW_BACKEND_STORE_URI": url},
        check=True,
        capture_output=True,
    )


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # of MLflow's models
def test_a_database_that_the_server_refuses_as_too_old_is_upgraded(tmp_path: Path) -> None:
    from alembic import command
    from alembic.script import ScriptDirectory
    from mlflow.exceptions import MlflowException
    from mlflow.store.db import utils
    from mlflow.store.tracking.dbmodels.initial_models import Base

    url = f"sqlite:///{tmp_path / 'mlflow.db'}"
    engine = create_engine(url)
    try:
        Base.metadata.create_all(engine)
        config = utils._get_alembic_config(url)
        scripts = ScriptDirectory.from_config(config)
        newest = scripts.get_current_head()
        assert newest is not None
        (before,) = scripts.get_revision(newest)._all_down_revisions
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, before)
        with pytest.raises(MlflowException, match="out-of-date"):
            utils._verify_schema(engine)
        program(url)
        utils._verify_schema(engine)
    finally:
        engine.dispose()


def test_an_address_of_postgresql_without_a_driver_takes_the_one_of_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("psycopg2")
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", "postgresql://me@127.0.0.1:9/mlflow")
    with pytest.raises(OperationalError):  # of psycopg2: nobody listens there
        database.upgrade()

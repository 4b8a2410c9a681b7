"""The controller's database role, on a real PostgreSQL with Airflow's own tables."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, insert, make_url, text
from sqlalchemy.exc import ProgrammingError

from bench.postgres import PostgresServer
from hermes_ops.airflow import grants
from hermes_ops.airflow.control.leadership import Leadership
from hermes_ops.airflow.metadata import Metadata
from hermes_ops.airflow.metadata_rows import TaskRank
from hermes_ops.errors import HermesError

pytestmark = pytest.mark.integration
ROLE, PASSWORD = "hermes_controller", "only-here"
NOW = datetime(2026, 1, 2, tzinfo=UTC)
TRIAL = str(UUID(int=1))


@pytest.fixture(scope="module")
def owner(postgres: PostgresServer) -> Iterator[Engine]:
    url = make_url(postgres.url("rights")).set(drivername="postgresql+psycopg2")
    engine = create_engine(url)
    from airflow.models import import_all_models
    from airflow.models.base import Base

    import_all_models()
    Base.metadata.create_all(engine)
    own: Any = Metadata(engine)
    with engine.begin() as open_:
        open_.execute(insert(own._run).values(
            id=1, dag_id="d", run_id="r", run_type="manual", state="running", run_after=NOW,
            log_template_id=None))  # fmt: skip
        open_.execute(insert(own._ti).values(
            id=UUID(TRIAL), dag_id="d", run_id="r", task_id="trial", map_index=0, pool="gpus",
            pool_slots=1, priority_weight=1, try_number=1, max_tries=0,
            state="scheduled"))  # fmt: skip
        open_.execute(text(f"CREATE ROLE {ROLE} LOGIN PASSWORD '{PASSWORD}'"))
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def role(owner: Engine) -> Iterator[Engine]:
    engine = create_engine(owner.url.set(username=ROLE, password=PASSWORD))
    assert not grants.is_ready(engine)
    grants.give(owner, ROLE)
    yield engine
    engine.dispose()


def test_with_its_rights_the_controller_does_all_its_work(role: Engine) -> None:
    assert grants.is_ready(role)
    database = Metadata(role)
    database.check()
    assert database.sweeps() == ()
    assert database.pool("gpus", []) is None
    assert database.rerank([TaskRank(TRIAL, 7, 3)]) == 1
    leadership = Leadership(role, "gpus")
    assert leadership.acquire(lambda: False)
    assert leadership.holds()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE task_instance SET state = 'success'",
        "UPDATE task_instance SET updated_at = now()",
        "UPDATE slot_pool SET slots = 99",
        "DELETE FROM task_instance",
        "INSERT INTO slot_pool (pool, slots) VALUES ('mine', 1)",
        "SELECT password FROM connection",
        "CREATE TABLE mine (x int)",
        "TRUNCATE dag_run",
    ],
)
def test_the_role_may_do_nothing_else(role: Engine, statement: str) -> None:
    with pytest.raises(ProgrammingError, match="permission denied"), role.begin() as connection:
        connection.execute(text(statement))


def test_a_role_that_does_not_exist_is_named(owner: Engine) -> None:
    with pytest.raises(HermesError, match="create the role first"):
        grants.give(owner, "nobody_at_all")

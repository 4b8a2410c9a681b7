"""Airflow's own teams, by Airflow's own models and its own tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from airflow.models.dag import DagModel
from airflow.models.dagbundle import DagBundleModel
from airflow.models.team import Team, dag_bundle_team_association_table
from sqlalchemy import create_engine
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session

from hermes_ops.airflow.control.sweep_state import RunningSweeps, SweepState
from hermes_ops.airflow.dag_teams import dag_teams
from hermes_ops.airflow.metadata_rows import RunRow, TaskInstanceRow
from hermes_ops.config.pool_quota import PoolQuota, parse_quota
from hermes_ops.errors import Unavailable
from tests.unit.airflow.builders import row, run_row


def quota(airflow_team: str | None) -> PoolQuota:
    """A quota in which ann is of the team speech, and vision is that team of Airflow."""
    vision = {"name": "vision", "airflow_team": airflow_team}
    return parse_quota({"teams": [{"name": "speech", "users": ["ann"]}, vision]}, "a test")


class OneSweep:
    """Airflow's rows of one sweep of one trial, and the database with its teams."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def sweeps(self) -> tuple[RunRow, ...]:
        return (replace(run_row(), triggered_by="ann"),)

    def records(self, run: RunRow) -> dict[tuple[str, int], dict[str, Any]]:
        return {}

    def trials(self, run: RunRow, task: str) -> tuple[TaskInstanceRow, ...]:
        return (row(0),) if task == "trial" else ()


def sweep_of(engine: Engine) -> Any:
    """Return what is read of Airflow's database."""
    return OneSweep(engine)


def team_in(sweeps: RunningSweeps, engine: Engine) -> str:
    """Return the team of the sweep's trial, as a policy sees it."""
    sweeps.refresh(sweep_of(engine))
    (spec,) = sweeps.specs.values()
    (job,) = SweepState.fetch(spec, sweep_of(engine), {}).jobs(100.0)
    return job.virtual_cluster


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """A database with three DAGs: two bundles, of which one belongs to a team."""
    found = create_engine(f"sqlite:///{tmp_path}/airflow.db")
    models: Any = (Team, DagBundleModel, DagModel)
    tables = [model.__table__ for model in models] + [dag_bundle_team_association_table]
    models[0].metadata.create_all(found, tables=tables)
    with Session(found) as session:
        bundles = {name: DagBundleModel(name=name) for name in ("theirs", "common")}
        bundles["theirs"].teams = [Team(name="vision-team")]
        session.add_all(bundles.values())
        for dag_id, bundle in (("hermes_sweep", "theirs"), ("other", "theirs"), ("free", "common")):
            session.add(DagModel(dag_id=dag_id, bundle_name=bundle))
        session.commit()
    yield found
    found.dispose()


@pytest.fixture
def multi_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__MULTI_TEAM", "True")


@pytest.mark.usefixtures("multi_team")
def test_a_dag_has_the_team_of_its_bundle_as_airflow_itself_says(engine: Engine) -> None:
    named = quota("vision-team")
    assert dag_teams(sweep_of(engine), quota(None)) == {}
    assert dag_teams(sweep_of(engine), named) == {
        "hermes_sweep": "vision-team",
        "other": "vision-team",
    }
    with Session(engine) as session:
        of_airflow: Any = DagModel.get_dag_id_to_team_name_mapping
        ids = ["hermes_sweep", "other", "free"]
        assert of_airflow(ids, session=session) == dag_teams(sweep_of(engine), named)


def test_without_multi_team_no_dag_has_a_team(engine: Engine) -> None:
    assert dag_teams(sweep_of(engine), quota("vision-team")) == {}


@pytest.mark.usefixtures("multi_team")
def test_a_database_that_does_not_tell_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="teams of DAGs"):
        dag_teams(sweep_of(create_engine(f"sqlite:///{tmp_path}/empty.db")), quota("vision-team"))


@pytest.mark.usefixtures("multi_team")
def test_a_sweep_is_of_the_team_of_its_dag_before_that_of_its_owner(engine: Engine) -> None:
    sweeps = RunningSweeps("gpus")
    sweeps.assign_teams(quota("vision-team"))
    assert team_in(sweeps, engine) == "vision"
    sweeps.assign_teams(quota("another-team"))
    assert team_in(sweeps, engine) == "speech"
    sweeps.assign_teams(quota(None))
    assert team_in(sweeps, engine) == "speech"


@pytest.mark.usefixtures("multi_team")
def test_a_bundle_that_changes_its_team_moves_its_sweeps(engine: Engine) -> None:
    sweeps = RunningSweeps("gpus")
    sweeps.assign_teams(quota("vision-team"))
    assert team_in(sweeps, engine) == "vision"
    with Session(engine) as session:
        bundle = session.get(DagBundleModel, "theirs")
        assert bundle is not None
        bundle.teams = []
        session.commit()
    assert team_in(sweeps, engine) == "speech"

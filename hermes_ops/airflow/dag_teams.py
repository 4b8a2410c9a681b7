"""Airflow's own teams (`core.multi_team`): which team each DAG belongs to, by its bundle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hermes_ops.errors import Unavailable

if TYPE_CHECKING:
    from hermes_ops.airflow.metadata import Metadata
    from hermes_ops.config.pool_quota import PoolQuota

TEAM_TABLES = ("dag_bundle_team",)
"""The columns that are read here in addition to those of `metadata`."""


def is_multi_team() -> bool:
    """Return whether this Airflow is configured to have teams."""
    from airflow.configuration import conf

    return bool(conf.getboolean("core", "multi_team", fallback=False))


def dag_teams(metadata: Metadata, quota: PoolQuota) -> Mapping[str, str]:
    """Return Airflow's team of each DAG that has one; none where the quota names no such team.

    A DAG has the team of its bundle, at most one: as `DagModel.get_team_name`, for all DAGs in one
    query. Without `core.multi_team` no DAG has one. Raise Unavailable while the database does not
    answer, or does not allow to read it.
    """
    if not quota.team_of_airflow_team or not is_multi_team():
        return {}
    from airflow.models.dag import DagModel
    from airflow.models.team import dag_bundle_team_association_table as bundle_team
    from sqlalchemy import exc, select

    dag = DagModel.__table__.c
    query = select(dag.dag_id, bundle_team.c.team_name).join(
        bundle_team, bundle_team.c.dag_bundle_name == dag.bundle_name
    )
    try:
        with metadata.engine.connect() as connection:
            return {dag_id: team for dag_id, team in connection.execute(query)}
    except (exc.OperationalError, exc.ProgrammingError) as error:
        raise Unavailable(f"Airflow's teams of DAGs cannot be read: {error}") from error

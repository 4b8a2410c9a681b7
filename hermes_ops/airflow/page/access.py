"""Access to sweeps on the page, by Airflow's own users and permissions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hermes_ops.airflow.metadata import Metadata

ENTRY = "TASK_INSTANCE"
"""The part of a DAG that a user must be allowed to read: trials are task instances."""

UNSEEN = "a trial that you may not see"

_TRIAL = re.compile(r"([\w.~:+-]+)/[0-9]+")  # a DAG's id may have letters of any script


@dataclass(slots=True)
class Reader:
    """The user of one request; asks Airflow once per DAG and per sweep."""

    may_read: Callable[[str], bool]
    metadata: Metadata
    _dags: dict[str, bool] = field(default_factory=dict)
    _sweeps: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def reads_dag(self, dag_id: str) -> bool:
        """Return whether the user may see the trials of that DAG."""
        if dag_id not in self._dags:
            self._dags[dag_id] = self.may_read(dag_id)
        return self._dags[dag_id]

    def knows(self, sweep: str) -> bool:
        """Return whether Airflow has such a sweep, whether or not the user may see it."""
        return bool(self._dags_of(sweep))

    def reads_sweep(self, sweep: str) -> bool:
        """Return whether the user may see every DAG that has a sweep of that name."""
        return all(self.reads_dag(dag) for dag in self._dags_of(sweep))

    def redacted(self, text: str) -> str:
        """Return the text without the names of trials that the user may not see."""
        return _TRIAL.sub(lambda m: m[0] if self.reads_sweep(m[1]) else UNSEEN, text)

    def _dags_of(self, sweep: str) -> tuple[str, ...]:
        if sweep not in self._sweeps:
            self._sweeps[sweep] = self.metadata.dags_of(sweep)
        return self._sweeps[sweep]


def dag_reader(user: Any) -> Callable[[str], bool]:  # noqa: ANN401 - a user of any auth manager
    """Return a function that tells whether the user may read the task instances of a DAG."""
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.models.resource_details import (
        DagAccessEntity,
        DagDetails,
    )
    from airflow.configuration import conf
    from airflow.models.dag import DagModel

    teams = conf.getboolean("core", "multi_team", fallback=False)

    def may_read(dag_id: str) -> bool:
        team = DagModel.get_team_name(dag_id) if teams else None
        return bool(
            get_auth_manager().is_authorized_dag(
                method="GET",
                access_entity=DagAccessEntity[ENTRY],
                details=DagDetails(id=dag_id, team_name=team),
                user=user,
            )
        )

    return may_read


def readable_pools(user: Any) -> set[str]:  # noqa: ANN401 - a user of any auth manager
    """Return the Airflow pools that the user may read."""
    from airflow.api_fastapi.app import get_auth_manager

    return set(get_auth_manager().get_authorized_pools(user=user))

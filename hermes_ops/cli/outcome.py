"""What a sweep has come to, from MLflow."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hermes_ops.cli.connection import DAG_ID
from hermes_ops.config import SweepConfig, parse
from hermes_ops.errors import HermesError

if TYPE_CHECKING:
    from hermes_ops.cli.connection import Connection
    from hermes_ops.tracking.summary import Collected


def planned(connection: Connection, sweep: str) -> SweepConfig | None:
    """The resolved config of a sweep; None before its plan task has run."""
    from hermes_ops.airflow.client import TaskKey
    from hermes_ops.airflow.records import SWEEP_KEY, SweepRecord, decode

    stored = connection.airflow.get_state(TaskKey(DAG_ID, sweep, "plan"), SWEEP_KEY)
    record = decode(SweepRecord, stored)
    return None if record is None else parse(record.config, source=sweep, base=None)


def configured(connection: Connection, sweep: str) -> SweepConfig:
    """The resolved config of a sweep; HermesError before its plan task has run."""
    config = planned(connection, sweep)
    if config is None:
        raise HermesError(f"the sweep {sweep!r} has not been planned: see its plan task's log.")
    return config


def collected(connection: Connection, sweep: str, max_slots_used: int | None = None) -> Collected:
    """Everything that MLflow holds of a sweep."""
    from hermes_ops.tracking.summary import collect, find

    config = configured(connection, sweep)
    return collect(
        connection.tracker,
        find(connection.tracker, sweep, config.name),
        metric=config.objective.metric,
        direction=config.objective.direction.value,
        max_trials=config.trial_count,
        max_slots_used=max_slots_used,
    )


def document(connection: Connection, sweep: str, max_slots_used: int | None) -> dict[str, Any]:
    """The JSON document of a sweep; `max_slots_used` as counted from live processes."""
    found = collected(connection, sweep, max_slots_used).summary.to_document()
    return dict(json.loads(json.dumps(found)))

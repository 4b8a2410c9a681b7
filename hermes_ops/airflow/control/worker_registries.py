"""The workers of Airflow's executors that hand tasks to other machines."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hermes_ops.airflow.control.machine_watch import WorkerRegistry
from hermes_ops.airflow.hosts import configured_executors
from hermes_ops.airflow.machines import MACHINES_VARIABLE, WITH_QUEUES
from hermes_ops.errors import HermesError, Unavailable

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

ANSWER_S = 2.0
"""Seconds in which Celery's workers answer."""

EDGE_ALIVE = ("starting", "running", "idle")
"""States of an Edge worker that takes tasks; its executor gives one without a heartbeat another."""


@dataclass(frozen=True, slots=True)
class CeleryWorkers:
    """Celery's workers, which answer over the broker."""

    app: Any  # a celery.Celery

    def takers(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the workers that take each queue; Unavailable without a broker."""
        try:
            answers = self.app.control.inspect(timeout=ANSWER_S).active_queues() or {}
        except Exception as error:  # each transport of Celery's has errors of its own
            raise Unavailable(f"Celery's broker did not answer: {error}") from error
        takers: dict[str, list[str]] = {}
        for worker, queues in answers.items():
            for queue in queues:
                takers.setdefault(str(queue["name"]), []).append(str(worker))
        return takers


@dataclass(frozen=True, slots=True)
class EdgeWorkers:
    """The workers of EdgeExecutor, as its table in Airflow's database has them."""

    engine: Engine

    def takers(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the workers that take each queue; Unavailable without the table."""
        from sqlalchemy import column, exc, select, table

        names: list[Any] = [column("worker_name"), column("queues"), column("state")]
        query = select(*names[:2]).select_from(table("edge_worker", *names))
        query = query.where(names[2].in_(EDGE_ALIVE))
        try:
            with self.engine.connect() as connection:
                rows = connection.execute(query).all()
        except exc.SQLAlchemyError as error:
            raise Unavailable(f"the table edge_worker cannot be read: {error}") from error
        takers: dict[str, list[str]] = {}
        for worker, queues in rows:
            for queue in ast.literal_eval(queues) if queues else ():
                takers.setdefault(str(queue), []).append(str(worker))
        return takers


def registry_of(engine: Engine) -> WorkerRegistry:
    """Return the workers of the executor that Airflow's configuration names.

    HermesError where none of its executors hands tasks to workers on other machines.
    """
    names = [path.rpartition(".")[2] for path in configured_executors()]
    if "CeleryExecutor" in names:
        try:
            from airflow.providers.celery.executors.celery_executor_utils import app
        except ImportError as error:
            raise HermesError(
                f"Celery cannot be imported where the controller runs ({error}): install "
                "apache-airflow-providers-celery and a Celery that it works with, as for Airflow's "
                "scheduler."
            ) from error
        return CeleryWorkers(app)
    if "EdgeExecutor" in names:
        return EdgeWorkers(engine)
    raise HermesError(
        f"{MACHINES_VARIABLE} is set, and Airflow's executor is {', '.join(names) or 'unknown'}: "
        f"machines need {' or '.join(WITH_QUEUES)}. Set [core] executor, also for the "
        f"controller, or remove {MACHINES_VARIABLE}."
    )

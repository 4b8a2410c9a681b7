"""A sweep inside a DAG of one's own: as a task group, or from a function that gives the sweep."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, overload

from airflow.sdk import BaseOperator, TaskGroup, XComArg, get_parsing_context

from hermes_ops.airflow.sweep.dag import SweepTasks, sweep_asset, sweep_tasks
from hermes_ops.airflow.sweep.source import Call, SweepSource
from hermes_ops.airflow.trial.connections import Connections
from hermes_ops.config import parse

Sweep = Mapping[str, Any] | str | PathLike[str] | Call


class SweepTaskGroup(TaskGroup):
    """The tasks of a sweep: `plan`, one `trial` for each of its trials, `report`.

    The sweep begins when everything before the group has ended and has ended when `report` has;
    what is behind the group waits for that. Callbacks and other arguments of `report`, such as
    `on_success_callback`, are the sweep's own; those of the DAG's `default_args` count for all
    its tasks.

    :param group_id: the name of the group, part of the sweep's id `DAG:GROUP:RUN`
    :param sweep: a sweep file, or its content. XComs of other tasks may stand anywhere in it, and
        templates with spaces inside their braces (`{{ ds }}`) in `trial.command`, `environment`,
        `directory`, `python` and `tensorboard`. Relative paths begin at the DAG's file
    :param pool: the Airflow pool whose slots are the GPUs; by default the sweep's own
    :param mlflow_conn_id: the connection that leads to MLflow, in the place of its variables
    :param storage_conn_id: the connection whose access to storage the scripts get
    :param group: arguments of the `TaskGroup`, such as `tooltip`
    :param report: arguments of the task `report`
    """

    def __init__(
        self,
        group_id: str,
        sweep: Sweep,
        *,
        pool: str | None = None,
        mlflow_conn_id: str | None = None,
        storage_conn_id: str | None = None,
        group: Mapping[str, Any] | None = None,
        **report: Any,  # noqa: ANN401 - Airflow's own
    ) -> None:
        super().__init__(group_id=group_id, **dict(group or {}))
        source = SweepSource.of(sweep, Path(self.dag.fileloc).parent, pool)
        _check(source, f"{self.dag.dag_id}.{self.group_id}")
        self.asset = sweep_asset(self.dag.dag_id, self.group_id)
        outlets = [self.asset, *report.pop("outlets", ())]
        connections = Connections(mlflow_conn_id, storage_conn_id)
        with self:
            self.sweep: SweepTasks = sweep_tasks(
                source, connections, self, outlets=outlets, **report
            )

    @property
    def best(self) -> XComArg:
        """The best trial, for tasks behind the group.

        `best["config"]`, `best["mlflow_run_id"]`, `best["model_uri"]`, `best["best"]` (its value)
        and the other keys of `outcome.best_of` are XComs of their own.
        """
        return self.report.output

    @property
    def plan(self) -> BaseOperator:
        """The group's first task."""
        return self.sweep.plan

    @property
    def report(self) -> BaseOperator:
        """The group's last task."""
        return self.sweep.report


def _check(source: SweepSource, name: str) -> None:
    """Refuse a sweep that can be read now; not when the file is read for a task's start."""
    known = isinstance(source.data, Mapping) and not any(
        True for _ in XComArg.iter_xcom_references(source.data)
    )
    if known and get_parsing_context().task_id is None:
        parse({"pool": source.pool, **dict(source.data)}, name, source.base)  # type: ignore[arg-type]


Function = Callable[..., Mapping[str, Any]]


@overload
def sweep(function: Function) -> Callable[..., SweepTaskGroup]: ...


@overload
def sweep(**arguments: Any) -> Callable[[Function], Callable[..., SweepTaskGroup]]: ...  # noqa: ANN401


def sweep(function: Function | None = None, **arguments: Any) -> Any:
    """Make a task group of a function that returns a sweep's content, in the manner of TaskFlow.

    The function runs when the sweep is planned, with the results of other tasks as its arguments;
    parameters like `ds=None` get what Airflow's context has under that name. What it returns is
    taken as it is, without templates. `arguments` are those of `SweepTaskGroup`; the group is
    called after the function.
    """
    if function is None:
        return functools.partial(sweep, **arguments)

    @functools.wraps(function)
    def group(*args: Any, **kwargs: Any) -> SweepTaskGroup:  # noqa: ANN401 - the function's own
        own = {"group_id": function.__name__, **arguments}
        return SweepTaskGroup(sweep=Call(function, args, kwargs), **own)

    return group

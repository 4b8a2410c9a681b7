"""The DAG of a sweep: plan → mapped trials → report.

An outage of a service, MLflow above all, must not cost a night or a report: plan and report are
retried until it is back. After any other error they are retried a few times, seconds apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any, overload

from airflow.sdk import (
    DAG,
    Asset,
    BaseOperator,
    Param,
    TaskGroup,
    TriggerRule,
    XComArg,
    get_parsing_context,
)
from airflow.sdk.definitions.retry_policy import RetryDecision, RetryPolicy

from hermes_ops.airflow.identity import PLAN_TASK, REPORT_TASK, TRIAL_TASK
from hermes_ops.airflow.sweep.source import DEFAULT_POOL, SweepCall, SweepSource
from hermes_ops.airflow.sweep.tasks import PlanOperator, ReportOperator
from hermes_ops.airflow.sweep.warm_start import NightlySweeps
from hermes_ops.airflow.trial.connections import Connections
from hermes_ops.airflow.trial.operator import HermesTrialOperator
from hermes_ops.airflow.trial.trial_task import trial_defaults
from hermes_ops.config import dag_params_schema, parse
from hermes_ops.config.problems import nearest
from hermes_ops.errors import ConfigError, Problem, Unavailable

UNLIMITED = 100_000
"""The pool and the controller limit what runs; Airflow's own limits must not."""


def sweep_dag(
    dag_id: str = "hermes_sweep",
    *,
    pool: str = DEFAULT_POOL,
    schedule: Any = None,  # noqa: ANN401 - whatever Airflow takes
    defaults: Mapping[str, Any] | None = None,
    mlflow_conn_id: str | None = None,
    storage_conn_id: str | None = None,
    **dag_arguments: Any,  # noqa: ANN401 - Airflow's own
) -> DAG:
    """Return a DAG that runs one sweep per run, from the run's configuration over `defaults`.

    :param pool: the Airflow pool whose slots are the GPUs
    :param defaults: a sweep file's content; the trigger form begins with it
    :param mlflow_conn_id: the connection that leads to MLflow, instead of its variables
    :param storage_conn_id: the connection whose access to storage the scripts get
    """
    connections = Connections(mlflow_conn_id, storage_conn_id)
    form = _params({"pool": pool, **(defaults or {})})
    ours = {"params": form, "is_paused_upon_creation": False, "doc_md": __doc__}
    with empty_dag(dag_id, schedule=schedule, **{**ours, **dag_arguments}) as dag:
        given = frozenset({*(defaults or {}), *(dag_arguments.get("params") or {})})
        source = SweepSource(pool=pool, defaults=given)
        sweep_tasks(source, connections, outlets=[sweep_asset(dag_id)])
    return dag


def empty_dag(dag_id: str, **dag_arguments: Any) -> DAG:  # noqa: ANN401 - Airflow's own
    """Return an empty DAG for a sweep, whose runs and tasks only the pool limits."""
    ours = {"max_active_tasks": UNLIMITED, "max_active_runs": UNLIMITED, "tags": ["hermes"]}
    return DAG(dag_id, **{"catchup": False, **ours, **dag_arguments})


def sweep_asset(dag_id: str, group_id: str | None = None) -> Asset:
    """Return the asset that is updated when a sweep of that DAG, or of its group, has ended.

    A DAG that is to run then uses it as its schedule. The event's `extra` is the return value of
    the sweep's last task.
    """
    path = f"{dag_id}/{group_id}" if group_id else dag_id
    return Asset(name=f"hermes-sweep/{path}", uri=f"hermes://sweeps/{path}")


@dataclass(frozen=True, slots=True)
class SweepTasks:
    """The tasks of a sweep."""

    plan: PlanOperator
    trial: Any  # Airflow's mapped operator
    report: ReportOperator


def sweep_tasks(
    source: SweepSource,
    connections: Connections,
    group: TaskGroup | None = None,
    nights: NightlySweeps | None = None,
    **report_arguments: Any,  # noqa: ANN401 - Airflow's own
) -> SweepTasks:
    """Return the three tasks, in the DAG and the task group of the current context."""

    def full(task_id: str) -> str:
        return task_id if group is None else str(group.child_id(task_id))

    plan = PlanOperator(
        task_id=PLAN_TASK,
        trial_task=full(TRIAL_TASK),
        source=source,
        connections=connections,
        nights=nights,
        **retry_arguments(PLAN_RETRY_POLICY),
    )
    XComArg.apply_upstream_relationship(plan, source.references)
    trial = HermesTrialOperator.partial(
        task_id=TRIAL_TASK,
        pool=source.pool,
        mlflow_conn_id=connections.mlflow,
        storage_conn_id=connections.storage,
        connection_templates=source.connection_templates,
        **{**trial_defaults(), "execution_timeout": None, "trigger_rule": TriggerRule.ALL_SUCCESS},
    ).expand(number=plan.output)
    report = ReportOperator(
        task_id=REPORT_TASK,
        plan_task=full(PLAN_TASK),
        trial_task=full(TRIAL_TASK),
        connections=connections,
        trigger_rule=TriggerRule.ALL_DONE,
        multiple_outputs=True,
        **{**retry_arguments(REPORT_RETRY_POLICY, report_arguments), **report_arguments},
    )
    plan >> trial >> report
    return SweepTasks(plan, trial, report)


def _params(defaults: Mapping[str, Any]) -> dict[str, Param]:
    """Return the trigger form; empty when the file is parsed for a trial, which does not need it.

    Airflow validates every field four times at each start of a mapped task: 0.1 s on a machine
    of two cores, while a GPU idles.
    """
    if get_parsing_context().task_id == TRIAL_TASK:
        return {}
    form = dag_params_schema()
    _refuse_unknown(defaults, form)
    return {
        key: Param(
            defaults.get(key, schema.get("default")),
            **{k: v for k, v in schema.items() if k != "default"},
        )
        for key, schema in form.items()
    }


def _refuse_unknown(defaults: Mapping[str, Any], allowed_keys: Collection[str]) -> None:
    """Raise ConfigError for keys of a DAG's defaults that no sweep has: its runs would ignore them.

    The values are checked by each run, which may replace them.
    """
    problems = []
    for key in map(str, defaults):
        if key not in allowed_keys:
            meant = nearest(key, allowed_keys)
            fix = f"did you mean {meant}?" if meant else "remove the key"
            problems.append(Problem(key, "an unknown key", ", ".join(allowed_keys), fix))
    if problems:
        raise ConfigError("the call of sweep_dag", tuple(problems))


Sweep = Mapping[str, Any] | str | PathLike[str] | SweepCall


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
    :param mlflow_conn_id: the connection that leads to MLflow, instead of its variables
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
        _refuse_bare_names(self)
        source = SweepSource.from_sweep(sweep, Path(self.dag.fileloc).parent, pool)
        _check(source, f"{self.dag.dag_id}.{self.group_id}")
        self.asset = sweep_asset(self.dag.dag_id, self.group_id)
        given = report.pop("outlets", None) or []  # a single one too, as Airflow takes it
        outlets = [self.asset, *(given if isinstance(given, list | tuple) else [given])]
        connections = Connections(mlflow_conn_id, storage_conn_id)
        with self:
            self.sweep: SweepTasks = sweep_tasks(
                source, connections, self, outlets=outlets, **report
            )

    @property
    def best(self) -> Any:  # noqa: ANN401 - an XComArg, which typed tasks take for its value
        """The best trial, for tasks behind the group.

        `best["config"]`, `best["mlflow_run_id"]`, `best["model_uri"]`, `best["best"]` (its value)
        and the other keys of `sweep_report.best_of` are XComs of their own.
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


def _refuse_bare_names(group: TaskGroup) -> None:
    """Raise ConfigError for a group without a prefix in the names of its tasks.

    Such tasks look like those of a DAG that is one sweep, whose runs `hermes prune` deletes.
    """
    if group.child_id(PLAN_TASK) == PLAN_TASK:
        problem = Problem(
            "prefix_group_id",
            "False",
            "True: the tasks' names tell which sweep of the DAG they belong to",
            "remove it from `group`",
        )
        raise ConfigError(str(group.group_id), (problem,))


def _check(source: SweepSource, name: str) -> None:
    """Raise ConfigError for a bad sweep that is known now; not when parsing for a task's start."""
    is_complete = isinstance(source.data, Mapping) and not any(
        True for _ in XComArg.iter_xcom_references(source.data)
    )
    if is_complete and get_parsing_context().task_id is None:
        parse({"pool": source.pool, **dict(source.data)}, name, source.base)  # type: ignore[arg-type]


Function = Callable[..., Mapping[str, Any]]


@overload
def sweep(function: Function) -> Callable[..., SweepTaskGroup]: ...


@overload
def sweep(**arguments: Any) -> Callable[[Function], Callable[..., SweepTaskGroup]]: ...  # noqa: ANN401


def sweep(function: Function | None = None, **arguments: Any) -> Any:
    """Make a task group of a function that returns a sweep's content, like TaskFlow.

    The function runs when the sweep is planned, with the results of other tasks as its arguments;
    parameters like `ds=None` get what Airflow's context has under that name. What it returns is
    taken as it is, without templates. `arguments` are those of `SweepTaskGroup`; the group is
    called after the function.
    """
    if function is None:
        return functools.partial(sweep, **arguments)

    @functools.wraps(function)
    def group(*args: Any, **kwargs: Any) -> SweepTaskGroup:  # noqa: ANN401 - the function's own
        group_arguments = {"group_id": function.__name__, **arguments}
        return SweepTaskGroup(sweep=SweepCall(function, args, kwargs), **group_arguments)

    return group


FIRST_PAUSE_S = 5.0

OWN_RETRIES = frozenset(
    {"retries", "retry_delay", "retry_policy", "retry_exponential_backoff", "max_retry_delay"}
)
"""Arguments of a task with which a user decides on its retries."""


class OutageRetryPolicy(RetryPolicy):
    """Retries a task for `lasts_s` seconds after its first failure while a service is away.

    The pauses double from FIRST_PAUSE_S up to `longest_pause_s` seconds. After another error the
    task is tried `tries` times in all. Tries before a person cleared the task do not count.
    """

    def __init__(self, lasts_s: float, longest_pause_s: float, tries: int) -> None:
        self.longest_pause_s, self.tries = longest_pause_s, tries
        pauses_s = accumulate(self._pause_s(n) for n in range(1, int(lasts_s / FIRST_PAUSE_S) + 2))
        self.retries = sum(end_s <= lasts_s for end_s in pauses_s)

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,
        max_tries: int,
        context: Any = None,  # noqa: ANN401, ARG002 - Airflow's own
    ) -> RetryDecision:
        """Return whether the task is retried, and after which pause."""
        tried = max(1, try_number - max(0, max_tries - self.retries))
        if isinstance(exception, Unavailable):
            return RetryDecision.retry(timedelta(seconds=self._pause_s(tried)), str(exception))
        if tried >= self.tries:
            return RetryDecision.fail(f"tried {tried} times")
        return RetryDecision.retry(timedelta(seconds=FIRST_PAUSE_S))

    def _pause_s(self, tried: int) -> float:
        return float(min(FIRST_PAUSE_S * 2.0 ** min(tried - 1, 32), self.longest_pause_s))


HOUR_S = 3_600.0
PLAN_RETRY_POLICY = OutageRetryPolicy(HOUR_S, 60.0, tries=4)
REPORT_RETRY_POLICY = OutageRetryPolicy(24 * HOUR_S, 300.0, tries=11)


def retry_arguments(policy: OutageRetryPolicy, given: Collection[str] = ()) -> dict[str, Any]:
    """Return the arguments of a task that is retried by this policy.

    If a user has `given` arguments on retries, Airflow's own rules apply instead.
    """
    pause = {"retry_delay": timedelta(seconds=FIRST_PAUSE_S)}
    if OWN_RETRIES.isdisjoint(given):
        return {"retries": policy.retries, "retry_policy": policy, **pause}
    return {"retries": policy.tries - 1, **pause}

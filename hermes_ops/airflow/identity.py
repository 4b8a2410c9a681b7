"""Which sweep a task belongs to, and what its tasks are called."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hermes_ops.trial.checkpoint_store.store import MOST_NAME, safe_name

MAIN_DAG = "hermes_sweep"
"""The DAG of `hermes sweep run`: its sweeps are called after their DAG runs."""
PLAN_TASK, TRIAL_TASK, REPORT_TASK = "plan", "trial", "report"
"""The tasks of a sweep, within their group if they are in one."""
PLANNER, REPORTER = "PlanOperator", "ReportOperator"
"""The operators of a sweep's first and last task, as Airflow names them."""


def group_of(task_id: str) -> str:
    """Return the task group of a task; empty without one."""
    return task_id.rpartition(".")[0]


def in_group(group: str, name: str) -> str:
    """Return the id of the task of that name, in the group if one is given."""
    return f"{group}.{name}" if group else name


def sweep_id(dag_id: str, run_id: str, task_id: str) -> str:
    """Return the id of the sweep of the task `task_id` (its plan, a trial, its report).

    Scheduled runs of different DAGs have the same run id, and one run may hold several sweeps, each
    in a task group of its own. So anywhere but in the DAG `hermes_sweep` the id is `DAG:RUN` or
    `DAG:GROUP:RUN`; neither a DAG's id nor a group's can have a colon.
    """
    group = group_of(task_id)
    if dag_id == MAIN_DAG and not group:
        return run_id
    return ":".join(part for part in (dag_id, group, run_id) if part)


_GENERATED = re.compile(r"[a-z_]+__\d{4}-\d\d-\d\dT")
"""The beginning of the ids that Airflow makes for runs; their times have colons."""


def may_be_of_another_dag(sweep: str) -> bool:
    """Return whether a run of the main DAG has an id that a sweep of another DAG could have."""
    return ":" in sweep and not _GENERATED.match(sweep)


_MADE_NAME = re.compile(rf"(?=.*_|.{{{MOST_NAME}}}$).*-[0-9a-f]{{8}}")
"""A folder of a sweep whose id is no folder's name: `_` for each such character, and a digest."""


def may_have_folder_of_another(sweep: str) -> bool:
    """Return whether a run's id is a name that the folder of a sweep with another id could have."""
    return safe_name(sweep) == sweep and bool(_MADE_NAME.fullmatch(sweep))


class SweepPlace(NamedTuple):
    """A sweep's DAG, its DAG run, and its task group there; none where it is all of the run."""

    dag_id: str
    run_id: str
    group: str = ""


def possible_places(sweep: str) -> Iterator[SweepPlace]:
    """Yield where the sweep of an id can be: the id is `RUN`, `DAG:RUN` or `DAG:GROUP:RUN`.

    A run's id may have colons, the others have none.
    """
    yield SweepPlace(MAIN_DAG, sweep)
    dag, _, rest = sweep.partition(":")
    if dag and rest:
        yield SweepPlace(dag, rest)
        group, _, run = rest.partition(":")
        if group and run:
            yield SweepPlace(dag, run, group)


def sweep_of(task: Any, context: Mapping[str, Any]) -> str:  # noqa: ANN401 - an operator
    """Return the id of the sweep that a running task is part of."""
    dag = task.get_dag()
    return sweep_id(dag.dag_id if dag else MAIN_DAG, str(context["run_id"]), str(task.task_id))

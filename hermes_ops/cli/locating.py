"""Where a sweep is in Airflow: in the DAG `hermes_sweep`, in a nightly one, in a group of a DAG."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hermes_ops.airflow.identity import (
    MAIN_DAG,
    PLAN_TASK,
    REPORT_TASK,
    group_of,
    in_group,
    sweep_id,
)
from hermes_ops.errors import HermesError

if TYPE_CHECKING:
    from hermes_ops.airflow.client import AirflowClient, TaskKey

ENDED = ("success", "failed", "skipped")
"""States of a sweep that has ended."""

OF_REPORT = {
    "success": "success",
    "skipped": "skipped",
    "failed": "failed",
    "upstream_failed": "failed",
    "removed": "failed",
}
"""The state of a sweep in a group by that of its report's task; any other: it runs."""

MOST_BEGINNINGS = 100
"""The newest sweeps among which the beginning of an id is looked for."""

MOST_SHOWN = 5

_OF_AN_ID = re.compile(r"[\w.~:+-]+")

PLANNER, REPORTER = "PlanOperator", "ReportOperator"
"""The operators of a sweep's first and last task, as Airflow names them."""


class SeveralSweepsError(HermesError):
    """The beginning of an id is that of several sweeps."""


@dataclass(frozen=True, slots=True)
class Place:
    """A sweep's DAG run, and the group of its tasks there; none: the run is the sweep."""

    sweep: str
    dag_id: str
    run_id: str
    group: str = ""

    @classmethod
    def main(cls, sweep: str) -> Place:
        """Where `hermes sweep run` starts a sweep of that id."""
        return cls(sweep, MAIN_DAG, sweep)

    @property
    def plan(self) -> TaskKey:
        """The sweep's first task."""
        return self._task(PLAN_TASK)

    @property
    def report(self) -> TaskKey:
        """The sweep's last task."""
        return self._task(REPORT_TASK)

    def _task(self, name: str) -> TaskKey:
        from hermes_ops.airflow.client import TaskKey

        return TaskKey(self.dag_id, self.run_id, in_group(self.group, name))


@dataclass(frozen=True, slots=True)
class Listed:
    """A sweep in the list; the times are Airflow's text, None where there is none yet.

    `reason`: why it has ended as it has, or why its trials fail. `compare`: where MLflow shows its
    trials side by side; None while MLflow does not know the sweep.
    """

    sweep: str
    dag_id: str
    dag_run_id: str
    state: str
    start_date: str | None
    end_date: str | None
    reason: str | None = None
    compare: str | None = None

    def document(self) -> dict[str, str | None]:
        """As a JSON object."""
        return asdict(self)


def locate(airflow: AirflowClient, sweep: str) -> Place:
    """The place of the sweep; HermesError when Airflow has none of that id.

    Of the newest sweeps the beginning of the id is enough where it is the beginning of one alone.
    """
    for place in _possible(sweep):
        if _is_there(airflow, place):
            return place
    known = newest(airflow, MOST_BEGINNINGS) if _OF_AN_ID.fullmatch(sweep) else ()
    begun = beginning_with(sweep, (row.sweep for row in known))
    if len(begun) == 1:
        return next(p for p in _possible(begun[0]) if _is_there(airflow, p))
    if begun:
        shown = ", ".join(begun[:MOST_SHOWN]) + (", …" if len(begun) > MOST_SHOWN else "")
        raise SeveralSweepsError(
            f"{sweep!r} is the beginning of {len(begun)} sweeps: {shown}: write more of the id."
        )
    if inside := _sweeps_of_run(airflow, sweep):
        raise HermesError(
            f"{sweep!r} is a DAG run that holds the sweeps {', '.join(inside)}: name one of them."
        )
    raise HermesError(f"there is no sweep {sweep!r}: `hermes sweep list` shows them.")


def full_id(airflow: AirflowClient, sweep: str) -> str:
    """Return the id of the sweep that this is the beginning of; itself where there is none."""
    try:
        return locate(airflow, sweep).sweep
    except SeveralSweepsError:
        raise
    except HermesError:  # whoever asks says what is not known; Airflow may be away
        return sweep


def beginning_with(beginning: str, sweeps: Iterable[str]) -> list[str]:
    """Return the ids that begin so; those alone that go on with `-`, where there are any."""
    found = [s for s in sweeps if s.startswith(beginning)] if beginning else []
    return [s for s in found if s[len(beginning) :].startswith("-")] or found


def state_of(airflow: AirflowClient, place: Place) -> str | None:
    """What Airflow says of the sweep, one of ENDED or another word; None when it was deleted.

    In a group of a DAG it is the sweep's own: what is behind the group may run on.
    """
    if not place.group:
        run = airflow.dag_run(place.dag_id, place.run_id)
        return None if run is None else str(run["state"])
    report = airflow.task_instance(place.report)
    return None if report is None else _state_in_group(report)


def newest(airflow: AirflowClient, limit: int = 50) -> list[Listed]:
    """The newest sweeps of all DAGs, newest first."""
    plans = airflow.made_by(PLANNER, limit=limit)
    dags = sorted({p["dag_id"] for p in plans if not _group(p)})
    runs = {(r["dag_id"], r["dag_run_id"]): r for r in (airflow.dag_runs(dags) if dags else ())}
    groups = any(_group(p) for p in plans)
    made = airflow.made_by(REPORTER, limit=limit) if groups else ()
    reports = {(t["dag_id"], t["dag_run_id"], _group(t)): t for t in made}
    return [_listed(p, runs.get(_run_of(p)), reports.get((*_run_of(p), _group(p)))) for p in plans]


def _listed(
    plan: Mapping[str, Any], run: Mapping[str, Any] | None, report: Mapping[str, Any] | None
) -> Listed:
    dag_id, run_id = _run_of(plan)
    own = not _group(plan) and run is not None
    state = str(run["state"]) if own and run is not None else _state_in_group(report or {})
    began, over = (run, run) if own else (plan, report)
    return Listed(
        sweep_id(dag_id, run_id, plan["task_id"]),
        dag_id,
        run_id,
        state,
        (began or {}).get("start_date"),
        (over or {}).get("end_date") if state in ENDED else None,
    )


def _possible(sweep: str) -> Iterator[Place]:
    """`RUN`, `DAG:RUN` and `DAG:GROUP:RUN`; a run's id may have colons, the others have none."""
    yield Place.main(sweep)
    dag, colon, rest = sweep.partition(":")
    if colon:
        yield Place(sweep, dag, rest)
        group, colon, run = rest.partition(":")
        if colon:
            yield Place(sweep, dag, run, group)


def _is_there(airflow: AirflowClient, place: Place) -> bool:
    if place == Place.main(place.sweep):
        return airflow.dag_run(place.dag_id, place.run_id) is not None
    return airflow.task_instance(place.plan) is not None


def _sweeps_of_run(airflow: AirflowClient, sweep: str) -> list[str]:
    """The sweeps of the DAG run that `DAG:RUN` names; none where it names none."""
    dag, colon, run = sweep.partition(":")
    if not colon or airflow.dag_run(dag, run) is None:
        return []
    plans = airflow.made_by(PLANNER, dag, run)
    return sorted(sweep_id(dag, run, p["task_id"]) for p in plans)


def _run_of(task: Mapping[str, Any]) -> tuple[str, str]:
    return task["dag_id"], task["dag_run_id"]


def _group(task: Mapping[str, Any]) -> str:
    return group_of(str(task["task_id"]))


def _state_in_group(report: Mapping[str, Any]) -> str:
    return OF_REPORT.get(str(report.get("state")), "running")

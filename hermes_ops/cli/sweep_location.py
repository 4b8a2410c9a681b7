"""A sweep's place in Airflow: the DAG `hermes_sweep`, a nightly one, or a group of a DAG."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hermes_ops.airflow.identity import (
    MAIN_DAG,
    PLAN_TASK,
    PLANNER,
    REPORT_TASK,
    REPORTER,
    TRIAL_TASK,
    group_of,
    in_group,
    possible_places,
    sweep_id,
)
from hermes_ops.airflow.metadata_rows import state_in_group
from hermes_ops.errors import HermesError, NotPermitted

if TYPE_CHECKING:
    from hermes_ops.airflow.client import AirflowClient, TaskKey
    from hermes_ops.cli.connection import Connection
    from hermes_ops.tracking import Tracker

ENDED_AIRFLOW_STATES = ("success", "failed", "skipped")
"""States of a sweep that has ended."""

MOST_BEGINNINGS = 100
"""Newest sweeps among which the beginning of an id is looked for."""

MOST_SHOWN = 5

_ID_PATTERN = re.compile(r"[\w.~:+-]+")


class AmbiguousIdError(HermesError):
    """The beginning of an id is that of several sweeps."""


class NoSweepError(HermesError):
    """Airflow answers, and has no sweep of that id."""


@dataclass(frozen=True, slots=True)
class SweepLocation:
    """A sweep's DAG run, and the group of its tasks there; none: the run is the sweep."""

    sweep: str
    dag_id: str
    run_id: str
    group: str = ""

    @classmethod
    def in_main_dag(cls, sweep: str) -> SweepLocation:
        """Return where a sweep of that id is in the DAG `hermes_sweep`."""
        return cls(sweep, MAIN_DAG, sweep)

    @classmethod
    def of_run(cls, dag_id: str, run_id: str) -> SweepLocation:
        """Return where the sweep is that is the whole of a DAG run."""
        return cls(sweep_id(dag_id, run_id, PLAN_TASK), dag_id, run_id)

    @property
    def plan(self) -> TaskKey:
        """The sweep's first task."""
        return self._task(PLAN_TASK)

    @property
    def report(self) -> TaskKey:
        """The sweep's last task."""
        return self._task(REPORT_TASK)

    def trial(self, number: int) -> TaskKey:
        """Return the task of a trial."""
        return self._task(TRIAL_TASK, number)

    def _task(self, name: str, map_index: int = -1) -> TaskKey:
        from hermes_ops.airflow.client import TaskKey

        return TaskKey(self.dag_id, self.run_id, in_group(self.group, name), map_index)


@dataclass(frozen=True, slots=True)
class ListedSweep:
    """A sweep in the list; the times are Airflow's text, None if there is none yet.

    `reason`: of the sweep's end, or of its trials' failures. `compare`: the page on which MLflow
    compares its trials; None while MLflow does not know the sweep.
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
        """Return the row as a JSON object."""
        return asdict(self)


def locate(airflow: AirflowClient, sweep: str) -> SweepLocation:
    """Return the location of the sweep; raise HermesError if Airflow has none of that id.

    Of one of the newest sweeps a unique beginning of the id is enough. NotPermitted if it may be in
    a DAG that Airflow does not show to this user.
    """
    refusal: NotPermitted | None = None
    for place in possible_locations(sweep):
        try:
            if _is_there(airflow, place):
                return place
        except NotPermitted as error:
            refusal = error
    rows = newest(airflow, MOST_BEGINNINGS) if _ID_PATTERN.fullmatch(sweep) else ()
    begun = matching_ids(sweep, (row.sweep for row in rows))
    if len(begun) == 1 and begun[0] != sweep:
        return locate(airflow, begun[0])
    if len(begun) > 1:
        raise _ambiguous_error(sweep, begun)
    if refusal is not None:
        raise refusal
    if inside := _sweeps_of_run(airflow, sweep):
        raise HermesError(
            f"{sweep!r} is a DAG run that holds the sweeps {', '.join(inside)}: name one of them."
        )
    raise NoSweepError(f"there is no sweep {sweep!r}: `hermes sweep list` shows them.")


def _ambiguous_error(sweep: str, begun: Sequence[str]) -> AmbiguousIdError:
    shown = ", ".join(begun[:MOST_SHOWN]) + (", …" if len(begun) > MOST_SHOWN else "")
    return AmbiguousIdError(
        f"{sweep!r} is the beginning of {len(begun)} sweeps: {shown}: write more of the id."
    )


def recorded_id(tracker: Tracker, sweep: str) -> str:
    """Return the id in MLflow that begins with this text; the text itself if there is none.

    Raise AmbiguousIdError for the beginning of several ids.
    """
    if not _ID_PATTERN.fullmatch(sweep) or tracker.find_sweep(sweep) is not None:
        return sweep
    begun = matching_ids(sweep, tracker.newest_sweeps(MOST_BEGINNINGS))
    if len(begun) > 1:
        raise _ambiguous_error(sweep, begun)
    return begun[0] if begun else sweep


def locate_or_explain(connection: Connection, sweep: str) -> SweepLocation:
    """Return the location of the sweep as `locate`; the error tells if Airflow has lost it."""
    try:
        return locate(connection.airflow, sweep)
    except NoSweepError:
        if (lost := _lost_message(connection.tracker, sweep)) is not None:
            raise HermesError(lost) from None
        raise


def _lost_message(tracker: Tracker, sweep: str) -> str | None:
    """Return the message on a sweep that MLflow has and Airflow has not; None for another."""
    try:
        ref = tracker.find_sweep(sweep)
    except HermesError:
        return None
    if ref is None:
        return None
    page = tracker.run_url(ref.experiment_id, ref.parent_run_id)
    return (
        f"Airflow has lost the sweep {sweep!r}: its DAG run was deleted, by `airflow db clean` for "
        "instance, so it can be neither followed nor resumed. Its trials and results are in "
        f"MLflow: {page}. To go on, start a new one with its best configurations as "
        "search.points_to_evaluate; docs/operate.md, section Retention, says how others are kept."
    )


def full_id(airflow: AirflowClient, sweep: str) -> str:
    """Return the id that begins with this text; the text itself if there is none."""
    try:
        return locate(airflow, sweep).sweep
    except (AmbiguousIdError, NotPermitted):
        raise
    except HermesError:  # the caller reports what is not known; Airflow may be away
        return sweep


def matching_ids(beginning: str, sweeps: Iterable[str]) -> list[str]:
    """Return the ids that begin with this text; if some continue with `-`, only those."""
    matching = [s for s in sweeps if s.startswith(beginning)] if beginning else []
    return [s for s in matching if s[len(beginning) :].startswith("-")] or matching


def airflow_state(airflow: AirflowClient, place: SweepLocation) -> str | None:
    """Return Airflow's state of the sweep, in ENDED_AIRFLOW_STATES or not; None if it was deleted.

    For a sweep in a task group it is the state of the group; tasks after the group may still run.
    """
    if not place.group:
        run = airflow.dag_run(place.dag_id, place.run_id)
        return None if run is None else str(run["state"])
    report = airflow.task_instance(place.report)
    return None if report is None else state_in_group(report.get("state"))


def newest(airflow: AirflowClient, limit: int = 50) -> list[ListedSweep]:
    """Return the newest sweeps of all DAGs, newest first."""
    plans = airflow.made_by(PLANNER, limit=limit)
    dags = sorted({p["dag_id"] for p in plans if not _group(p)})
    runs = {(r["dag_id"], r["dag_run_id"]): r for r in (airflow.dag_runs(dags) if dags else ())}
    groups = any(_group(p) for p in plans)
    report_tasks = airflow.made_by(REPORTER, limit=limit) if groups else ()
    reports = {(t["dag_id"], t["dag_run_id"], _group(t)): t for t in report_tasks}
    return [_to_row(p, runs.get(_run_of(p)), reports.get((*_run_of(p), _group(p)))) for p in plans]


def _to_row(
    plan: Mapping[str, Any], run: Mapping[str, Any] | None, report: Mapping[str, Any] | None
) -> ListedSweep:
    dag_id, run_id = _run_of(plan)
    is_whole_run = not _group(plan) and run is not None
    if plan.get("state") == "skipped":  # for Airflow a run of skipped tasks alone is a success
        state = "skipped"
    elif is_whole_run and run is not None:
        state = str(run["state"])
    else:
        state = state_in_group((report or {}).get("state"))
    began, over = (run, run) if is_whole_run else (plan, report)
    return ListedSweep(
        sweep_id(dag_id, run_id, plan["task_id"]),
        dag_id,
        run_id,
        state,
        (began or {}).get("start_date"),
        (over or {}).get("end_date") if state in ENDED_AIRFLOW_STATES else None,
    )


def possible_locations(sweep: str) -> Iterator[SweepLocation]:
    """Yield the locations that an id can mean."""
    return (SweepLocation(sweep, *place) for place in possible_places(sweep))


def _is_there(airflow: AirflowClient, place: SweepLocation) -> bool:
    if place == SweepLocation.in_main_dag(place.sweep):
        return airflow.dag_run(place.dag_id, place.run_id) is not None
    return airflow.task_instance(place.plan) is not None


def _sweeps_of_run(airflow: AirflowClient, sweep: str) -> list[str]:
    """Return the sweeps of the DAG run that `DAG:RUN` names; none if it names none."""
    dag, colon, run = sweep.partition(":")
    if not colon or airflow.dag_run(dag, run) is None:
        return []
    plans = airflow.made_by(PLANNER, dag, run)
    return sorted(sweep_id(dag, run, p["task_id"]) for p in plans)


def _run_of(task: Mapping[str, Any]) -> tuple[str, str]:
    return task["dag_id"], task["dag_run_id"]


def _group(task: Mapping[str, Any]) -> str:
    return group_of(str(task["task_id"]))

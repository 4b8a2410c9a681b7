"""Scheduled sweeps: a DAG for each sweep file of a folder that has a `schedule`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, CronTriggerTimetable, get_parsing_context

from hermes_ops.airflow.sweep.dag import UNLIMITED, empty_dag, sweep_asset, sweep_tasks
from hermes_ops.airflow.sweep.source import SweepSource
from hermes_ops.airflow.sweep.warm_start import NightlySweeps
from hermes_ops.airflow.trial.connections import Connections
from hermes_ops.config import SweepConfig, load_file
from hermes_ops.config.sections import Overlap
from hermes_ops.errors import ConfigError, Problem

SUFFIXES = (".yaml", ".yml", ".json")
PREFIX = "nightly_"
MOST_NAME_CHARACTERS = 250 - len(PREFIX)
"""The longest file name, without suffix: a DAG's id in Airflow has at most 250 characters."""
NO_CATCHING_UP = timedelta(0)
"""Age of a missed night that still runs when its DAG is unpaused for the first time. With Airflow's
default, False, it is a tenth of the time between two nights. Later on the plan skips it."""


def nightly_dags(
    folder: Path,
    *,
    mlflow_conn_id: str | None = None,
    storage_conn_id: str | None = None,
    **dag_arguments: Any,  # noqa: ANN401 - Airflow's own
) -> dict[str, DAG]:
    """Return the DAGs of the folder's valid sweep files with a schedule, by id `nightly_NAME`.

    They are paused until a user unpauses them, if Airflow's setting says so, and never catch up.
    Invalid files are left out: `refuse_broken` turns them into import errors.
    """
    connections = Connections(mlflow_conn_id, storage_conn_id)
    wanted = get_parsing_context().dag_id  # a task's start has no use for the others
    dags: dict[str, DAG] = {}
    for path in sweep_files(folder):
        if wanted not in (None, dag_id_of(path)):
            continue
        try:
            config = _load(path, dags)
        except ConfigError:
            continue
        if config.schedule is not None:
            dags[dag_id_of(path)] = _dag(path, config, connections, dag_arguments)
    return dags


def refuse_broken(folder: Path) -> None:
    """Raise ConfigError with the problems of every invalid sweep file in the folder.

    Call it in a separate DAG file: an import error removes all DAGs of its file.
    """
    problems: list[Problem] = []
    seen: dict[str, Path] = {}
    for path in sweep_files(folder):
        try:
            _load(path, seen)
            seen[dag_id_of(path)] = path
        except ConfigError as error:
            problems += (_named(problem, path) for problem in error.problems)
    if problems:
        raise ConfigError(str(folder), tuple(problems))


def _named(problem: Problem, path: Path) -> Problem:
    """Return the problem with its file's name, if its place lacks it (JSON has no lines)."""
    if path.name in problem.where:
        return problem
    return dataclasses.replace(problem, where=f"{path.name}: {problem.where}")


def sweep_files(folder: Path) -> Iterator[Path]:
    """Yield the folder's files that are named like sweep files, by name."""
    if folder.is_dir():
        yield from (p for p in sorted(folder.iterdir()) if p.suffix.lower() in SUFFIXES)


def dag_id_of(path: Path) -> str:
    """Return the DAG id of a sweep file: its name without the suffix."""
    return f"{PREFIX}{path.stem}"


def _load(path: Path, taken: dict[str, Any]) -> SweepConfig:
    config = load_file(path)
    allowed, fix = "one file of letters, digits, '.', '_', '-' for each DAG", "rename the file"
    if not re.fullmatch(r"[\w.\-]+", path.stem, re.ASCII):
        raise ConfigError(str(path), (Problem(path.name, f"the name {path.name!r}", allowed, fix),))
    if len(path.stem) > MOST_NAME_CHARACTERS:
        found, most = f"a name of {len(path.stem)} characters", f"at most {MOST_NAME_CHARACTERS}"
        raise ConfigError(str(path), (Problem(path.name, found, most, fix),))
    if dag_id_of(path) in taken:
        found = f"a second file for the DAG {dag_id_of(path)}"
        raise ConfigError(str(path), (Problem(path.name, found, allowed, fix),))
    return config


def _dag(
    path: Path, config: SweepConfig, connections: Connections, dag_arguments: dict[str, Any]
) -> DAG:
    dag_id, night = dag_id_of(path), config.nightly
    defaults = {
        "schedule": CronTriggerTimetable(
            config.schedule or "", timezone=night.timezone, run_immediately=NO_CATCHING_UP
        ),
        "max_active_runs": 1 if night.overlap is Overlap.QUEUE else UNLIMITED,
        "doc_md": f"The sweep `{config.name}` of the file `{path.name}`, on a schedule.",
    }
    with empty_dag(dag_id, **{**defaults, **dag_arguments}) as dag:
        sweep_tasks(
            SweepSource.from_sweep(path, path.parent, config.pool),
            connections,
            nights=NightlySweeps(dag_id, catches_up=bool(dag.catchup)),
            outlets=[sweep_asset(dag_id)],
        )
    return dag

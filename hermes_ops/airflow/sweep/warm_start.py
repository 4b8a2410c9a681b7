"""Configurations that are tried first: the best ones of earlier sweeps and of the last night."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from airflow.sdk.exceptions import AirflowSkipException

from hermes_ops.airflow.identity import PLAN_TASK, REPORT_TASK, sweep_id
from hermes_ops.airflow.metadata_rows import ENDED_TASK_STATES
from hermes_ops.config import Algorithm, SweepConfig, parse
from hermes_ops.config.sections import Overlap
from hermes_ops.core.curves import best
from hermes_ops.core.model import PastTrial
from hermes_ops.core.summary import objective_text
from hermes_ops.errors import ConfigError
from hermes_ops.search.space import Config
from hermes_ops.search.tree import axes
from hermes_ops.tracking import Tracker
from hermes_ops.tracking.earlier_sweeps import NIGHTLY, last_best_config, past_trials

Say = Callable[[str], None]


def add_warm_start(config: SweepConfig, tracker: Tracker, sweep: str, say: Say) -> SweepConfig:
    """Return the sweep with the `search.warm_start` best past configurations after its own points.

    They come from ended sweeps of the same name, with the same parameters and objective.
    Configurations that the space or its constraints no longer allow, or that miss a bound of a
    metric, are left out. If there are earlier trials, the seed is set by `with_own_seed`. Raise
    Unavailable if MLflow does not answer.
    """
    search, objective = config.search, config.objective
    if not search.warm_start:
        return config
    names = tuple(search.space)
    every = {name for name, _ in axes(search.to_space())}
    past = past_trials(
        tracker,
        config.name,
        metric=objective.metric,
        sign=objective.sign,
        names=names,
        sometimes=tuple(every.difference(names)),
        total_steps=config.budget.max_epochs,
        keeping=config.secondary,
    )
    given_points = [dict(point) for point in search.points_to_evaluate]
    room = min(search.warm_start, search.max_trials - len(given_points))
    fresh = [c for c in best_first(past, config) if c not in given_points][: max(0, room)]
    say(f"{len(fresh)} configurations of earlier sweeps are tried first: {fresh}")
    seeded = with_own_seed(config, sweep, say) if past else config
    document = json.loads(seeded.to_json())
    document["search"]["points_to_evaluate"] = [*given_points, *fresh]
    return parse(document, source="the best of earlier sweeps", base=None)


def with_own_seed(config: SweepConfig, sweep: str, say: Say) -> SweepConfig:
    """Return the sweep with a seed derived from its id, unless its file sets one.

    With the default seed a random search would draw the configurations of earlier sweeps again, and
    with one of the DAG run those of other sweeps of that run, or of the same night.
    """
    search = config.search
    if search.algorithm is Algorithm.GRID or "seed" in search.model_fields_set:
        return config
    seed = crc32(sweep.encode())
    say(f"search.seed is {seed}, from the sweep's id: set it in the file to draw alike each time")
    return config.model_copy(update={"search": search.model_copy(update={"seed": seed})})


def best_first(past: Iterable[PastTrial], config: SweepConfig) -> list[Config]:
    """Return the allowed configurations of past trials, each once, the best first."""
    feasible = config.search.to_feasible()

    def allowed() -> Iterator[tuple[float, Config]]:
        for trial in past:
            try:
                yield best(trial.curve), feasible.canonical(dict(trial.configuration))
            except (KeyError, ValueError):  # of another space, or excluded by a constraint
                continue

    configurations: list[Config] = []
    for _, candidate in sorted(allowed(), key=lambda pair: pair[0]):
        if candidate not in configurations:
            configurations.append(candidate)
    return configurations


@dataclass(frozen=True, slots=True)
class NightlySweeps:
    """The sweeps of one scheduled DAG, whose id they carry as a tag.

    `catches_up`: Airflow is to run nights that were missed.
    """

    dag_id: str
    catches_up: bool = False

    @property
    def tags(self) -> dict[str, str]:
        """Tags of the run of each of the sweeps."""
        return {NIGHTLY: self.dag_id}

    def begin(
        self,
        config: SweepConfig,
        tracker: Tracker,
        ti: Any,  # noqa: ANN401 - Airflow's own
        say: Say,
        run: Any = None,  # noqa: ANN401 - Airflow's own
    ) -> SweepConfig:
        """Return tonight's sweep; skip it while another one runs, if the sweep file says so.

        A night that was missed is skipped too. A backfill has neither: a person asks for its runs.
        """
        overlap = config.nightly.overlap
        if overlap is not Overlap.QUEUE and not self.catches_up and _was_missed(run):
            raise AirflowSkipException(
                f"the night of {run.run_after:%Y-%m-%d %H:%M} UTC was missed, and its sweep is not "
                "caught up: trigger the DAG, or clear this task, for a sweep now"
            )
        is_alone = overlap is not Overlap.SKIP or is_backfill(run)
        if not is_alone and (other := _another_that_runs(ti)):
            raise AirflowSkipException(f"the sweep of the run {other} of this DAG still runs")
        config = with_own_seed(config, sweep_id(ti.dag_id, ti.run_id, PLAN_TASK), say)
        if not config.nightly.warm_start:
            return config
        wanted = objective_text(config.objective.direction.value, config.objective.metric)
        point = last_best_config(tracker, config.name, self.dag_id, wanted)
        return config if point is None else with_point(config, point, say)


MISSED_S = 3_600.0
"""A scheduled run that begins so long after its time was missed: its DAG was paused, or Airflow was
away. On a DAG that has run before, Airflow begins the last missed run all the same."""


def is_backfill(run: Any) -> bool:  # noqa: ANN401 - Airflow's own
    """Return whether a person has asked for the DAG run of a time that has passed."""
    return _run_type(run) == "backfill"


def _was_missed(run: Any) -> bool:  # noqa: ANN401 - Airflow's own
    """Return whether a scheduled DAG run has begun long after its time; not once it was cleared."""
    if _run_type(run) != "scheduled" or run.clear_number or run.start_date is None:
        return False
    return bool((run.start_date - run.run_after).total_seconds() > MISSED_S)


def _run_type(run: Any) -> str:  # noqa: ANN401 - Airflow's own
    kind = getattr(run, "run_type", "")
    return str(getattr(kind, "value", kind))


def _another_that_runs(ti: Any) -> str | None:  # noqa: ANN401 - Airflow's own
    """Return the id of another run of the DAG whose sweep is running, or None.

    It does not matter who started or resumed that run. Of several runs that are being planned at
    the same time, the first by name is not skipped.
    """
    by_run = ti.get_task_states(dag_id=ti.dag_id, task_ids=[PLAN_TASK, REPORT_TASK])
    for run, states in sorted(by_run.items()):
        plan, report = states.get(PLAN_TASK), states.get(REPORT_TASK)
        has_sweep = plan == "success" and report not in ENDED_TASK_STATES
        is_first = plan not in ENDED_TASK_STATES and run < ti.run_id
        if run == ti.run_id or not (has_sweep or is_first):
            continue
        if ti.get_dagrun_state(ti.dag_id, run) == "running":
            return str(run)
    return None


def with_point(config: SweepConfig, point: Mapping[str, Any], say: Say) -> SweepConfig:
    """Return the sweep with one more configuration to try first, or unchanged if it does not fit.

    A grid has its points already; a space that has changed since may not have this one.
    """
    given_points = [dict(p) for p in config.search.points_to_evaluate]
    if config.search.algorithm is Algorithm.GRID or dict(point) in given_points:
        return config
    data = config.model_dump(mode="json")
    points = [dict(point), *given_points][: config.search.max_trials]
    data["search"]["points_to_evaluate"] = points
    try:
        warm = parse(data, source="the last night's best", base=None)
    except ConfigError as error:
        say(f"The last night's best is not tried again: {error}")
        return config
    say(f"The last night's best is tried first: {dict(point)}")
    return warm

"""What makes a sweep one of many nights: overlap with the last one, and what that one found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from airflow.sdk.exceptions import AirflowSkipException

from hermes_ops.config import Algorithm, SweepConfig, parse
from hermes_ops.config.nightly import Overlap
from hermes_ops.errors import ConfigError
from hermes_ops.tracking import Tracker
from hermes_ops.tracking.nights import NIGHTLY, last_night

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Nights:
    """The sweeps of one scheduled DAG, whose id they carry as a tag."""

    dag_id: str

    @property
    def tags(self) -> dict[str, str]:
        """Tags of the run of each of the sweeps."""
        return {NIGHTLY: self.dag_id}

    def begin(self, config: SweepConfig, tracker: Tracker, ti: Any, say: Say) -> SweepConfig:  # noqa: ANN401 - Airflow's own
        """Tonight's sweep; skips it while the last one runs, where that is the rule."""
        if config.nightly.overlap is Overlap.SKIP and _an_earlier_one_runs(ti):
            raise AirflowSkipException("the sweep of an earlier night still runs")
        if not config.nightly.warm_start:
            return config
        best = last_night(tracker, config.name, self.dag_id)
        return config if best is None else with_point(config, best, say)


def _an_earlier_one_runs(ti: Any) -> bool:  # noqa: ANN401 - Airflow's own
    """By logical date, so that of two nights which begin together one goes on."""
    return ti.get_previous_dagrun(state="running") is not None


def with_point(config: SweepConfig, point: Mapping[str, Any], say: Say) -> SweepConfig:
    """The sweep with one more known configuration, tried first; without it if it does not fit.

    A grid has its points already; a space that has changed since may not have this one.
    """
    known = [dict(p) for p in config.search.points_to_evaluate]
    if config.search.algorithm is Algorithm.GRID or dict(point) in known:
        return config
    data = config.model_dump(mode="json")
    points = [dict(point), *known][: config.search.max_trials]
    data["search"]["points_to_evaluate"] = points
    try:
        warm = parse(data, source="the last night's best", base=None)
    except ConfigError as error:
        say(f"The last night's best is not tried again: {error}")
        return config
    say(f"The last night's best is tried first: {dict(point)}")
    return warm

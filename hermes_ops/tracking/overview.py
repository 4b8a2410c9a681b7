"""Bounded reads of MLflow for web pages, each one request or two.

The controller and the report read everything (`Tracker.trials`, `CurveReader`); a page reads no
more than it draws.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import islice

from hermes_ops.core.secondary_metrics import SecondaryMetric, violations
from hermes_ops.core.summary import CurvePoints
from hermes_ops.tracking.rest import RestClient, legal_name, quoted, tag_filter
from hermes_ops.tracking.runs import (
    KIND,
    STATE,
    SWEEP,
    LatestMetric,
    SweepRef,
    SweepRun,
    TrialRun,
    curve_of,
    has_tags,
    is_numbered,
    metric_of,
    sweep_of,
    trial_of,
)

MOST_CURVES = 100
"""Curves in one request, MLflow's limit."""
BEST, FINAL = "hermes.best", "hermes.final"
"""Metrics of a trial's run: the objective's best and last value, once it has left its GPUs."""
_PAGE = 1_000
_MOST_BOUNDS = 20
"""Bounds that MLflow checks: each is a join or two of its database, and SQLite has 64 at most."""
_MOST_CHECKED = 100
"""Best runs of which further bounds are checked here."""


class Overview:
    """Reads of one server for pages. All raise Unavailable, and Refused for what does not exist."""

    def __init__(self, rest: RestClient) -> None:
        self._rest = rest

    def sweeps(self, experiments: Sequence[str], runs: Sequence[str]) -> Mapping[str, SweepRun]:
        """Return the sweeps of these parent runs, at most 1,000, by the run's id."""
        if not runs:
            return {}
        body = {
            "experiment_ids": sorted(set(experiments)),
            "filter": f"attributes.run_id IN ({', '.join(map(quoted, runs))})",
            "max_results": min(len(runs), _PAGE),
        }
        answer = self._rest.post("runs/search", body).get("runs", ())
        return {run["info"]["run_id"]: sweep_of(run) for run in answer}

    def best(
        self, sweep: SweepRef, *, maximize: bool, bounded: Sequence[SecondaryMetric] = ()
    ) -> float | None:
        """Return the best value of the trials that have left their GPUs; None without one.

        Only trials count whose last values keep the bounds of `bounded`.
        """
        key = tag_filter({SWEEP: sweep.sweep_id, KIND: "trial"})
        asked = [clause for metric in bounded[:_MOST_BOUNDS] for clause in _kept(metric)]
        order = "DESC" if maximize else "ASC"
        body = {
            "experiment_ids": [sweep.experiment_id],
            "filter": " and ".join([key, f"tags.`{STATE}` != 'failed'", *asked]),
            "max_results": 1 if len(bounded) <= _MOST_BOUNDS else _MOST_CHECKED,
            "order_by": [f"metrics.`{BEST}` {order}"],
        }
        for run in self._rest.post("runs/search", body).get("runs", ()):
            metrics = run.get("data", {}).get("metrics", ())
            last = {m["key"]: metric_of(m).value for m in metrics}
            if not violations(bounded, {m.name: last.get(legal_name(m.name)) for m in bounded}):
                return last.get(BEST)
        return None

    def trials(self, sweep: SweepRef, most: int) -> tuple[TrialRun, ...]:
        """Return the first `most` opened trials of a sweep, by number."""
        key = {SWEEP: sweep.sweep_id, KIND: "trial"}
        body = {
            "experiment_ids": [sweep.experiment_id],
            "filter": tag_filter(key),
            "max_results": min(most, _PAGE),
            "order_by": ["attributes.start_time ASC"],
        }
        runs = islice(self._rest.post_pages("runs/search", body, "runs"), most)
        trials = [trial_of(run) for run in runs if has_tags(run, key) and is_numbered(run)]
        of_sweep = [t for t in trials if t.tags.get("mlflow.parentRunId") == sweep.parent_run_id]
        return tuple(sorted(of_sweep, key=lambda trial: trial.number))

    def curves(self, runs: Sequence[str], metric: str, points: int) -> Mapping[str, CurvePoints]:
        """Return the curves of at most MOST_CURVES runs by the run's id.

        MLflow samples a longer curve to about `points` points, including the last one.
        """
        if not runs:
            return {}
        query = {
            "run_ids": list(runs[:MOST_CURVES]),
            "metric_key": legal_name(metric),
            "max_results": points,
        }
        answer = self._rest.get("metrics/get-history-bulk-interval", query)
        points_of: dict[str, list[LatestMetric]] = defaultdict(list)
        for entry in answer.get("metrics", ()):
            points_of[entry["run_id"]].append(metric_of(entry))
        return {run: curve_of(curve_points) for run, curve_points in points_of.items()}


def _kept(metric: SecondaryMetric) -> Iterator[str]:
    """Yield MLflow filters for runs whose last value of a metric is within its bounds."""
    for comparison, limit in (("<=", metric.at_most), (">=", metric.at_least)):
        if limit is not None:
            number = format(Decimal(repr(limit)), "f")  # it reads no exponent after a sign
            yield f"metrics.`{legal_name(metric.name)}` {comparison} {number}"

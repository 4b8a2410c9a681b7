"""Learning curves out of MLflow, read incrementally and held in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hermes_ops.core.curves import PackedPoints
from hermes_ops.core.summary import CurvePoints
from hermes_ops.tracking.rest import legal_name
from hermes_ops.tracking.runs import LatestMetric, SweepRef, TrialRun, curve_of
from hermes_ops.tracking.tracker import Tracker

_FULL_READ_EVERY = 20  # reads; those between look at open trials only

_Held = dict[str, dict[int, PackedPoints]]  # metric -> trial -> points
_Curve = tuple[str, str]  # run id, metric
_NONE = PackedPoints.from_rows(())


@dataclass(frozen=True, slots=True)
class SweepCurves:
    """The curves of a sweep by trial number: points (step, value, Unix milliseconds) by step.

    `constraint_metrics` has the curves of the metrics that were requested besides the objective, by
    name.
    """

    points: Mapping[int, CurvePoints]
    constraint_metrics: Mapping[str, Mapping[int, CurvePoints]] = field(default_factory=dict)


class CurveReader:
    """Fetch the curves of a sweep's objective and of its `constraint_metrics`, incrementally.

    A fetch costs one search for all trials, and one request for each curve that grew by other than
    the very next step, for the new steps alone. It does not matter whether hermes-trial or the
    script logged the metric. A point that arrives late, for an earlier step, is seen at the trial's
    end. A new reader starts with all points: nothing is kept outside MLflow.
    """

    def __init__(
        self, tracker: Tracker, objective_metric: str, *, constraint_metrics: Iterable[str] = ()
    ) -> None:
        self._tracker = tracker
        self._metric = objective_metric
        self._constraint_metrics = tuple(constraint_metrics)
        self._metrics = frozenset(
            legal_name(name) for name in (objective_metric, *self._constraint_metrics)
        )
        self._points: dict[str, _Held] = {}  # sweep -> metric -> trial -> points
        self._runs: dict[str, dict[int, str]] = {}  # sweep -> trial -> its run
        self._seen: dict[_Curve, LatestMetric] = {}  # the newest point when it was read
        self._open: dict[str, dict[str, TrialRun]] = {}  # sweep -> run id -> the run as last read
        self._reads = 0

    def fetch(self, sweep: SweepRef) -> SweepCurves:
        """Fetch the new points and return the whole curves; raise Unavailable, keeping the old."""
        open_before = self._open.get(sweep.sweep_id)
        open_only = open_before is not None and self._reads % _FULL_READ_EVERY != 0
        trials = self._tracker.trials(sweep, open_only=open_only)
        curves = self._points.setdefault(sweep.sweep_id, {name: {} for name in self._metrics})
        runs = self._runs.setdefault(sweep.sweep_id, {})
        for trial in trials:
            if runs.get(trial.number) != trial.run_id:  # new, or started from scratch
                runs[trial.number] = trial.run_id
                for points in curves.values():
                    points.pop(trial.number, None)
            for metric, points in curves.items():
                self._update(points, trial, metric)
        seen_now = {t.run_id: t for t in trials}
        # A trial that has left the search has ended: its last points are fetched once.
        for run_id, trial in (open_before or {}).items():
            if run_id not in seen_now and runs[trial.number] == run_id:
                for metric, points in curves.items():
                    self._fetch(points, trial, metric)
        self._open[sweep.sweep_id] = {r: t for r, t in seen_now.items() if t.is_open}
        self._reads += 1
        return self.held(sweep)

    def held(self, sweep: SweepRef) -> SweepCurves:
        """Return the curves as last read, without a request."""
        curves = self._points.get(sweep.sweep_id, {})
        points, *others = (
            dict(curves.get(legal_name(name), {}))
            for name in (self._metric, *self._constraint_metrics)
        )
        return SweepCurves(points, dict(zip(self._constraint_metrics, others, strict=True)))

    def _update(self, curves: dict[int, PackedPoints], trial: TrialRun, metric: str) -> None:
        latest = trial.metrics.get(metric)
        curve = (trial.run_id, metric)
        if latest is None or _same(latest, self._seen.get(curve)):
            return
        old = curves.get(trial.number, _NONE)
        new = self._grown(old, curve, latest) if curve in self._seen else None
        if new is None:
            self._fetch(curves, trial, metric)
        else:
            curves[trial.number] = old.extended(curve_of(new))
        self._seen[curve] = latest

    def _grown(
        self, old: CurvePoints, curve: _Curve, latest: LatestMetric
    ) -> tuple[LatestMetric, ...] | None:
        """Return the points behind the old ones; None when the whole curve must be fetched."""
        end = old[-1][0] if old else 0
        if end < 1 or latest.step <= end:
            return None
        if latest.step == end + 1:
            return (latest,)
        return self._tracker.stretch(*curve, end + 1, latest.step)

    def _fetch(self, curves: dict[int, PackedPoints], trial: TrialRun, metric: str) -> None:
        points = curve_of(self._tracker.history(trial.run_id, metric))
        if points:
            curves[trial.number] = PackedPoints.from_rows(points)


def _same(one: LatestMetric, other: LatestMetric | None) -> bool:
    """Compare by step and time: a NaN is not equal to itself."""
    return other is not None and (one.step, one.time_ms) == (other.step, other.time_ms)

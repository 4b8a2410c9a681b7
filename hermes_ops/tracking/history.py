"""What earlier sweeps of the same space have left in MLflow, for policies that learn from it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import isfinite

from hermes_ops.core.history import PastTrial
from hermes_ops.core.secondary import Secondary, violations
from hermes_ops.core.summary import CurvePoints
from hermes_ops.core.training import training
from hermes_ops.tracking.curves import CurveReader
from hermes_ops.tracking.names import legal_name
from hermes_ops.tracking.runs import RUN_STATUS, TrialRun
from hermes_ops.tracking.tracker import Tracker

MOST_PAST_TRIALS = 256
_MOST_SWEEPS = 16


def past_trials(
    tracker: Tracker,
    experiment_name: str,
    *,
    metric: str,
    sign: float = 1.0,
    names: Collection[str],
    sometimes: Collection[str] = (),
    total_steps: int | None = None,
    keeping: Sequence[Secondary] = (),
    limit: int = MOST_PAST_TRIALS,
) -> tuple[PastTrial, ...]:
    """Return at most `limit` trials of the experiment's ended sweeps, the newest sweeps first.

    Only trials whose parameters are `names`, and maybe some of `sometimes` (those under a choice),
    and that have reported the metric count, and of those no failed one nor one that misses a bound
    of `keeping`. `sign` (1 or -1) turns a metric that is maximised into a loss.
    `total_steps` is what a trial of today trains; one that finished has the number that it came to.
    One search and one request for each trial; raises Unavailable and Refused.
    """
    found: list[PastTrial] = []
    ended = [s for s in tracker.sweeps(experiment_name) if s.state in RUN_STATUS]
    for sweep in ended[:_MOST_SWEEPS]:
        if len(found) >= limit:
            break
        always, every = frozenset(names), frozenset((*names, *sometimes))
        trials = [t for t in tracker.trials(sweep.ref) if _counts(t, always, every, keeping)]
        curves = CurveReader(tracker, metric).read(sweep.ref).points if trials else {}
        pairs = ((t, curves.get(t.number, ())) for t in trials)
        found += (_past(t, points, sign, total_steps) for t, points in pairs if _shows(points))
    return tuple(found[:limit])


def _counts(
    trial: TrialRun,
    always: frozenset[str],
    every: frozenset[str],
    keeping: Sequence[Secondary],
) -> bool:
    if trial.state == "failed" or not always <= trial.config.keys() <= every:
        return False
    latest = {m.name: trial.metrics.get(legal_name(m.name)) for m in keeping}
    last = {name: None if found is None else found.value for name, found in latest.items()}
    return not violations(keeping, last)


def _shows(points: CurvePoints) -> bool:
    return any(isfinite(value) for step, value, _ in points if step > 0)


def _past(trial: TrialRun, points: CurvePoints, sign: float, total_steps: int | None) -> PastTrial:
    startup_s = trial.timing_s("startup_s")
    curve = training(points, trial.segments, sign=sign, startup_s=startup_s).curve
    whole = trial.state == "finished"
    steps = curve[-1].step if whole else max(total_steps or 0, curve[-1].step)
    return PastTrial(tuple(trial.config.items()), curve, steps)

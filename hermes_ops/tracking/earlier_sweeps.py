"""Earlier sweeps of an experiment in MLflow: their trials, costs, and nights of a schedule."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from hermes_ops.core.curves import LearningCurve
from hermes_ops.core.model import PastTrial
from hermes_ops.core.secondary_metrics import SecondaryMetric, violations
from hermes_ops.core.summary import CurvePoints, Night
from hermes_ops.core.training import training
from hermes_ops.errors import ConfigError, Refused
from hermes_ops.tracking.artifacts import fetch_sweep_file
from hermes_ops.tracking.curves import CurveReader
from hermes_ops.tracking.rest import chunked_tag, joined_json, legal_name
from hermes_ops.tracking.runs import NAME, RUN_STATUS, SweepRun, TrialRun, number_in
from hermes_ops.tracking.summary import CollectedSweep
from hermes_ops.tracking.tracker import Tracker

MOST_PAST_TRIALS = 256
MOST_SWEEPS = 16


def past_trials(
    tracker: Tracker,
    experiment_name: str,
    *,
    metric: str,
    sign: float = 1.0,
    names: Collection[str],
    sometimes: Collection[str] = (),
    total_steps: int | None = None,
    keeping: Sequence[SecondaryMetric] = (),
    limit: int = MOST_PAST_TRIALS,
) -> tuple[PastTrial, ...]:
    """Return at most `limit` trials of the experiment's ended sweeps, the newest sweeps first.

    A trial counts if its parameters are `names`, and perhaps some of `sometimes` (those under a
    choice), if it has reported the metric, has not failed and misses no bound of `keeping`. `sign`
    (1 or -1) turns a metric that is maximised into a loss. `total_steps`: the steps of a trial of
    the new sweep; a finished trial has the number that it reached. Costs a search for each sweep
    and a request for each trial. Raise Unavailable, Refused.
    """
    past: list[PastTrial] = []
    for sweep in _ended(tracker, experiment_name)[:MOST_SWEEPS]:
        if len(past) >= limit:
            break
        always, every = frozenset(names), frozenset((*names, *sometimes))
        trials = [t for t in tracker.trials(sweep.ref) if _counts(t, always, every, keeping)]
        curves = CurveReader(tracker, metric).fetch(sweep.ref).points if trials else {}
        pairs = ((t, curves.get(t.number, ())) for t in trials)
        past += (_past(t, points, sign, total_steps) for t, points in pairs if _shows(points))
    return tuple(past[:limit])


def _counts(
    trial: TrialRun,
    always: frozenset[str],
    every: frozenset[str],
    keeping: Sequence[SecondaryMetric],
) -> bool:
    if trial.state == "failed" or not always <= trial.config.keys() <= every:
        return False
    latest = {m.name: trial.metrics.get(legal_name(m.name)) for m in keeping}
    last = {name: None if value is None else value.value for name, value in latest.items()}
    return not violations(keeping, last)


def _shows(points: CurvePoints) -> bool:
    return any(isfinite(value) for step, value, _ in points if step > 0)


def _past(trial: TrialRun, points: CurvePoints, sign: float, total_steps: int | None) -> PastTrial:
    startup_s = trial.timing_s("startup_s")
    curve = training(points, trial.segments, sign=sign, startup_s=startup_s).curve
    whole = trial.state == "finished"
    steps = curve[-1].step if whole else max(total_steps or 0, curve[-1].step)
    packed = LearningCurve.from_rows(curve)
    return PastTrial(tuple(trial.config.items()), packed, steps)


@dataclass(frozen=True, slots=True)
class SweepCost:
    """The cost of an ended sweep: GPU-seconds an epoch of each trial, total GPU and wall time."""

    sweep: str
    gpu_s_per_epoch: tuple[float, ...]
    gpu_s: float
    wall_s: float


def earlier_spending(
    tracker: Tracker, experiment: str, like: Callable[[Mapping[str, Any]], bool]
) -> tuple[SweepCost, ...]:
    """Return the costs of the newest ended sweeps whose sweep files satisfy `like`.

    Sweeps without a trained epoch are left out. Raise Unavailable.
    """
    costs = []
    for run in _ended(tracker, experiment)[:MOST_SWEEPS]:
        try:
            ref = run.ref
            document = fetch_sweep_file(tracker.artifacts, ref.parent_run_id, ref.sweep_id)
        except (Refused, ConfigError):  # deleted, or not ours
            continue
        if isinstance(document, dict) and like(document):
            spent = _spent(run, tracker.trials(run.ref))
            if spent.gpu_s_per_epoch:
                costs.append(spent)
    return tuple(costs)


def _spent(run: SweepRun, trials: tuple[TrialRun, ...]) -> SweepCost:
    costs = [(_tag_value(t, "hermes.gpu_seconds"), _tag_value(t, "hermes.steps")) for t in trials]
    rates = tuple(gpu_s / steps for gpu_s, steps in costs if steps >= 1 and gpu_s > 0)
    ended_ms = run.ended_ms if run.ended_ms is not None else run.started_ms
    wall_s = max(0.0, (ended_ms - run.started_ms) / 1_000)
    return SweepCost(run.ref.sweep_id, rates, sum(gpu_s for gpu_s, _ in costs), wall_s)


def _tag_value(trial: TrialRun, tag: str) -> float:
    return number_in(trial.tags.get(tag)) or 0.0


NIGHTLY = "hermes.nightly"
"""Tag of a sweep's run: its schedule."""
BEST, BEST_CONFIG, GPU_SECONDS = "hermes.best", "hermes.best_config", "hermes.gpu_seconds"
BEST_TRIAL = "hermes.best_trial"
"""Tag of a sweep's run: the number of its best trial."""
OBJECTIVE = "hermes.objective"
"""Tag of a sweep's run: of what its best value is, as `minimize loss`."""


def log_outcome(tracker: Tracker, collected: CollectedSweep) -> None:
    """Tag the sweep's run with its best trial, value and configuration, and the GPU time."""
    gpu_s = sum(t.gpu_seconds for t in collected.summary.trials)
    tags = {GPU_SECONDS: f"{gpu_s:.3f}", OBJECTIVE: collected.summary.objective}
    best = collected.summary.best
    if best is not None:
        tags |= {BEST: repr(best.best), BEST_TRIAL: str(best.number)}
        tags |= chunked_tag(BEST_CONFIG, json.dumps(dict(best.config or {})))
    tracker.set_tags(collected.run.ref.parent_run_id, tags)


def last_best_config(
    tracker: Tracker, experiment: str, schedule: str, objective: str
) -> Mapping[str, Any] | None:
    """Return the best configuration of a schedule's newest ended sweep that has one.

    A sweep whose objective was another one does not count.
    """
    nights = map(_night, _ended_nights(tracker, experiment, schedule))
    return next((n.config for n in nights if n.config and n.objective in ("", objective)), None)


def earlier_nights(tracker: Tracker, sweep: SweepRun, count: int) -> tuple[Night, ...]:
    """Return the `count` sweeps before this one of its schedule, if it has one, newest first."""
    schedule = sweep.tags.get(NIGHTLY)
    if schedule is None or count == 0:
        return ()
    runs = _ended_nights(tracker, sweep.tags.get(NAME, sweep.name), schedule)
    earlier = (r for r in runs if r.started_ms < sweep.started_ms)
    return tuple(map(_night, earlier))[:count]


def _ended(tracker: Tracker, experiment: str) -> list[SweepRun]:
    return [run for run in tracker.sweeps(experiment) if run.state in RUN_STATUS]


def _ended_nights(tracker: Tracker, experiment: str, schedule: str) -> list[SweepRun]:
    return [run for run in _ended(tracker, experiment) if run.tags.get(NIGHTLY) == schedule]


def _night(run: SweepRun) -> Night:
    return Night(
        sweep=run.ref.sweep_id,
        started_s=run.started_ms / 1_000,
        state=run.state,
        best=_finite(run.tags.get(BEST)),
        config=joined_json(BEST_CONFIG, run.tags) or {},
        gpu_seconds=_finite(run.tags.get(GPU_SECONDS)),
        objective=run.tags.get(OBJECTIVE, ""),
    )


def _finite(tag: str | None) -> float | None:
    value = number_in(tag)
    return value if value is not None and isfinite(value) else None

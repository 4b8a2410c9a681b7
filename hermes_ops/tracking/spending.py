"""What trials of earlier sweeps have cost, for an estimate of the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hermes_ops.errors import Refused
from hermes_ops.tracking.runs import RUN_STATUS, SweepRun, TrialRun
from hermes_ops.tracking.tracker import Tracker

MOST_SWEEPS = 16


@dataclass(frozen=True, slots=True)
class Spent:
    """One ended sweep: GPU-seconds for each epoch of each trial, what it had, how long it took."""

    sweep: str
    gpu_s_per_epoch: tuple[float, ...]
    gpu_s: float
    wall_s: float


def earlier_spending(
    tracker: Tracker, experiment: str, like: Callable[[Mapping[str, Any]], bool]
) -> tuple[Spent, ...]:
    """What the newest ended sweeps of an experiment cost whose sweep file is `like` this one.

    Trials without an epoch count in none. Raises Unavailable.
    """
    import yaml

    found = []
    for run in [s for s in tracker.sweeps(experiment) if s.state in RUN_STATUS][:MOST_SWEEPS]:
        try:
            document = yaml.safe_load(tracker.artifacts.read(run.ref.parent_run_id, "sweep.yaml"))
        except (Refused, yaml.YAMLError):  # deleted, or not ours
            continue
        if isinstance(document, dict) and like(document):
            spent = _spent(run, tracker.trials(run.ref))
            if spent.gpu_s_per_epoch:
                found.append(spent)
    return tuple(found)


def _spent(run: SweepRun, trials: tuple[TrialRun, ...]) -> Spent:
    costs = [(_number(t, "hermes.gpu_seconds"), _number(t, "hermes.steps")) for t in trials]
    rates = tuple(gpu_s / steps for gpu_s, steps in costs if steps >= 1 and gpu_s > 0)
    ended_ms = run.ended_ms if run.ended_ms is not None else run.started_ms
    wall_s = max(0.0, (ended_ms - run.started_ms) / 1_000)
    return Spent(run.ref.sweep_id, rates, sum(gpu_s for gpu_s, _ in costs), wall_s)


def _number(trial: TrialRun, tag: str) -> float:
    try:
        return float(trial.tags.get(tag, 0))
    except ValueError:
        return 0.0

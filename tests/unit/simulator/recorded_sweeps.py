"""Recorded sweeps of two trials, and the MLflow that holds one."""

from __future__ import annotations

import json
from typing import Any

from hermes_ops.config import SweepConfig, parse
from hermes_ops.core.summary import Segment
from hermes_ops.simulator.sweep_history import (
    RecordedTrial,
    SweepHistory,
)
from hermes_ops.tracking import LatestMetric, SweepRef, SweepRun, TrialRun

BEGIN_S = 1_000.0


def config(**changes: Any) -> SweepConfig:
    space = {"rate": {"type": "uniform", "low": 0, "high": 1}}
    file = {
        "name": "digits",
        "objective": {"metric": "loss", "direction": changes.pop("direction", "minimize")},
        "search": {"algorithm": "random", "max_trials": 4, "space": space},
        "trial": {"command": ["python", "train.py", "{rate}"], "directory": "/"},
        "budget": {"max_epochs": changes.pop("max_epochs", 4)},
        **changes,
    }
    return parse(file, "digits-1", None)


def piece(
    trial: int,
    gpu: int,
    start_s: float,
    end_s: float | None,
    outcome: str = "finished",
    **measured: Any,
) -> Segment:
    end = None if end_s is None else BEGIN_S + end_s
    return Segment(trial, 1, (gpu,), BEGIN_S + start_s, end, outcome=outcome, **measured)


def seen(*pairs: tuple[float, float]) -> tuple[tuple[int, float, int], ...]:
    """The points of steps 1, 2, ... as (seconds since the sweep's start, value)."""
    return tuple(
        (step, value, round((BEGIN_S + at_s) * 1000))
        for step, (at_s, value) in enumerate(pairs, start=1)
    )


def trial(number: int, state: str = "finished", **changes: Any) -> RecordedTrial:
    return RecordedTrial(number, state, {"rate": number / 10}, **changes)


def record(*trials: RecordedTrial, **changes: Any) -> SweepHistory:
    facts: dict[str, Any] = {"config": config(), "policy": "fifo", "gpus": 1, **changes}
    return SweepHistory("digits-1", started_s=BEGIN_S, trials=trials, **facts)


# Two trials one after the other on one GPU: each starts for 3 s, trains 2 s an epoch, exits in
# 0.5 s; the GPU is handed over in 1.5 s, and the first one begins 5 s after the sweep.
FIRST = trial(
    0, points=seen((10, 0.9), (12, 0.8)), segments=(piece(0, 0, 5, 12.5),), gpu_seconds=7.5
)

SECOND = trial(
    1,
    points=seen((19, 0.7), (21, 0.6)),
    segments=(piece(1, 0, 14, 21.5, startup_s=2.0),),
    timings={"startup_s": 2.0},
    gpu_seconds=7.5,
)


class Mlflow:
    """A tracker of one ended sweep of two finished trials, FIRST and SECOND."""

    uri = "http://mlflow"

    def __init__(self, state: str = "finished", second: str = "finished") -> None:
        self.state = state
        self.artifacts = self
        self.tags = {"hermes.policy": "fifo", "hermes.pool_slots": "1"}
        facts = zip((FIRST, SECOND), ("finished", second), strict=True)
        self.runs = tuple(self._run(t, kept) for t, kept in facts)

    def _run(self, trial: RecordedTrial, state: str) -> TrialRun:
        step, value, time_ms = trial.points[-1]
        return TrialRun(
            number=trial.number,
            run_id=str(trial.number),
            config=trial.config or {},
            state=state,
            tags={
                "hermes.segment_log": json.dumps([s.to_json() for s in trial.segments]),
                "hermes.gpu_seconds": str(trial.gpu_seconds),
                **({"hermes.startup_s": "2.000"} if trial.timings else {}),
            },
            metrics={"loss": LatestMetric(value, step, time_ms)},
            status="FINISHED",
            started_ms=0,
            ended_ms=1,
        )

    def find_sweep(self, sweep: str, experiment: str | None = None) -> SweepRef | None:
        return SweepRef(sweep, "1", "parent") if sweep == "digits-1" else None

    def newest_sweeps(self, most: int) -> dict[str, SweepRun]:
        ids = ("digits-1", "other-1", "other-2")
        return {sweep: self.sweep(SweepRef(sweep, "1", "parent")) for sweep in ids}

    def sweep(self, ref: SweepRef) -> SweepRun:
        begin_ms = round(BEGIN_S * 1000)
        return SweepRun(
            ref, ref.sweep_id, self.state, "FINISHED", self.tags, begin_ms, begin_ms + 1
        )

    def trials(self, sweep: SweepRef, *, open_only: bool = False) -> tuple[TrialRun, ...]:
        return self.runs

    def history(self, run_id: str, metric: str) -> tuple[LatestMetric, ...]:
        points = (FIRST, SECOND)[int(run_id)].points
        return tuple(LatestMetric(value, step, time_ms) for step, value, time_ms in points)

    def fetch(self, run_id: str, path: str) -> bytes:
        return config().to_yaml().encode()

    def read_decisions(self, run_id: str) -> tuple[dict[str, Any], ...]:
        start = {"action": "start", "trial": 0, "time_s": BEGIN_S + 4.0}
        return (start, {"action": "stop", "trial": 0, "time_s": BEGIN_S + 12.0})

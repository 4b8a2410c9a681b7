"""Stub trials of a pool, and their progress between two rounds."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any
from uuid import UUID

from bench.measure import Figures
from bench.pod_driver import DriverCase
from bench.pod_world import Fleet, Rows, TrialRowKey, sweep_config
from hermes_ops.airflow.control.jobs import Points
from hermes_ops.airflow.control.sweep_state import SweepState
from hermes_ops.airflow.control.trial_state import TrialRecords as Seen
from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.identity import TRIAL_TASK
from hermes_ops.airflow.records import (
    HELD_POOL_SLOTS,
    LEASE_KEY,
    SEGMENT_KEY,
    Lease,
    SegmentRecord,
    SweepRecord,
    encode,
)
from hermes_ops.config import SweepConfig, leased_pod
from hermes_ops.core.model import Phase
from hermes_ops.tracking import Tracker

SWEEPS = 12
POINTS, STEP_S, EPOCHS = 30, 120.0, 100


@dataclass(slots=True)
class StubCurveFeed:
    """A stub of `CurveFeed`, which reads curves from MLflow in the background."""

    held: dict[str, dict[int, Points]] = field(default_factory=dict)

    def start(self) -> None:
        """Do nothing: the curves are in memory."""

    def follow(self, plans: Mapping[str, object]) -> None:
        """Do nothing: the curves of all sweeps are there."""

    def curves(self, sweep: str) -> Mapping[int, Points]:
        """Return the curves of a sweep by trial."""
        return dict(self.held.get(sweep, {}))

    def constraint_metrics(self, _: str) -> Mapping[str, Mapping[int, Points]]:
        """Return none: no metric has a bound."""
        return {}

    def age_s(self, _: str) -> float:
        """Return 0: the curves are always new."""
        return 0.0

    def has_news(self) -> bool:
        """Return False: no round is triggered by a curve."""
        return False

    def close(self) -> None:
        """Do nothing: there is no thread."""

    def grow(self, sweep: str, number: int, now_s: float) -> None:
        """Add an epoch to a trial."""
        old = self.held.setdefault(sweep, {}).get(number, ())
        step = old[-1][0] + 1 if old else 1
        self.held[sweep][number] = (*old, point(number, step, now_s))


def point(number: int, step: int, at_s: float) -> tuple[int, float, int]:
    """Return a point of a falling loss, with a rate that depends on the trial."""
    rate = 0.02 + (number * 37 % 100) / 300.0
    return step, 0.1 + rate / 2 + 2.0 / (1.0 + rate * step), round(at_s * 1000)


Made = tuple[Figures, Figures]
"""The columns of a trial's task, and its records by key."""


@dataclass(slots=True)
class World:
    """The pool, and the progress of its trials between two rounds."""

    case: DriverCase
    rows: Rows
    fleet: Fleet
    curves: StubCurveFeed
    chance: random.Random
    nodes: tuple[str, ...] = ()

    def make(self, tracker: Tracker) -> list[str]:
        """Create nodes, sweeps, trials and pods; return the sweeps."""
        self.nodes = self.fleet.nodes(self.case.pods)
        self.rows.slots(self.case.pods)
        total = self.case.pods + self.case.waiting
        share = -(-total // SWEEPS)
        gpus = iter(range(self.case.pods))
        preempted = iter(range(self.case.preempted))
        counts = [min(share, total - begun) for begun in range(0, total, share)]
        names = [f"{self.case.namespace}-{place}" for place in range(len(counts))]
        for name, trials in zip(names, counts, strict=True):
            self._sweep(tracker, name, trials, gpus, preempted)
        return names

    def _sweep(
        self,
        tracker: Tracker,
        name: str,
        trials: int,
        gpus: Iterator[int],
        preempted: Iterator[int],
    ) -> None:
        config = sweep_config(name, trials, self.case.namespace)
        ref = tracker.ensure_sweep(name, name, config.to_json())
        now_s = time.time()
        record = SweepRecord(
            json.loads(config.to_json()), trials, TRIAL_TASK, ref.parent_run_id,
            ref.experiment_id, name, planned_s=now_s - 4_000.0,
        )  # fmt: skip
        part = trials / (self.case.pods + self.case.waiting)
        runs, waits = ceil(self.case.pods * part), ceil(self.case.preempted * part)
        made, pods = [], []
        for number in range(trials):
            gpu = next(gpus, None) if number < runs else None
            again = next(preempted, None) if runs <= number < runs + waits else None
            if gpu is not None:
                made.append(self._running(name, config, number, gpu))
                pods.append((name, number, 1, self.nodes[gpu]))
            elif again is not None:
                made.append(self._preempted(name, config, number))
            else:
                made.append(({"state": "scheduled", "pool_slots": HELD_POOL_SLOTS,
                              "priority_weight": 1}, {}))  # fmt: skip
        self.rows.begin(name, record, made)
        self.fleet.run_all(pods)

    def _running(self, sweep: str, config: SweepConfig, number: int, gpu: int) -> Made:
        now_s, node = time.time(), self.nodes[gpu]
        begun_s, steps = now_s - self.chance.uniform(0.0, STEP_S), self.chance.randint(0, POINTS)
        before_s = steps * STEP_S
        lease = replace(self._lease(config, number, (gpu,), begun_s), nodes=(node,))
        segment = SegmentRecord(
            1, running=True, started_s=begun_s, step=steps, steps_at_start=steps, gpus=(gpu,),
            spans=((begun_s - before_s, begun_s),) if steps else (), service_gpu_s=before_s,
        )  # fmt: skip
        self._learn(sweep, number, begun_s - before_s, steps)
        self._status(sweep, number, 1)
        columns = {"state": "deferred", "pool_slots": 1, "priority_weight": 1_000_000}
        return columns, {LEASE_KEY: encode(lease), SEGMENT_KEY: encode(segment)}

    def _preempted(self, sweep: str, config: SweepConfig, number: int) -> Made:
        now_s = time.time()
        trained_s = POINTS * STEP_S
        begun_s = now_s - trained_s - self.chance.uniform(1_000.0, 3_000.0)
        lease = self._lease(config, number, (0,), begun_s)
        segment = SegmentRecord(
            1, running=False, started_s=begun_s, step=POINTS, service_gpu_s=trained_s,
            spans=((begun_s, begun_s + trained_s),), preemptions=1, outcome="preempted",
            ended_s=now_s - self.chance.uniform(1.0, 60.0), checkpoint_s=0.1, restore_s=0.4,
            startup_s=3.0, gpus=(0,),
        )  # fmt: skip
        self._learn(sweep, number, begun_s, POINTS)
        columns = {"state": "scheduled", "pool_slots": HELD_POOL_SLOTS, "priority_weight": 1}
        return columns, {LEASE_KEY: encode(lease), SEGMENT_KEY: encode(segment)}

    def _lease(
        self, config: SweepConfig, number: int, gpus: tuple[int, ...], granted_s: float
    ) -> Lease:
        values = {
            "learning_rate": 10 ** self.chance.uniform(-4.0, -1.0),
            "momentum": self.chance.uniform(0.5, 0.99),
            "layers": self.chance.randint(1, 8),
        }
        command = ("python", "train.py", *(f"--{k}={v}" for k, v in values.items()))
        pod = leased_pod(config.trial.run_in, config.trial.pod)
        return Lease(1, gpus, granted_s, f"run-{number}", values, command, "/opt/work", pod=pod,
                     max_epochs=EPOCHS)  # fmt: skip

    def _learn(self, sweep: str, number: int, begun_s: float, steps: int) -> None:
        points = (point(number, n, begun_s + n * STEP_S) for n in range(1, steps + 1))
        self.curves.held.setdefault(sweep, {})[number] = tuple(points)

    def _status(self, sweep: str, number: int, epoch: int) -> None:
        """Write the status of the trial in the pod."""
        timings = {"checkpoint_s": 0.1, "restore_s": 0.4, "startup_s": 3.0}
        status = {"epoch": epoch, "step": POINTS, "preemptible": True, "timings": timings}
        folder = TrialFolder.from_sweep(sweep, number).path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "status.json").write_text(json.dumps(status))

    def go_on(self, sweeps: Mapping[str, SweepState]) -> None:
        """Advance the trials since the last round: start, train, leave, end."""
        now_s = time.time()
        seen = [(sweep, trial) for sweep in sweeps.values() for trial in sweep.trials]
        held = [(b, t) for b, t in seen if t.phase is Phase.RUNNING]
        ending = self.chance.sample(held, min(self.case.ends, len(held)))
        for sweep, trial in held:
            if self.chance.random() < 1.0 / STEP_S:
                self.curves.grow(sweep.id, trial.number, now_s)
        with self.rows.engine.begin() as connection:
            for sweep, trial in seen:
                if trial.phase is Phase.STARTING:
                    self._begins(connection, sweep, trial, now_s)
                elif trial.phase is Phase.STOPPING and trial.is_under_way:
                    self._leaves(connection, sweep, trial, now_s, final=None)
            for sweep, trial in ending:
                self._leaves(connection, sweep, trial, now_s, final="finished")

    def _begins(self, connection: Any, sweep: SweepState, trial: Seen, now_s: float) -> None:  # noqa: ANN401
        lease = trial.lease
        assert lease is not None
        old = trial.segment or SegmentRecord(0, running=False, started_s=now_s)
        segment = replace(
            old, epoch=lease.epoch, running=True, started_s=now_s, gpus=lease.gpus, outcome="",
            ended_s=None, steps_at_start=old.step,
        )  # fmt: skip
        self._status(sweep.id, trial.number, lease.epoch)
        self.fleet.run(sweep.id, trial.number, lease.epoch, self.nodes[lease.gpus[0]])
        self.rows.write_segment(
            connection, _who(sweep, trial), segment, state="deferred", pool_slots=1
        )

    def _leaves(
        self,
        connection: Any,  # noqa: ANN401 - SQLAlchemy's
        sweep: SweepState,
        trial: Seen,
        now_s: float,
        *,
        final: str | None,
    ) -> None:
        lease, old = trial.lease, trial.segment
        assert lease is not None
        assert old is not None
        segment = replace(
            old, running=False, final=final, ended_s=now_s, outcome=final or "preempted",
            spans=(*old.spans, (old.started_s, now_s)),
            preemptions=old.preemptions + (final is None),
            service_gpu_s=old.service_gpu_s + now_s - old.started_s,
        )  # fmt: skip
        self.fleet.end(sweep.id, trial.number, lease.epoch)
        columns = {"state": "success"} if final else {"state": "scheduled"}
        slots = trial.row.pool_slots if final else HELD_POOL_SLOTS
        self.rows.write_segment(
            connection, _who(sweep, trial), segment, pool_slots=slots, **columns
        )


def _who(sweep: SweepState, trial: Seen) -> TrialRowKey:
    return TrialRowKey(UUID(trial.row.id), sweep.id, trial.number)

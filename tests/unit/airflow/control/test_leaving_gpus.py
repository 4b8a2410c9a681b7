"""GPUs of trials on which no policy decides: of a sweep that ends, or that cannot be read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.airflow.control.sweep_state import SweepState, pool_snapshot
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.metadata_rows import PoolRow, RunRow, TaskInstanceRow
from hermes_ops.airflow.records import LEASE_KEY, SEGMENT_KEY, CloseRecord, encode
from hermes_ops.config.pool_quota import parse_quota
from hermes_ops.core.gpu_time import DecayedUse, GpuTime
from hermes_ops.core.guards import Quantum
from hermes_ops.core.model import Plan, Snapshot
from hermes_ops.core.within_quota import QuotaMemory, WithinQuota
from hermes_ops.policies import make_policy
from tests.unit.airflow.builders import (
    flag,
    lease,
    pending,
    row,
    run_row,
    running,
    segment,
    starting,
    sweep_with,
    waiting,
)
from tests.unit.airflow.control.controllers import Database, controller_of

NOW_S = 130.0
ENDING = CloseRecord("stopped by ann")
STOPPING = TrialRecords(row(0, "running"), lease(gpus=(0,)), flag(), segment(gpus=(0,)))


def sweep(name: str, *trials: TrialRecords, close: CloseRecord | None = None) -> SweepState:
    made = sweep_with(*trials, close=close)
    run = replace(run_row(), run_id=name, triggered_by="ann")
    spec = type(made.spec).from_run(run)
    assert spec is not None
    return replace(made, spec=spec)


def seen(*sweeps: SweepState, slots: int = 2, foreign: int = 0, **more: Any) -> Snapshot:
    class Pool:
        def pool(self, *_: object) -> PoolRow:
            return PoolRow(slots, foreign)

    outside: Any = Pool()
    return pool_snapshot("gpus", outside, {s.id: s for s in sweeps}, NOW_S, **more)


def plan_of(snapshot: Snapshot) -> Plan:
    policy = make_policy("fifo", {}, None)
    return policy.decide(snapshot, policy.initial())[0]


@pytest.mark.parametrize(
    "leaving", [STOPPING, running(0, 0), starting(0, 0)], ids=lambda t: t.phase
)
def test_a_trial_starts_on_an_idle_gpu_before_one_that_a_sweep_which_ends_has_yet_to_leave(
    leaving: TrialRecords,
) -> None:
    ending = sweep("ending", leaving, waiting(1), pending(2), close=ENDING)
    snapshot = seen(ending, sweep("next", pending(0)))
    (job,) = (job for job in snapshot.jobs if job.sweep == "ending")
    assert (job.gpus_held, job.gpus_to_leave, job.resumes) == ((), (0,), False)
    (grant,) = plan_of(snapshot).grants
    assert (grant.job, grant.gpus) == ("next/0", (1,))


def test_a_limit_of_a_user_holds_until_a_sweep_that_ends_has_left_its_gpus() -> None:
    quota = parse_quota({"teams": [], "users": [{"name": "ann", "gpus": 1}]}, "test").quota()
    policy = WithinQuota(make_policy("fifo", {}, None), quota, Quantum(3.0, 5.0))
    memory = QuotaMemory(policy.policy.initial(), DecayedUse(), GpuTime(), ())
    following = sweep("next", pending(0))
    ending = sweep("ending", STOPPING, close=ENDING)
    assert policy.decide(seen(ending, following), memory)[0].grants == ()
    left = sweep("ending", waiting(0), close=ENDING)
    assert [g.job for g in policy.decide(seen(left, following), memory)[0].grants] == ["next/0"]


class OneTrial(Database):
    """A sweep that has a trial on GPU 0, which counts as another task while it is not read."""

    is_broken = False

    def trials(self, run: RunRow, task: str) -> tuple[TaskInstanceRow, ...]:
        if self.is_broken:
            raise RuntimeError("a row that makes no sense")
        return (row(0, "running"),)

    def records(self, run: RunRow) -> dict[tuple[str, int], dict[str, Any]]:
        trial = running(0, 0)
        known = {LEASE_KEY: trial.lease, SEGMENT_KEY: trial.segment}
        return {("trial", 0): {key: json.dumps(encode(value)) for key, value in known.items()}}

    def pool(self, name: str, own: Any) -> PoolRow | None:
        return PoolRow(2, 0 if own else 1)


def gpus_seen(controller: Any) -> list[int]:
    return [gpu.index for gpu in controller.cluster.observe().gpus]


def test_the_gpu_of_a_trial_that_could_not_be_read_is_given_to_nobody(tmp_path: Path) -> None:
    database = OneTrial(run_row())
    controller = controller_of(database, tmp_path / "view")
    assert gpus_seen(controller) == [0, 1]
    database.is_broken = True
    assert gpus_seen(controller) == [1]
    assert gpus_seen(controller) == [1]
    database.is_broken = False
    controller.cluster.faults.clock = lambda: 1e12
    assert gpus_seen(controller) == [0, 1]


def test_the_gpu_of_a_sweep_whose_record_cannot_be_read_is_given_to_nobody(tmp_path: Path) -> None:
    own = run_row()
    broken = replace(own, sweep={**own.sweep, "config": {"name": "digits", "pool": "gpus"}})
    assert gpus_seen(controller_of(OneTrial(broken), tmp_path / "view")) == [1]
    elsewhere = replace(own, sweep={**own.sweep, "config": {"name": "digits", "pool": "others"}})
    assert gpus_seen(controller_of(OneTrial(elsewhere), tmp_path / "view")) == [0]

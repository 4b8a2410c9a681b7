"""Params of new runs: written when their trials have their leases, and sooner or later all."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import islice
from typing import Any

import pytest

from hermes_ops.airflow.control.apply import Applier
from hermes_ops.airflow.control.decisions import read_tail
from hermes_ops.airflow.control.faults import FaultBarrier, rejected, resolved
from hermes_ops.airflow.control.granting import opened
from hermes_ops.airflow.control.reconcile import GiveUp
from hermes_ops.airflow.control.sweep_state import SweepState
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.records import Lease, decode
from hermes_ops.core.model import Gpu, Grant, JobId, Plan, Reason, Snapshot
from hermes_ops.core.plan import Start
from hermes_ops.errors import Refused, Unavailable
from tests.unit.airflow.builders import (
    SWEEP,
    Journal,
    lease,
    pending,
    row,
    segment,
    sweep_with,
    waiting,
)


def begin(applier: Applier, world: SweepState, number: int) -> None:
    job = JobId(f"{SWEEP}/{number}")
    start = Start(job, (0,), Reason("it has not been seen"))
    snapshot = Snapshot(200.0, (Gpu(0),), tuple(world.jobs(200.0)))
    applier.apply({SWEEP: world}, snapshot, Plan((Grant(job, (0,)),)), (start,), {})


@pytest.mark.parametrize("requests", [1, 4])
def test_the_params_of_a_new_run_are_written_after_its_trials_lease_and_rank(requests: int) -> None:
    outside = Journal()
    applier = outside.applier(requests)
    begin(applier, sweep_with(pending(0)), 0)
    assert [c[0] for c in outside.of("open", "put", "rank", "params")] == ["open", "put", "rank"]
    applier.complete(whole=True)
    ((_, _, config, _),) = outside.of("open")
    assert outside.of("params") == [("params", "run-0", config)]
    applier.complete(whole=True)
    assert len(outside.of("params")) == 1


def test_params_that_mlflow_does_not_take_now_are_written_at_the_next_call() -> None:
    outside = Journal()
    applier = outside.applier()
    begin(applier, sweep_with(pending(0)), 0)
    outside.mlflow_away = True
    applier.complete()
    assert not outside.of("params")
    outside.mlflow_away = False
    applier.complete()
    assert [c[1] for c in outside.of("params")] == ["run-0"]


def test_params_that_mlflow_refuses_are_said_and_not_sent_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outside = Journal()
    applier = outside.applier()
    begin(applier, sweep_with(pending(0)), 0)
    outside.refusal = Refused("the script has logged another value", code="INVALID_PARAMETER_VALUE")
    applier.complete()
    outside.refusal = None
    applier.complete()
    assert not outside.of("params")
    assert "The params of the run run-0 are not written" in caplog.text


def test_the_next_controller_writes_the_params_that_a_killed_one_has_left() -> None:
    outside = Journal(opened={5: {"rate": 0.5}, 6: {"rate": 0.6}}, unwritten={5: {"rate": 0.5}})
    applier = outside.applier()
    begin(applier, sweep_with(pending(0)), 0)
    applier.complete()
    assert {c[1] for c in outside.of("params")} == {"run-0", "run-5"}


def test_leases_come_in_the_order_of_their_runs_and_those_that_stand_come_first() -> None:
    slow: Future[Lease] = Future()
    asked = {
        JobId("s/0"): slow,
        JobId("s/1"): resolved(lease()),
        JobId("s/2"): resolved(lease(epoch=2)),
    }
    coming = opened(asked, FaultBarrier())
    assert [job for job, _ in islice(coming, 2)] == ["s/1", "s/2"]
    slow.set_result(lease(epoch=3))
    assert [(job, own.epoch) for job, own in coming] == [("s/0", 3)]


def test_a_run_that_is_not_opened_keeps_no_other_trial_from_its_lease() -> None:
    asked = {JobId("s/0"): rejected(Unavailable("MLflow is away")), JobId("s/1"): resolved(lease())}
    assert [job for job, _ in opened(asked, FaultBarrier())] == ["s/1"]


def test_a_command_that_linux_would_refuse_is_a_problem_of_its_trial_alone() -> None:
    space = {"p": {"type": "choice", "values": ["a" * 10_000]}}
    search = {"algorithm": "random", "seed": 7, "max_trials": 8, "space": space}
    trial = {"command": ["python", "train.py", "{p}" * 14], "directory": "/"}
    outside = Journal()
    applier = outside.applier()
    begin(applier, sweep_with(pending(0), search=search, trial=trial), 0)
    (fault,) = applier.faults.faults
    assert fault.step == "make its command"
    assert "140,000 bytes, and Linux takes at most 131,071" in fault.reason
    assert not outside.of("open", "put")


BATCHED: dict[str, Any] = {
    "search": {
        "algorithm": "random",
        "max_trials": 8,
        "space": {"size": {"type": "choice", "values": [32]}},
    },
    "trial": {
        "command": ["python", "train.py", "--size={size}"],
        "directory": "/",
        "gpus": {"max": 4},
        "workers": "one_per_gpu",
        "batch": {"parameter": "size", "min": 32, "max": 256},
    },
}


def granted(applier: Applier, world: SweepState, gpus: tuple[int, ...], batch: int | None) -> Lease:
    job = JobId(f"{SWEEP}/0")
    start = Start(job, gpus, Reason("it is its turn"), batch=batch)
    snapshot = Snapshot(200.0, tuple(map(Gpu, range(4))), tuple(world.jobs(200.0)))
    applier.apply({SWEEP: world}, snapshot, Plan((Grant(job, gpus, 1.0, batch),)), (start,), {})
    ((_, _, _, value),) = Journal.of(applier.client, "put")  # type: ignore[arg-type]
    found = decode(Lease, value)
    assert found is not None
    return found


def test_each_start_gets_the_batch_that_the_policy_has_chosen_and_the_run_the_drawn_one() -> None:
    outside = Journal()
    first = granted(outside.applier(), sweep_with(pending(0), **BATCHED), (0, 1), 96)
    assert (first.command[-1], first.environment["HERMES_PARAM_SIZE"]) == ("--size=48", "48")
    assert (first.batch, first.samples, first.config) == (96, 96, {"size": 32})
    assert (first.workers, first.worker_count, first.most_gpus) == ("one_per_gpu", 2, 4)
    ((_, _, config, _),) = outside.of("open")
    assert config == {"size": 32}
    outside.forget()
    over = segment(running=False, ended_s=110.0)
    world = sweep_with(TrialRecords(row(0), first, None, over), **BATCHED)
    again = granted(outside.applier(), world, (0, 1, 2), 256)
    assert (again.epoch, again.command[-1], again.samples) == (2, "--size=85", 255)
    outside.forget()
    own = granted(outside.applier(), world, (3,), None)
    assert (own.command[-1], own.batch, own.samples) == ("--size=32", None, 32)


def test_a_batch_that_a_policy_has_chosen_is_among_the_terms_of_its_decision() -> None:
    outside = Journal()
    granted(outside.applier(), sweep_with(pending(0), **BATCHED), (0, 1), 96)
    (told,) = read_tail(SWEEP)
    assert (told["gpus"], told["terms"]) == ([0, 1], {"batch": 96})


def test_the_run_of_a_trial_that_cannot_be_started_ends_as_failed_in_mlflow() -> None:
    """Of one that waits after a segment, and of one whose first lease was not recorded."""
    outside = Journal()
    applier, world = outside.applier(), sweep_with(waiting(0), pending(1), pending(2))
    begin(applier, world, 1)
    outside.forget()
    for trial in world.trials:
        applier._executor.run(world, [GiveUp(trial, "MLflow refuses its params")], 200.0)
    ended = outside.of("open", "finish")
    assert [call[:2] for call in ended] == [("finish", "run-0"), ("open", 1), ("finish", "run-1")]
    assert {call[2] for call in outside.of("finish")} == {"failed"}

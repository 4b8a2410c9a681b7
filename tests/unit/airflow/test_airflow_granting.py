"""Params of new runs: written when their trials have their leases, and sooner or later all."""

from __future__ import annotations

import pytest

from hermes_ops.airflow.control.apply import Applier
from hermes_ops.airflow.control.books import Book
from hermes_ops.core.model import Gpu, Grant, JobId, Plan, Reason, Snapshot, Start
from hermes_ops.errors import Refused
from tests.unit.airflow.worlds import SWEEP, Journal, book, pending


def begin(applier: Applier, world: Book, number: int) -> None:
    job = JobId(f"{SWEEP}/{number}")
    start = Start(job, (0,), Reason("it has not been seen"))
    snapshot = Snapshot(200.0, (Gpu(0),), tuple(world.jobs(200.0)))
    applier.apply({SWEEP: world}, snapshot, Plan((Grant(job, (0,)),)), (start,), {})


@pytest.mark.parametrize("hands", [1, 4])
def test_the_params_of_a_new_run_are_written_after_its_trials_lease_and_rank(hands: int) -> None:
    outside = Journal()
    applier = outside.applier(hands)
    begin(applier, book(pending(0)), 0)
    assert [c[0] for c in outside.of("open", "put", "rank", "params")] == ["open", "put", "rank"]
    applier.complete(whole=True)
    ((_, _, config, _),) = outside.of("open")
    assert outside.of("params") == [("params", "run-0", config)]
    applier.complete(whole=True)
    assert len(outside.of("params")) == 1


def test_params_that_mlflow_does_not_take_now_are_written_at_the_next_call() -> None:
    outside = Journal()
    applier = outside.applier()
    begin(applier, book(pending(0)), 0)
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
    begin(applier, book(pending(0)), 0)
    outside.refusal = Refused("the script has logged another value", code="INVALID_PARAMETER_VALUE")
    applier.complete()
    outside.refusal = None
    applier.complete()
    assert not outside.of("params")
    assert "The params of the run run-0 are not written" in caplog.text


def test_the_next_controller_writes_the_params_that_a_killed_one_has_left() -> None:
    outside = Journal(opened={5: {"rate": 0.5}, 6: {"rate": 0.6}}, unwritten={5: {"rate": 0.5}})
    applier = outside.applier()
    begin(applier, book(pending(0)), 0)
    applier.complete()
    assert {c[1] for c in outside.of("params")} == {"run-0", "run-5"}

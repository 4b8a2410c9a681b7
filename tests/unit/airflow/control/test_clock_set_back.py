"""A clock that is set back delays nothing that the controller does again and again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.control.cleanup import janitor, state_retention
from hermes_ops.airflow.control.cleanup.janitor import Janitor
from hermes_ops.airflow.control.cleanup.state_retention import StateRetention
from hermes_ops.airflow.control.faults import SERVICE_PATIENCE_S, FaultBarrier, Subject
from hermes_ops.core.model import Plan, Snapshot
from hermes_ops.errors import HermesError, Unavailable
from tests.unit.airflow.control.controllers import Database, controller_of

DAY_S = 86_400.0
NOW_S = 30 * DAY_S


def test_a_round_comes_a_second_later_though_the_clock_was_set_back(tmp_path: Path) -> None:
    cluster = controller_of(Database(), tmp_path / "view").cluster
    now_s, waited = NOW_S, 0

    def wait(pause_s: float) -> bool:
        nonlocal now_s, waited
        now_s, waited = now_s + pause_s - (DAY_S if waited == 3 else 0.0), waited + 1
        return waited > 1_000  # as a person would, who sees that nothing happens

    event: Any = SimpleNamespace(wait=wait, clear=list)
    curves: Any = SimpleNamespace(has_news=lambda: False)
    cluster._wake, cluster.curves, cluster.clock = event, curves, lambda: now_s
    cluster.wait(None)
    assert waited < 30


def test_the_view_of_a_large_pool_is_written_again_soon_though_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, uptime_s, written = NOW_S, 50.0, list[float]()

    def publish(*_: Any, **__: Any) -> None:
        nonlocal now_s, uptime_s
        now_s, uptime_s = now_s + 1.0, uptime_s + 1.0  # so many trials has it
        written.append(uptime_s)

    cluster = controller_of(Database(), tmp_path / "view").cluster
    cluster.clock = lambda: now_s
    monkeypatch.setattr("hermes_ops.airflow.control.cluster.publish", publish)
    monkeypatch.setattr("time.monotonic", lambda: uptime_s)
    for _ in range(60):
        cluster._show(Snapshot(now_s, (), ()), Plan(()))
        now_s, uptime_s = now_s + 1.0 - (DAY_S if len(written) == 1 else 0.0), uptime_s + 1.0
    assert len(written) == 4


def test_a_step_that_failed_is_tried_again_though_the_clock_was_set_back() -> None:
    now_s = NOW_S
    barrier, subject = FaultBarrier(clock=lambda: now_s), Subject("digits-1", 3)

    def fail() -> None:
        raise HermesError("boom")

    assert barrier.attempt(subject, "try it", fail) is None
    assert barrier.attempt(subject, "try it", list) is None  # too early
    (fault,) = barrier.faults
    now_s -= DAY_S
    assert fault.is_due(now_s)
    assert barrier.attempt(subject, "try it", list) is not None


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S])
def test_a_step_of_the_clock_neither_shortens_nor_lengthens_the_patience_with_a_service(
    step_s: float,
) -> None:
    now_s, uptime_s, step = NOW_S, 50.0, "write its lease"
    barrier = FaultBarrier(lambda: now_s, lambda: uptime_s)

    def away() -> None:
        raise Unavailable("Airflow did not answer")

    def is_hopeless() -> bool:
        barrier.begin_round()
        barrier.attempt(Subject("digits-1", 3), step, away)
        barrier.attempt(Subject("digits-1", 4), step, barrier.answered)
        barrier.attempt(Subject("digits-2", 0), step, barrier.answered)
        return any(map(barrier.is_hopeless, barrier.faults))

    assert not is_hopeless()
    now_s, uptime_s = now_s + step_s, uptime_s + 10.0
    assert not is_hopeless()
    now_s, uptime_s = now_s + SERVICE_PATIENCE_S, uptime_s + SERVICE_PATIENCE_S
    assert is_hopeless()


@pytest.mark.parametrize("back_s", [0.0, DAY_S])
def test_what_is_cleaned_up_now_and_then_is_so_though_the_clock_was_set_back(
    back_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    monkeypatch.setattr(janitor, "free_expired", lambda *_: looked.append("disk"))

    def expiring(*_: object) -> tuple[Any, ...]:
        looked.append("records")
        return ()

    tables: Any = SimpleNamespace(expiring=expiring)
    own, retention = Janitor(lambda _: False), StateRetention(tables, tables)
    for now_s in (NOW_S, NOW_S + 1.0 - back_s):
        own.run_if_due((), now_s)
        assert own._thread is not None
        own._thread.join()
        retention.run_if_due(now_s)
    assert sorted(looked) == sorted(["disk", "records"] * (2 if back_s else 1))
    assert max(janitor.PERIOD_S, state_retention.PERIOD_S) < DAY_S

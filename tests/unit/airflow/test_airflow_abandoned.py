"""Sweeps whose DAG runs were deleted or marked: what they left open in MLflow is closed."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.control.abandoned import settle_abandoned
from hermes_ops.errors import Unavailable
from tests.unit.airflow.worlds import SWEEP, book


@dataclass
class Services:
    """Airflow and MLflow, with one open and one ended trial; keeps what was ended."""

    run: dict[str, Any] | None = None
    state: str = "running"
    away: bool = False
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def dag_run(self, dag_id: str, run_id: str) -> dict[str, Any] | None:
        assert (dag_id, run_id) == ("hermes_sweep", SWEEP)
        return self.run

    def sweep(self, ref: Any) -> Any:
        if self.away:
            raise Unavailable("MLflow did not answer")
        return SimpleNamespace(state=self.state)

    def trials(self, ref: Any) -> list[Any]:
        return [SimpleNamespace(run_id=f"run-{n}", is_open=n == 0) for n in (0, 1)]

    def finish_trial(self, run_id: str, state: str, tags: dict[str, str]) -> None:
        self.calls.append((run_id, state, tags["hermes.reason"]))

    def finish_sweep(self, run_id: str, state: str, tags: dict[str, str]) -> None:
        self.calls.append((run_id, state, tags["hermes.closed"]))

    def settle(self) -> list[tuple[Any, ...]]:
        own: Any = self
        settle_abandoned(book().plan, own, own)
        return self.calls


@pytest.mark.parametrize(
    ("run", "what"), [(None, "was deleted"), ({"state": "failed"}, "was ended as failed")]
)
def test_what_an_abandoned_sweep_left_open_is_cancelled_and_says_why(
    run: dict[str, Any] | None, what: str
) -> None:
    calls = Services(run).settle()
    assert [(run_id, state) for run_id, state, _ in calls] == [
        ("run-0", "cancelled"),
        ("parent", "cancelled"),
    ]
    assert all(what in reason for _, _, reason in calls)


@pytest.mark.parametrize(
    "services",
    [
        Services({"state": "success"}, "finished"),
        Services(None, "cancelled"),
        Services({"state": "queued"}),
        Services(None, away=True),
    ],
)
def test_a_sweep_with_a_report_one_that_begins_again_and_one_out_of_reach_are_left(
    services: Services,
) -> None:
    assert services.settle() == []

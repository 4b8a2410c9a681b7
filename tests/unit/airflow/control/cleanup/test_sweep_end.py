"""Sweeps that end early: a newer night replaces them, or their DAG run was deleted or marked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.control.cleanup.sweep_end import (
    due_end,
    end_deleted,
    overlapped_sweeps,
    replaced_by_newer,
)
from hermes_ops.airflow.control.sweep_state import SweepSpec, SweepState
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.metadata_rows import RunRow
from hermes_ops.airflow.records import CloseRecord, SweepRecord, encode
from hermes_ops.errors import Unavailable
from tests.unit.airflow.builders import (
    SWEEP,
    Journal,
    pending,
    row,
    running,
    segment,
    sweep_file,
    sweep_with,
    waiting,
)


def night(
    run: str,
    planned_s: float,
    *,
    overlap: str = "replace",
    dag: str = "n",
    resumed_s: float = 0.0,
    **own: Any,
) -> SweepState:
    config = sweep_file(nightly={"overlap": overlap})
    record = SweepRecord(config, 8, "trial", "parent", "7", "digits", planned_s=planned_s,
                         **{"nightly": True, **own})  # fmt: skip
    started_s = resumed_s or planned_s - 0.5
    plan = SweepSpec.from_run(RunRow(1, dag, run, "plan", "running", started_s, encode(record)))
    assert plan is not None
    return SweepState(plan, (running(0, 0),), None)


def test_a_newer_night_ends_the_older_ones_of_its_own_schedule() -> None:
    sweeps = [night("a", 1.0), night("b", 3.0), night("c", 2.0), night("other", 1.0, dag="m")]
    assert [b.spec.run.run_id for b in overlapped_sweeps(sweeps)] == ["a", "c"]


def test_a_night_that_was_due_before_another_one_does_not_replace_it_as_it_is_planned_later() -> (
    None
):
    late, newer = night("a", 9.0, due_s=1.0), night("b", 3.0, due_s=2.0)
    assert [b.spec.run.run_id for b in overlapped_sweeps([late, newer])] == ["a"]


def test_an_older_night_that_was_resumed_runs_until_a_night_that_begins_after_that() -> None:
    resumed, tonight = night("a", 1.0, resumed_s=2.5), night("b", 2.0)
    assert overlapped_sweeps([resumed, tonight]) == ()
    next_night = night("c", 3.0)
    replaced = overlapped_sweeps([resumed, tonight, next_night])
    assert [b.spec.run.run_id for b in replaced] == ["a", "b"]


@pytest.mark.parametrize(
    "own", [{"overlap": "skip"}, {"overlap": "queue"}, {"nightly": False}], ids=str
)
def test_only_nights_that_replace_are_ended(own: Any) -> None:
    assert overlapped_sweeps([night("a", 1.0, **own), night("b", 2.0, **own)]) == ()


def test_a_replaced_sweep_is_closed_once_and_for_its_reader() -> None:
    sweeps = [night("a", 1.0), night("b", 2.0)]
    journal = Journal()
    applier = journal.applier()
    for _ in range(2):
        for own in overlapped_sweeps(sweeps):
            applier.close(own, replaced_by_newer(100.0))
    ((_, _, key, record),) = journal.calls
    assert (key, record["reason"]) == ("hermes_close", "replaced by the next night's sweep")
    assert sweeps[0].close is not None


def test_a_sweep_that_ends_anyway_is_left_to_end() -> None:
    closing = replace(night("a", 1.0), close=CloseRecord("its budget is spent"))
    assert overlapped_sweeps([closing, night("b", 2.0)]) == ()


ENDED, LATER = "2026-11-25T14:00:00Z", "2026-11-25T15:00:00Z"
FAILED = {"state": "failed", "end_date": ENDED}


@dataclass
class Services:
    """Airflow and MLflow, with one open and one ended trial; keeps what was ended."""

    run: dict[str, Any] | None = None
    state: str = "running"
    tags: dict[str, str] = field(default_factory=dict)
    away: bool = False
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def dag_run(self, dag_id: str, run_id: str) -> dict[str, Any] | None:
        assert (dag_id, run_id) == ("hermes_sweep", SWEEP)
        return self.run

    def sweep(self, ref: Any) -> Any:
        if self.away:
            raise Unavailable("MLflow did not answer")
        return SimpleNamespace(state=self.state, tags=self.tags)

    def trials(self, ref: Any) -> list[Any]:
        return [SimpleNamespace(run_id=f"run-{n}", is_open=n == 0) for n in (0, 1)]

    def finish(self, run_id: str, state: str, tags: dict[str, str]) -> None:
        (reason,) = tags.values()
        self.calls.append((run_id, state, reason))

    def settle(self) -> list[tuple[Any, ...]]:
        own: Any = self
        end_deleted(sweep_with().spec, own, own)
        return self.calls


@pytest.mark.parametrize(("run", "what"), [(None, "was deleted"), (FAILED, "was ended as failed")])
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
        Services(FAILED | {"state": "success"}, "finished"),
        Services(None, "cancelled"),
        Services({"state": "queued"}),
        Services(None, away=True),
    ],
)
def test_a_sweep_with_a_report_one_that_begins_again_and_one_out_of_reach_are_left(
    services: Services,
) -> None:
    assert services.settle() == []


def test_a_sweep_that_is_being_resumed_is_not_taken_for_an_abandoned_one() -> None:
    """Its run in MLflow goes on already, the tasks of its DAG run are not cleared yet."""
    continued = {"hermes.continued": ENDED}
    assert Services(FAILED | {"state": "success"}, tags=continued).settle() == []
    ended_again = Services(FAILED | {"end_date": LATER}, tags=continued)
    assert [state for _, state, _ in ended_again.settle()] == ["cancelled", "cancelled"]


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("withheld", [frozenset(), frozenset({0})], ids=len)
def test_gpu_seconds_of_trials_that_wait_count_also_while_their_dag_is_paused(
    paused: bool, withheld: frozenset[int]
) -> None:
    trained = waiting(0)
    assert trained.segment is not None
    trained = replace(trained, segment=replace(trained.segment, service_gpu_s=95.0))
    world = sweep_with(trained, running(1, 1), budget={"gpu_seconds": 100})
    spec = replace(world.spec, run=replace(world.spec.run, paused=paused))
    close = due_end(replace(world, spec=spec, withheld=withheld), 110.0)
    assert close is not None
    assert close.reason == "budget.gpu_seconds (100) is spent"


def given_up(number: int, ended_s: float) -> TrialRecords:
    over = segment(0, running=False, segments=0, ended_s=ended_s, final="failed", reason="boom")
    return TrialRecords(row(number, "failed"), None, None, over)


def test_trials_that_could_not_be_started_do_not_end_a_sweep_again_that_was_resumed() -> None:
    world = sweep_with(*(given_up(n, 110.0) for n in range(3)), *map(pending, range(3, 8)))
    assert due_end(world, 111.0) is not None
    facts = replace(world.spec.facts, submitted_s=200.0)
    resumed = replace(world, spec=replace(world.spec, facts=facts))
    assert due_end(resumed, 201.0) is None
    failed_again = tuple(given_up(n, 202.0) for n in range(3, 6))
    still_open = (*resumed.trials[:3], *failed_again, *map(pending, range(6, 8)))
    close = due_end(replace(resumed, trials=still_open), 203.0)
    assert close is not None
    assert close.reason == "no trial could be started: boom"

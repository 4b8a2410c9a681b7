from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.airflow.control.books import Book, Plan
from hermes_ops.airflow.control.overlap import overtaken, replaced
from hermes_ops.airflow.metadata import RunRow
from hermes_ops.airflow.records import CloseRecord, SweepRecord, encode
from tests.unit.airflow.worlds import Journal, running, sweep_file


def night(
    run: str, planned_s: float, *, overlap: str = "replace", dag: str = "n", **own: Any
) -> Book:
    config = sweep_file(nightly={"overlap": overlap})
    record = SweepRecord(config, 8, "trial", "parent", "7", "digits", planned_s=planned_s,
                         **{"nightly": True, **own})  # fmt: skip
    plan = Plan.of(RunRow(1, dag, run, "plan", "running", 50.0, encode(record)))
    assert plan is not None
    return Book(plan, (running(0, 0),), None)


def test_a_newer_night_ends_the_older_ones_of_its_own_schedule() -> None:
    books = [night("a", 1.0), night("b", 3.0), night("c", 2.0), night("other", 1.0, dag="m")]
    assert [b.plan.run.run_id for b in overtaken(books)] == ["a", "c"]


@pytest.mark.parametrize(
    "own", [{"overlap": "skip"}, {"overlap": "queue"}, {"nightly": False}], ids=str
)
def test_only_nights_that_replace_are_ended(own: Any) -> None:
    assert overtaken([night("a", 1.0, **own), night("b", 2.0, **own)]) == ()


def test_a_replaced_sweep_is_closed_once_and_for_its_reader() -> None:
    books = [night("a", 1.0), night("b", 2.0)]
    journal = Journal()
    applier = journal.applier()
    for _ in range(2):
        for own in overtaken(books):
            applier.close(own, replaced(100.0))
    ((_, _, key, record),) = journal.calls
    assert (key, record["reason"]) == ("hermes_close", "replaced by the next night's sweep")
    assert books[0].close is not None


def test_a_sweep_that_ends_anyway_is_left_to_end() -> None:
    closing = replace(night("a", 1.0), close=CloseRecord("its budget is spent"))
    assert overtaken([closing, night("b", 2.0)]) == ()

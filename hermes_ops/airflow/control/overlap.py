"""Nights that overlap: where the rule is `replace`, a newer sweep ends the older one."""

from __future__ import annotations

from collections.abc import Collection

from hermes_ops.airflow.control.books import Book
from hermes_ops.airflow.records import CloseRecord
from hermes_ops.config.nightly import Overlap


def overtaken(books: Collection[Book]) -> tuple[Book, ...]:
    """The open sweeps of nights whose schedule has a newer sweep under way and replaces by it."""
    newest: dict[str, float] = {}
    for book in books:
        if book.plan.record.nightly:
            dag, planned_s = book.plan.run.dag_id, book.plan.record.planned_s
            newest[dag] = max(planned_s, newest.get(dag, planned_s))
    return tuple(
        book
        for book in books
        if book.plan.record.nightly
        and book.close is None
        and book.plan.config.nightly.overlap is Overlap.REPLACE
        and book.plan.record.planned_s < newest[book.plan.run.dag_id]
    )


def replaced(now_s: float) -> CloseRecord:
    """The end of a sweep that a newer night replaces."""
    return CloseRecord("replaced by the next night's sweep", "cancelled", now_s)

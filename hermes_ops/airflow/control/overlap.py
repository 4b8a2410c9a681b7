"""Nights that overlap: where the rule is `replace`, a newer sweep ends the older one."""

from __future__ import annotations

import logging
from collections.abc import Collection

from hermes_ops.airflow.client import AirflowClient, TaskKey
from hermes_ops.airflow.control.books import Book
from hermes_ops.airflow.records import CLOSE_KEY, CloseRecord, encode
from hermes_ops.config.nightly import Overlap

log = logging.getLogger(__name__)


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


def end_overtaken(books: Collection[Book], client: AirflowClient, now_s: float) -> None:
    """Write down that they end; their trials are told when their books are settled."""
    for book in overtaken(books):
        close = CloseRecord("replaced by the next night's sweep", "cancelled", now_s)
        run = book.plan.run
        client.put_state(TaskKey(run.dag_id, run.run_id, run.plan_task), CLOSE_KEY, encode(close))
        book.close = close
        log.info("Sweep %s ends: %s", book.sweep, close.reason)

"""Several reads by one connection, of which one fails, as PostgreSQL has it."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import InternalError, OperationalError, ProgrammingError, SQLAlchemyError

from hermes_ops.airflow.metadata import Metadata
from hermes_ops.errors import Unavailable

ONE, BROKEN = text("SELECT 1"), text("SELECT 2")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OperationalError("SELECT", {}, Exception("statement timeout")), Unavailable),
        (ProgrammingError("SELECT", {}, Exception("no such column")), SQLAlchemyError),
    ],
)
def test_a_query_that_fails_costs_the_others_of_its_connection_nothing(
    error: SQLAlchemyError, raised: type[Exception]
) -> None:
    """A transaction in which a query has failed answers none until it is rolled back."""
    engine, failed = create_engine("sqlite://"), False

    def check(*given: Any) -> None:
        nonlocal failed
        if failed:
            raise InternalError("SELECT", {}, Exception("current transaction is aborted"))
        if given[2] == BROKEN.text:
            failed = True
            raise error

    def roll_back(_: object) -> None:
        nonlocal failed
        failed = False

    event.listen(engine, "before_cursor_execute", check)
    event.listen(engine, "rollback", roll_back)
    own = Metadata(engine)
    with own.single_connection():
        assert own._all(ONE) == [(1,)]
        with pytest.raises(raised):
            own._all(BROKEN)
        assert own._all(ONE) == [(1,)]
    engine.dispose()

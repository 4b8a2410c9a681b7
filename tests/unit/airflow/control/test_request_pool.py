"""Several requests at a time, or one after the other."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from hermes_ops.airflow.control.faults import RequestPool, rejected, resolved, results_of
from hermes_ops.errors import Unavailable

LIMIT_S = 30.0


def test_with_a_concurrency_of_two_calls_are_under_way_at_the_same_time() -> None:
    meeting = threading.Barrier(2)
    requests = RequestPool(2)
    met = [requests.submit(meeting.wait, LIMIT_S) for _ in range(2)]
    assert sorted(found.result(LIMIT_S) for found in met) == [0, 1]


def test_with_a_concurrency_of_one_a_call_is_over_when_it_has_begun() -> None:
    order: list[int] = []
    requests = RequestPool(1)
    begun = [requests.submit(order.append, number) for number in range(3)]
    assert order == [0, 1, 2]
    assert all(future.done() for future in begun)


def test_a_concurrency_of_one_in_the_background_lets_its_caller_go_on_and_keeps_the_order() -> None:
    requests, may_end, order = RequestPool(1, in_background=True), threading.Event(), list[int]()
    first = requests.submit(may_end.wait, LIMIT_S)
    second = requests.submit(order.append, 2)
    assert not first.done()
    assert not second.done()
    may_end.set()
    assert results_of([first]) == [True]
    results_of([second])
    assert order == [2]


@pytest.mark.parametrize("concurrency", [1, 2])
def test_an_error_comes_to_whoever_asks_for_the_answer(concurrency: int) -> None:
    def away() -> None:
        raise Unavailable("it did not answer")

    begun = RequestPool(concurrency).submit(away)
    with pytest.raises(Unavailable, match="did not answer"):
        begun.result(LIMIT_S)


def test_the_answers_are_there_once_every_call_is_over_even_where_one_has_failed() -> None:
    over: list[int] = []
    requests, may_end = RequestPool(2), threading.Event()

    def late() -> None:
        may_end.wait(LIMIT_S)
        over.append(1)

    begun: list[Future[Any]] = [requests.submit(int, "no number"), requests.submit(late)]
    may_end.set()
    with pytest.raises(ValueError, match="no number"):
        results_of(begun)
    assert over == [1]
    assert results_of([requests.submit(int, text) for text in "321"]) == [3, 2, 1]


def test_what_is_known_or_has_failed_needs_no_call() -> None:
    assert resolved(3).result(0.0) == 3
    with pytest.raises(Unavailable):
        rejected(Unavailable("away")).result(0.0)

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from hermes_ops.errors import StackError
from hermes_ops.stack.airflow_service import set_pool


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr("hermes_ops.retry.time.sleep", found.append)
    return found


def client_of(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(base_url="http://airflow", transport=httpx.MockTransport(answer))


def test_a_pool_is_set_although_its_database_was_locked_for_a_moment() -> None:
    codes = iter([500, 200])
    set_pool(client_of(lambda _: httpx.Response(next(codes))), "gpus", 3)
    assert next(codes, None) is None


def test_a_pool_that_is_not_there_is_made() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.method)
        return httpx.Response(404 if request.method == "PATCH" else 201)

    set_pool(client_of(answer), "gpus", 3)
    assert asked == ["PATCH", "POST"]


def test_a_pool_that_another_request_has_made_meanwhile_is_set() -> None:
    codes = iter([404, 500, 409, 200])
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.method)
        return httpx.Response(next(codes))

    set_pool(client_of(answer), "gpus", 3)
    assert asked == ["PATCH", "POST", "POST", "PATCH"]


def test_a_database_that_stays_locked_is_told_with_the_pool(pauses: list[float]) -> None:
    with pytest.raises(StackError, match="The pool gpus could not be set to 3 slots: locked"):
        set_pool(client_of(lambda _: httpx.Response(500, text="locked")), "gpus", 3)
    assert len(pauses) == 8
    assert sum(pauses) < 13

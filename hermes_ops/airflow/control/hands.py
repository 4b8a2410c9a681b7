"""Requests to the servers around the controller, several at a time where they take that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

AT_ONCE = 4
"""Requests at the same time; with SQLite one, as its writers would only wait for each other."""


@dataclass(slots=True)
class Hands:
    """Makes calls at the same time; with one hand each is over before the next one begins."""

    at_once: int = 1
    in_background: bool = False
    """With one hand: whether whoever begins a call goes on meanwhile."""
    _pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.at_once, thread_name_prefix="hands")

    def begin(self, call: Callable[P, T], *args: P.args, **named: P.kwargs) -> Future[T]:
        """Make the call; its answer or its error is the future's. A call must not begin others."""
        if self.at_once > 1 or self.in_background:
            return self._pool.submit(call, *args, **named)
        try:
            return known(call(*args, **named))
        except Exception as error:  # whoever asks for the answer gets it
            return failed(error)


def answers(begun: Sequence[Future[T]]) -> list[T]:
    """The answers of all, once each call is over; the first error of any."""
    wait(begun)
    return [call.result() for call in begun]


def known(answer: T) -> Future[T]:
    """The answer of a call that need not be made."""
    found: Future[T] = Future()
    found.set_result(answer)
    return found


def failed(error: Exception) -> Future[Any]:
    """The error of a call that has been made or cannot be."""
    found: Future[Any] = Future()
    found.set_exception(error)
    return found

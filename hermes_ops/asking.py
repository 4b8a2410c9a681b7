"""Asking a server again that may answer otherwise: Airflow on SQLite."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx

TRIES = 5

FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSES = 0.2, 8.0, 10


def ask(send: Callable[[], httpx.Response], tries: int = TRIES) -> httpx.Response:
    """What `send` is answered, after a 500 once more: on SQLite, Airflow's writers meet.

    One of them is refused then, at once or after the second that it waits for the lock.
    """
    for _ in range(tries - 1):
        answer = send()
        if answer.status_code != httpx.codes.INTERNAL_SERVER_ERROR:
            return answer
    return send()


def backoff_s(chance: Callable[[], float]) -> Iterator[float]:
    """Yield pauses that double, each by chance between half of it and the whole.

    So those that met once do not meet again. `chance` draws from 0 to 1.
    """
    for turn in range(PAUSES):
        yield min(FIRST_PAUSE_S * 2**turn, LONGEST_PAUSE_S) * (0.5 + 0.5 * chance())

"""Asking a server again that may answer otherwise: Airflow on SQLite."""

from __future__ import annotations

from collections.abc import Callable

import httpx

TRIES = 5


def ask(send: Callable[[], httpx.Response], tries: int = TRIES) -> httpx.Response:
    """What `send` is answered, after a 500 once more: on SQLite, Airflow's writers meet.

    One of them is refused then, at once or after the second that it waits for the lock.
    """
    for _ in range(tries - 1):
        answer = send()
        if answer.status_code != httpx.codes.INTERNAL_SERVER_ERROR:
            return answer
    return send()

"""Retries of requests to a busy server: Airflow on SQLite, whose writers lock each other out."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator

import httpx

BUSY = frozenset({500, 502, 503, 504})
"""Status codes after which a request is sent again: 500 is what a locked database leads to."""

BUSY_OR_CONFLICT = BUSY | {409}
"""The same for requests that may be repeated safely: 409 if two writers made one row."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 8.0
FEW, MANY = 2, 8
"""Numbers of pauses: of a caller with other work, and of one that waits for this alone (13 s)."""

START_PAUSE_S, START_PAUSES = 0.2, 20
"""Pauses for the start of a run, for which a person waits: up to two minutes in addition to the
requests themselves."""


def send_with_retry(
    send: Callable[[], httpx.Response],
    pauses_s: Iterable[float],
    *,
    busy: Collection[int] = BUSY,
    sleep: Callable[[float], None] | None = None,
    is_done: Callable[[], bool] | None = None,
) -> httpx.Response | None:
    """Return the response, sending again after each pause while the server is busy.

    `is_done`: for a request that must not take effect twice. It is called after a pause; if it
    returns True, the failed request has taken effect, and None is returned.
    """
    response = send()
    for pause_s in pauses_s:
        if response.status_code not in busy:
            return response
        (sleep or time.sleep)(pause_s)
        if is_done is not None and is_done():
            return None
        response = send()
    return response


def backoff_s(
    chance: Callable[[], float], pauses: int, first_s: float = FIRST_PAUSE_S
) -> Iterator[float]:
    """Yield pauses that double, with jitter: each is drawn between half of it and the whole.

    The jitter keeps clients that collided once from colliding again. `chance` draws from 0 to 1.
    """
    for turn in range(pauses):
        yield min(first_s * 2**turn, LONGEST_PAUSE_S) * (0.5 + 0.5 * chance())

"""The store of a trial's group, asked from another process or node."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable
from typing import TypeVar

REQUEST_S = 5.0
_TRIES = 5
_PAUSE_S = 0.5
_T = TypeVar("_T")


class StoreClient:
    """Read and write values of the store at `HOST:PORT`; a connection for each request.

    The host's name is resolved once. Raises: OSError without an answer.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host, int(port)
        self._resolved = ""

    def get(self, scope: str, key: str) -> bytes | None:
        """Return a value; None if there is none."""
        status, value = self._ask("GET", scope, key)
        return value if status == http.client.OK else None

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Store a value."""
        status, _ = self._ask("PUT", scope, key, value)
        if status != http.client.OK:
            raise OSError(f"the store answers {status}")

    def _ask(self, method: str, scope: str, key: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._address(), self._port, timeout=REQUEST_S)
        try:
            connection.request(method, f"/{scope}/{key}", body if method == "PUT" else None)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except http.client.HTTPException as error:
            raise OSError(f"the store does not answer: {error}") from error
        finally:
            connection.close()

    def _address(self) -> str:
        if not self._resolved:
            addresses = socket.getaddrinfo(
                self._host, self._port, socket.AF_INET, socket.SOCK_STREAM
            )
            self._resolved = str(addresses[0][4][0])
        return self._resolved


def insist(ask: Callable[[], _T], sleep: Callable[[float], None] = time.sleep) -> _T:
    """Return the answer of `ask`, which is tried five times with pauses in between.

    A refused connection fails at once: without a pause all tries would be over in a moment.
    Raises: OSError without an answer to the last one.
    """
    for _ in range(_TRIES - 1):
        try:
            return ask()
        except OSError:
            sleep(_PAUSE_S)
    return ask()

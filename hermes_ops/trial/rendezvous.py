"""The key-value store by which the workers of a trial find each other: Horovod's rendezvous.

Horovod with Gloo asks an HTTP server for it: PUT stores a value at `/SCOPE/KEY`, GET returns it or
404, DELETE `/SCOPE/RANK` says that a worker has found the others of that scope. Horovod fixes the
paths and sends no secret, so the server listens on the loopback interface alone; where a trial is
on several nodes, on all interfaces of its pod, which network policies close to other trials. Each
segment has a store of its own: keys of an earlier group would lead to workers that have gone.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

LOOPBACK, HOSTNAME = "127.0.0.1", "localhost"
MOST_PATH_CHARACTERS = 1024
MOST_VALUE_BYTES = 1_048_576
MOST_STORED_BYTES = 64 * 1_048_576
_MOST_REQUESTS = 64  # at the same time
_REQUEST_S = 10.0  # a client that sends nothing for so long is left
_LOOK_S = 0.2
_MOST_DISCARDED_BYTES, _DISCARDED_AT_ONCE_BYTES = 4 * MOST_VALUE_BYTES, 65_536


def group_scopes(size: int) -> dict[str, int]:
    """Return how many workers meet in each scope of a group on one machine."""
    return {"global": size, f"local_{HOSTNAME}": size, **{f"cross_{n}": 1 for n in range(size)}}


class KeyValueStore:
    """Values by scope and key, bounded in their size; safe to use from several threads.

    `sizes`: how many workers meet in a scope. Such a scope keeps its values until all of them are
    done with it, and is then empty for their next meeting. In any other scope a key is removed by
    itself.
    """

    def __init__(
        self, sizes: Mapping[str, int], most_stored_bytes: int = MOST_STORED_BYTES
    ) -> None:
        self._sizes = dict(sizes)
        self._values: dict[str, dict[str, bytes]] = {}
        self._done: dict[str, set[str]] = {}
        self._most_stored_bytes = most_stored_bytes
        self._lock = threading.Lock()
        self.stored_bytes = 0  # of all scopes, keys and values

    def get(self, scope: str, key: str) -> bytes | None:
        """Return the value; None if there is none."""
        with self._lock:
            return self._values.get(scope, {}).get(key)

    def put(self, scope: str, key: str, value: bytes) -> bool:
        """Store a value, replacing an earlier one; return False, unchanged, if there is no room."""
        with self._lock:
            values = self._values.get(scope, {})
            added = len(value) - len(values[key]) if key in values else _size(scope, key, value)
            if self.stored_bytes + added > self._most_stored_bytes:
                return False
            self._values.setdefault(scope, values)[key] = value
            self.stored_bytes += added
            return True

    def finish(self, scope: str, key: str) -> None:
        """Take note that the worker of that rank (`key`) is done with the scope."""
        with self._lock:
            if scope not in self._sizes:
                self._remove(scope, [key])
                return
            done = self._done.setdefault(scope, set())
            done.add(key)
            if len(done) >= self._sizes[scope]:
                del self._done[scope]
                self._remove(scope, list(self._values.get(scope, ())))

    def _remove(self, scope: str, keys: list[str]) -> None:
        values = self._values.get(scope, {})
        for key in keys:
            if key in values:
                self.stored_bytes -= _size(scope, key, values.pop(key))
        if not values:
            self._values.pop(scope, None)


def _size(scope: str, key: str, value: bytes) -> int:
    return len(scope) + len(key) + len(value)


class RendezvousServer:
    """A store for a group, served until `close`: on a free port of the loopback interface.

    A group on several nodes has its own `scopes` and its own `address`. Raises: OSError if no port
    is free.
    """

    def __init__(
        self,
        size: int,
        scopes: Mapping[str, int] | None = None,
        address: tuple[str, int] = (LOOPBACK, 0),
    ) -> None:
        self.store = KeyValueStore(group_scopes(size) if scopes is None else scopes)
        self._server = _StoreServer(self.store, address)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": _LOOK_S}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop to listen; requests that are being answered are left to themselves."""
        self._server.is_closing = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _StoreServer(socketserver.ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    is_closing = False

    def __init__(self, store: KeyValueStore, address: tuple[str, int]) -> None:
        self.store = store
        self._free = threading.BoundedSemaphore(_MOST_REQUESTS)
        super().__init__(address, _StoreRequest)

    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOSTNAME, int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Answer in a thread, once fewer than the most are being answered; not at the end."""
        while not self._free.acquire(timeout=_LOOK_S):
            if self.is_closing:
                self.shutdown_request(request)
                return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Answer one request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Say nothing: a worker that was killed breaks its connections."""


class _StoreRequest(BaseHTTPRequestHandler):
    server: _StoreServer
    timeout = _REQUEST_S

    def do_GET(self) -> None:
        """Return a value, or 404."""
        place = self._place()
        if place is None:
            return
        value = self.server.store.get(*place)
        self._answer(HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK, value or b"")

    def do_PUT(self) -> None:
        """Store a value, which the request's Content-Length announces."""
        place = self._place()
        if place is None:
            return
        text = self.headers.get("Content-Length", "")
        if not text.isdecimal():
            self._refuse(HTTPStatus.LENGTH_REQUIRED)
            return
        if len(text) > len(str(MOST_VALUE_BYTES)) or int(text) > MOST_VALUE_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        value = self.rfile.read(int(text))
        if len(value) < int(text):  # the client has gone
            return
        is_stored = self.server.store.put(*place, value)
        self._answer(HTTPStatus.OK if is_stored else HTTPStatus.INSUFFICIENT_STORAGE)

    def do_DELETE(self) -> None:
        """Take note that a worker is done with a scope."""
        place = self._place()
        if place is not None:
            self.server.store.finish(*place)
            self._answer(HTTPStatus.OK)

    def _place(self) -> tuple[str, str] | None:
        """Return scope and key; None after the answer that there are none."""
        root, scope, key = [*self.path.split("/", 2), "", ""][:3]
        if root or not scope or not key or len(self.path) > MOST_PATH_CHARACTERS:
            self._refuse(HTTPStatus.BAD_REQUEST)
            return None
        return scope, key

    def _refuse(self, status: HTTPStatus) -> None:
        """Answer, then read on: closed at once, a client that still sends would see no answer."""
        self._answer(status)
        self.connection.shutdown(socket.SHUT_WR)
        left = _MOST_DISCARDED_BYTES
        while left > 0 and (discarded := self.rfile.read1(min(left, _DISCARDED_AT_ONCE_BYTES))):
            left -= len(discarded)

    def _answer(self, status: HTTPStatus, value: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: ANN401
        """Log nothing."""

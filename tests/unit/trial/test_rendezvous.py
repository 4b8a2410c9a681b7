"""The store by which workers find each other: its laws, and its HTTP."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hermes_ops.trial.rendezvous import (
    LOOPBACK,
    MOST_PATH_CHARACTERS,
    MOST_VALUE_BYTES,
    KeyValueStore,
    RendezvousServer,
    group_scopes,
)

SIZE, ROOM_BYTES = 3, 60
SCOPES, KEYS = st.sampled_from(["global", "cross_0", "other"]), st.sampled_from(["0", "1", "2"])


class Store(RuleBasedStateMachine):
    """The store against a plain dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.store = KeyValueStore(group_scopes(SIZE), ROOM_BYTES)
        self.model: dict[tuple[str, str], bytes] = {}
        self.done: set[str] = set()

    @rule(scope=SCOPES, key=KEYS, value=st.binary(max_size=20))
    def put(self, scope: str, key: str, value: bytes) -> None:
        wanted = {**self.model, (scope, key): value}
        is_stored = self.store.put(scope, key, value)
        assert is_stored == (_bytes(wanted) <= ROOM_BYTES)
        if is_stored:
            self.model = wanted

    @rule(key=KEYS)
    def finish_global(self, key: str) -> None:
        self.store.finish("global", key)
        self.done.add(key)
        if len(self.done) == SIZE:
            self.done = set()
            self._drop("global", {"0", "1", "2"})

    @rule(key=KEYS)
    def finish_alone(self, key: str) -> None:
        self.store.finish("cross_0", key)
        self._drop("cross_0", {"0", "1", "2"})

    @rule(key=KEYS)
    def finish_another(self, key: str) -> None:
        self.store.finish("other", key)
        self._drop("other", {key})

    def _drop(self, scope: str, keys: set[str]) -> None:
        self.model = {p: v for p, v in self.model.items() if p[0] != scope or p[1] not in keys}

    @invariant()
    def holds_what_was_put(self) -> None:
        assert self.store.stored_bytes == _bytes(self.model) <= ROOM_BYTES
        for scope in ("global", "cross_0", "other"):
            for key in ("0", "1", "2"):
                assert self.store.get(scope, key) == self.model.get((scope, key))


def _bytes(values: dict[tuple[str, str], bytes]) -> int:
    return sum(len(scope) + len(key) + len(value) for (scope, key), value in values.items())


TestTheStoreHoldsWhatWasPut = Store.TestCase


@given(st.integers(1, 64))
def test_every_scope_of_a_group_on_one_machine_has_its_size(size: int) -> None:
    scopes = group_scopes(size)
    assert scopes["global"] == scopes["local_localhost"] == size
    assert [scopes[f"cross_{rank}"] for rank in range(size)] == [1] * size


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = RendezvousServer(2)
    yield server
    server.close()


def ask(
    server: RendezvousServer, method: str, path: str, body: bytes | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(LOOPBACK, server.port, timeout=30)
    connection.request(method, path, body)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_a_value_is_404_until_it_is_put_and_gone_once_all_workers_are_done(
    server: RendezvousServer,
) -> None:
    assert ask(server, "GET", "/global/0") == (404, b"")
    assert ask(server, "PUT", "/global/0", b"\0here\n") == (200, b"")
    assert ask(server, "GET", "/global/0") == (200, b"\0here\n")
    assert ask(server, "DELETE", "/global/0") == (200, b"")
    assert ask(server, "GET", "/global/0") == (200, b"\0here\n"), "rank 1 may still ask for it"
    assert ask(server, "DELETE", "/global/1") == (200, b"")
    assert ask(server, "GET", "/global/0") == (404, b"")


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/", 400),
        ("GET", "/global", 400),
        ("PUT", "//key", 400),
        ("DELETE", "/global/", 400),
        ("GET", "/global/" + "k" * MOST_PATH_CHARACTERS, 400),
        ("POST", "/global/0", 501),
    ],
)
def test_a_request_for_no_place_is_refused(
    server: RendezvousServer, method: str, path: str, code: int
) -> None:
    body = b"v" if method == "PUT" else None
    assert ask(server, method, path, body)[0] == code


@pytest.mark.parametrize(
    ("length", "code"),
    [(str(MOST_VALUE_BYTES + 1), 413), ("9" * 5000, 413), ("-1", 411), ("", 411), ("1e3", 411)],
)
def test_a_value_without_an_acceptable_length_is_refused_unread(
    server: RendezvousServer, length: str, code: int
) -> None:
    with socket.create_connection((LOOPBACK, server.port), 30) as client:
        client.sendall(f"PUT /global/0 HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode())
        assert f" {code} ".encode() in client.recv(4096)
    assert ask(server, "GET", "/global/0")[0] == 404


def test_a_client_that_breaks_off_stores_nothing_and_stops_nobody(server: RendezvousServer) -> None:
    with socket.create_connection((LOOPBACK, server.port), 30) as client:
        client.sendall(b"PUT /global/0 HTTP/1.1\r\nContent-Length: 5\r\n\r\nab")
        client.shutdown(socket.SHUT_WR)
        assert client.recv(4096) == b""
    assert ask(server, "GET", "/global/0")[0] == 404


def test_a_store_without_room_says_so_and_keeps_what_it_has(server: RendezvousServer) -> None:
    value = b"x" * MOST_VALUE_BYTES
    codes = [ask(server, "PUT", f"/global/{n}", value)[0] for n in range(65)]
    assert set(codes[:63]) == {200}
    assert codes[-1] == 507
    assert ask(server, "GET", "/global/0") == (200, value)


def test_many_workers_at_once_find_all_the_others(server: RendezvousServer) -> None:
    found: dict[int, list[bytes]] = {}

    def meet(rank: int) -> None:
        ask(server, "PUT", f"/local_localhost/{rank}", b"%d" % rank)
        others = []
        for other in range(16):
            while (answer := ask(server, "GET", f"/local_localhost/{other}"))[0] == 404:
                pass
            others.append(answer[1])
        found[rank] = others

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {rank: [b"%d" % n for n in range(16)] for rank in range(16)}


class NoRoom:
    """The place of a semaphore while as many requests as may be are being answered."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()

    def acquire(self, timeout: float | None = None) -> bool:
        self.is_asked.set()
        return threading.Event().wait(timeout)


def test_clients_that_never_finish_their_requests_do_not_keep_it_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = NoRoom()
    with monkeypatch.context() as patch:
        patch.setattr(threading, "BoundedSemaphore", lambda _: room)
        server = RendezvousServer(2)
    ending = threading.Thread(target=server.close, daemon=True)
    with socket.create_connection((LOOPBACK, server.port), 30):
        assert room.is_asked.wait(30)
        ending.start()
        ending.join(30)
        assert not ending.is_alive()


def test_it_listens_on_the_loopback_interface_alone_and_not_after_its_end() -> None:
    server = RendezvousServer(2)
    line = f"0100007F:{server.port:04X}"
    with open("/proc/net/tcp", encoding="ascii") as stream:
        listening = [row.split()[1] for row in stream if row.split()[3] == "0A"]
    assert line in listening
    assert f"00000000:{server.port:04X}" not in listening
    server.close()
    with (
        pytest.raises(ConnectionRefusedError),
        socket.create_connection((LOOPBACK, server.port), 30),
    ):
        pass

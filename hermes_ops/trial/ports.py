"""Ports of this machine that the workers of a trial may listen on.

A port is chosen before the worker listens on it. So that nobody else has it by then, it lies
outside the range from which the kernel takes ports of outgoing connections, and a socket of an
abstract name, which the kernel removes with its process, keeps other trials from choosing it.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Callable

_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
_FIRST, _END = 10_000, 32_768
_MOST_TRIES = 2000
_RANDOM = random.SystemRandom()


class ReservedPort:
    """A port that no other trial on this machine (in this network namespace) takes."""

    def __init__(self, number: int, mark: socket.socket) -> None:
        self.number = number
        self._mark = mark

    def release(self) -> None:
        """Let others have it."""
        self._mark.close()


def reserve_ports(
    count: int, draw: Callable[[int, int], int] = _RANDOM.randrange
) -> list[ReservedPort]:
    """Reserve free ports on the loopback interface; `draw(first, end)` proposes a number.

    Raises: OSError if there are not as many.
    """
    first, end = port_range(_read_range())
    ports: list[ReservedPort] = []
    for _ in range(_MOST_TRIES):
        if len(ports) == count:
            return ports
        port = _reserve(draw(first, end))
        if port is not None:
            ports.append(port)
    for port in ports:
        port.release()
    raise OSError(errno.EADDRINUSE, f"no {count} ports between {first} and {end} are free")


def port_range(outgoing: str) -> tuple[int, int]:
    """Return the first port to choose, and the one after the last.

    `outgoing`: two numbers, the range that the kernel takes for outgoing connections.
    """
    low = _END
    with contextlib.suppress(ValueError, IndexError):
        low = int(outgoing.split(maxsplit=1)[0])
    return (_FIRST, min(low, _END)) if low >= _FIRST + _MOST_TRIES else (_FIRST, _END)


def _read_range() -> str:
    try:
        with open(_RANGE, encoding="ascii") as stream:
            return stream.read()
    except OSError:
        return ""


def _reserve(number: int) -> ReservedPort | None:
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0hermes-trial-port-{number}")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", number))
    except OSError:
        mark.close()
        return None
    return ReservedPort(number, mark)

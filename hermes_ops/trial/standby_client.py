"""hermes-trial's side of the standby keeper: ask for an interpreter, tell what was imported."""

from __future__ import annotations

import array
import contextlib
import json
import os
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hermes_ops.trial.outcome import PREEMPTED
from hermes_ops.trial.process_tree import kill, process_of

READY, READY_TEMPLATE, STARTED = b"r", b"t", b"s"  # what an interpreter tells its keeper
_CONNECT_S = 0.5
_ANSWER_S = 3.0


class Order(NamedTuple):
    """What a standby interpreter is to become: `python script arguments` in a folder."""

    python: str
    script: str
    arguments: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    copied_from: str | None = None  # where the script lies of which this is a trial's own copy

    def document(self, kind: str) -> dict[str, Any]:
        """The JSON of a message of that kind."""
        return {
            "kind": kind,
            "python": self.python,
            "script": self.script,
            "arguments": list(self.arguments),
            "directory": self.directory,
            "copied_from": self.copied_from,
            "environment": dict(self.environment),
        }


def order(
    command: Sequence[str],
    directory: str | None,
    copied_from: str | None,
    environment: Mapping[str, str],
) -> Order | None:
    """The order for a command of the form `python script.py ...`; None for any other."""
    python = shutil.which(command[0], path=environment.get("PATH"))
    is_python = os.path.basename(command[0]).startswith("python")
    if python is None or not is_python or len(command) < 2 or not command[1].endswith(".py"):
        return None
    place = os.path.abspath(directory or os.getcwd())
    arguments, found = tuple(command[2:]), os.path.abspath(python)
    return Order(found, command[1], arguments, place, dict(environment), copied_from)


class StandbyChild:
    """A script in what was a standby interpreter; the keeper is its parent and reports its end."""

    def __init__(self, pid: int, output: int, keeper: socket.socket) -> None:
        self.pid = pid
        self.output = output
        self._keeper = keeper
        self._received = b""
        self._code: int | None = None
        self._process = process_of(pid)
        keeper.setblocking(False)

    def poll(self) -> int | None:
        """The exit code, None while it lives; as preempted if it has died with the keeper."""
        while self._code is None:
            try:
                data = self._keeper.recv(4096)
            except BlockingIOError:
                return None
            except OSError:
                data = b""
            self._received += data
            if b"\n" in self._received:
                self._code = int(json.loads(self._received.split(b"\n")[0])["exit"])
            elif not data:
                self._code = PREEMPTED
        return self._code

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        if self._process is not None:
            kill(self._process, number)

    def kill(self) -> None:
        """Send SIGKILL to the process; its reaper then ends all that it has started."""
        self.signal(signal.SIGKILL)


def take(path: Path, wanted: Order) -> StandbyChild | None:
    """Let a standby interpreter run the script; None if there is none or anything goes wrong."""
    keeper = socket.socket(socket.AF_UNIX)
    reader = writer = -1
    try:
        keeper.settimeout(_CONNECT_S)
        keeper.connect(str(path))
        keeper.settimeout(_ANSWER_S)
        reader, writer = os.pipe2(os.O_CLOEXEC)
        send(keeper, wanted.document("start"), [writer])
        answer = json.loads(_line(keeper))
        if answer.get("pid"):
            return StandbyChild(int(answer["pid"]), os.dup(reader), keeper)
    except (OSError, ValueError):
        pass
    finally:
        for handle in (reader, writer):
            if handle >= 0:
                os.close(handle)
    keeper.close()
    return None


def learn(path: Path, wanted: Order, imports: Sequence[str]) -> None:
    """Tell the keeper what such a script imports, so that the next one finds it done."""
    message = dict(wanted.document("learn"), imports=sorted(imports))
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as keeper:
        keeper.settimeout(_CONNECT_S)
        keeper.connect(str(path))
        send(keeper, message, [])


def send(target: socket.socket, message: Mapping[str, Any], handles: Sequence[int]) -> None:
    """Send a message: its length in a line, with file descriptors, then its JSON."""
    data = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", handles))] if handles else []
    target.sendmsg([b"%16d" % len(data)], rights)
    target.sendall(data)


def receive(source: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive what `send` has sent; OSError if the other side has gone."""
    size = socket.CMSG_SPACE(4 * 4)
    head, ancillary, _, _ = source.recvmsg(16, size)
    handles: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            handles.extend(numbers)
    if len(head) < 16:
        raise OSError("the other side has gone")
    left, parts = int(head), []
    while left:
        part = source.recv(min(left, 65536))
        if not part:
            raise OSError("the other side has gone")
        parts.append(part)
        left -= len(part)
    return json.loads(b"".join(parts)), handles


def _line(source: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = source.recv(1)
        if not part:
            raise OSError("the keeper has gone")
        line += part
    return line

"""hermes-trial's side of the standby server: an interpreter, what was imported, how it ended.

The exit code of a script comes on a socket from the process that waits for it.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hermes_ops.trial.outcome import PREEMPTED
from hermes_ops.trial.processes.stop_signal import StopSignal
from hermes_ops.trial.processes.tree import kill, process_of

READY, READY_TEMPLATE, STARTED = b"r", b"t", b"s"  # what an interpreter tells its server
_CONNECT_S = 0.5
_ANSWER_S = 3.0


class StandbyOrder(NamedTuple):
    """The program that a standby interpreter becomes: `python script arguments` in a folder."""

    python: str
    script: str
    arguments: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    copied_from: str | None = None  # where the script lies of which this is a trial's own copy

    def document(self, kind: str) -> dict[str, Any]:
        """Return the JSON of a message of that kind."""
        return {
            "kind": kind,
            "python": self.python,
            "script": self.script,
            "arguments": list(self.arguments),
            "directory": self.directory,
            "copied_from": self.copied_from,
            "environment": dict(self.environment),
        }


def standby_order(
    command: Sequence[str],
    directory: str | None,
    copied_from: str | None,
    environment: Mapping[str, str],
) -> StandbyOrder | None:
    """Return the order for a command of the form `python script.py ...`; None for any other."""
    python = shutil.which(command[0], path=environment.get("PATH"))
    is_python = os.path.basename(command[0]).startswith("python")
    if python is None or not is_python or len(command) < 2 or not command[1].endswith(".py"):
        return None
    place = os.path.abspath(directory or os.getcwd())
    arguments, interpreter = tuple(command[2:]), os.path.abspath(python)
    return StandbyOrder(interpreter, command[1], arguments, place, dict(environment), copied_from)


class StandbyChild:
    """A script in what was a standby interpreter; the server is its parent and reports its end."""

    def __init__(self, pid: int, output: int, server: socket.socket) -> None:
        self.pid = pid
        self.output = output
        self._exit = ExitReport(server)
        self._process = process_of(pid)
        self._stop_signal = StopSignal(self._process)

    def poll(self) -> int | None:
        """Return the exit code, None while it lives; as preempted if the server has gone."""
        self._stop_signal.pass_on()
        return self._exit.poll()

    @property
    def ended_s(self) -> float:
        """Return when it ended, on the monotonic clock."""
        return self._exit.ended_s()

    def stop(self) -> None:
        """Send SIGTERM to the process; where it only waits, first to what it runs."""
        self._stop_signal.send()

    def expect_stop(self) -> None:
        """Prepare for a stop that it learns of by other means: hold it where it only waits."""
        self._stop_signal.expect()

    def kill(self) -> None:
        """Send SIGKILL to the process; its reaper then ends all that it has started."""
        if self._process is not None:
            kill(self._process)


def start_standby(path: Path, wanted: StandbyOrder) -> StandbyChild | None:
    """Let a standby interpreter run the script; None if there is none or anything goes wrong."""
    server = socket.socket(socket.AF_UNIX)
    reader = writer = -1
    try:
        server.settimeout(_CONNECT_S)
        server.connect(str(path))
        server.settimeout(_ANSWER_S)
        reader, writer = os.pipe2(os.O_CLOEXEC)
        send(server, wanted.document("start"), [writer])
        answer = json.loads(_line(server))
        if answer.get("pid"):
            return StandbyChild(int(answer["pid"]), os.dup(reader), server)
    except (OSError, ValueError):
        pass
    finally:
        for handle in (reader, writer):
            if handle >= 0:
                os.close(handle)
    server.close()
    return None


def report_imports(path: Path, wanted: StandbyOrder, imports: Sequence[str]) -> None:
    """Tell the server what such a script imports, so that the next one finds it done."""
    message = dict(wanted.document("learn"), imports=sorted(imports))
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:
        server.settimeout(_CONNECT_S)
        server.connect(str(path))
        send(server, message, [])


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
            raise OSError("the server has gone")
        line += part
    return line


LOST = PREEMPTED  # the script's end is not known: whoever would report it was killed


class ExitReport:
    """Receive exit codes, each once, without waiting for them."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self._received = b""
        self._reports: dict[int, ScriptExit] = {}
        self.is_lost = False  # the other side has gone without reporting all of them

    def poll(self, pid: int = 0) -> int | None:
        """Return the exit code (negative: killed by that signal), None while the script lives.

        `pid`: which one of several scripts. As preempted if the other side has gone.
        """
        while pid not in self._reports and not self.is_lost:
            try:
                self._source.setblocking(False)
                data = self._source.recv(4096)
            except BlockingIOError:
                return None
            except OSError:
                data = b""
            *lines, self._received = (self._received + data).split(b"\n")
            for line in lines:
                self.set_report(json.loads(line))
            self.is_lost = not data
        return self._reports[pid].code if pid in self._reports else LOST

    def ended_s(self, pid: int = 0) -> float:
        """Return when the script ended, on the monotonic clock; now, if nobody has seen that."""
        return self._reports[pid].ended_s if pid in self._reports else time.monotonic()

    def set_report(self, document: dict[str, object]) -> None:
        """Take in a report that has arrived instead of another answer."""
        ended_s = float(str(document.get("ended_s") or time.monotonic()))
        pid = int(str(document.get("pid") or 0))
        self._reports[pid] = ScriptExit(int(str(document["exit"])), ended_s)


class ScriptExit(NamedTuple):
    """The exit code of a script, and when it ended on the monotonic clock."""

    code: int
    ended_s: float


def exit_report(code: int, pid: int = 0, ended_s: float | None = None) -> bytes:
    """Return what is sent once a script has ended; `pid`: which one, of several."""
    report = {"exit": code, "pid": pid, "ended_s": ended_s or time.monotonic()}
    return json.dumps(report).encode() + b"\n"

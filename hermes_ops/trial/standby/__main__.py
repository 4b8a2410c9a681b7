"""The server of standby interpreters: one a machine, on a socket that only its user can open.

The start of Python and the framework is the greater part of a switch. The server holds interpreters
that have imported what such scripts imported before, and hands them out. It has at most `slots`
of them in all, of the kind that was asked for last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_ops.trial.hook import import_variables, without_temporary_folder
from hermes_ops.trial.processes.reaper import END_S, Reaper, fork_reaper
from hermes_ops.trial.processes.tree import adopt_orphans, end_descendants, ordinary_priority
from hermes_ops.trial.redaction import secret_names
from hermes_ops.trial.standby.client import READY_TEMPLATE, STARTED, exit_report, receive, send

_IDLE_LIMIT_S = 900.0
_REPLENISH_AFTER_S = 1.0
_STARTED_S = 2.0
_LEAVE_S = 20.0
_PRIVATE = ("HERMES_", "MLFLOW_")
_START = "import sys; from hermes_ops.trial.standby.interpreter import main; main(int({}), {!r})"


@dataclass(frozen=True)
class StandbyProfile:
    """Scripts for which the same interpreter will do."""

    python: str
    script: str
    environment: tuple[tuple[str, str], ...]  # what an import may depend on


@dataclass
class StandbyInterpreter:
    """An interpreter that imports, waits, or has become a trial, below its own reaper."""

    reaper: Reaper
    pid: int
    socket: socket.socket  # by which it is ordered; a copy is not
    profile: StandbyProfile
    imports: tuple[str, ...]
    ready_s: float | None = None
    is_template: bool = False  # it can be copied, so that it is never used up


@dataclass
class StandbyServer:
    """The server's state; `serve` is its loop."""

    path: Path
    slots: int
    idle: list[StandbyInterpreter] = field(default_factory=list)
    running: dict[socket.socket, StandbyInterpreter] = field(default_factory=dict)
    imports_by_profile: dict[StandbyProfile, tuple[str, ...]] = field(default_factory=dict)
    last_request: tuple[StandbyProfile, Mapping[str, str]] | None = None
    replenish_at_s: float | None = None
    stopping: bool = False

    def serve(self) -> None:
        """Listen until SIGTERM, then leave when no trial runs in one of our interpreters."""
        self.selector = selectors.DefaultSelector()
        wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self.selector.register(wake, selectors.EVENT_READ, lambda _: os.read(wake, 4096))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        listener = _listen(self.path)
        self.selector.register(listener, selectors.EVENT_READ, self._accept)
        leave_at_s = None
        while not self.stopping or (self.running and time.monotonic() < (leave_at_s or 0)):
            for key, _ in self.selector.select(0.5):
                key.data(key.fileobj)
            self._reap()
            self._replenish()
            if self.stopping and leave_at_s is None:
                leave_at_s = time.monotonic() + _LEAVE_S
                self._drop(list(self.idle))
        self._drop(list(self.idle))
        self.path.unlink(missing_ok=True)

    def _stop(self, *_: object) -> None:
        self.stopping = True

    # -- requests ------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(1.0)
        try:
            message, handles = receive(connection)
        except (OSError, ValueError):
            connection.close()
            return
        try:
            self._answer(connection, message, handles)
        except (OSError, ValueError, KeyError):
            connection.close()
        finally:
            for handle in handles:
                os.close(handle)

    def _answer(
        self, connection: socket.socket, message: dict[str, Any], handles: list[int]
    ) -> None:
        profile = profile_of(message)
        if message["kind"] == "learn":
            self._learn(profile, tuple(message["imports"]), message["environment"])
            connection.close()
            return
        self.last_request = (profile, message["environment"])
        self.replenish_at_s = time.monotonic() + _REPLENISH_AFTER_S
        standby = self._hand_out(profile, message, handles)
        if standby is None:
            connection.sendall(b'{"pid": null}\n')
            connection.close()
            return
        connection.sendall(json.dumps({"pid": standby.pid}).encode() + b"\n")
        self.running[connection] = standby
        self.selector.register(connection, selectors.EVENT_READ, self._trial_gone)

    def _learn(
        self, profile: StandbyProfile, imports: tuple[str, ...], environment: Mapping[str, str]
    ) -> None:
        if self.imports_by_profile.get(profile) != imports:
            self.imports_by_profile[profile] = imports
            self._drop([s for s in self.idle if s.profile == profile])
        self.last_request = (profile, environment)
        if self.replenish_at_s is None:
            self.replenish_at_s = time.monotonic()

    def _hand_out(
        self, profile: StandbyProfile, message: dict[str, Any], handles: list[int]
    ) -> StandbyInterpreter | None:
        """Give a script the interpreter that is furthest: ready, or else still importing.

        One that is still importing takes its order when it is done: it will be sooner than an
        interpreter that begins only now, and the two would slow each other down.
        """
        mine = [s for s in self.idle if s.profile == profile]
        for standby in sorted(mine, key=lambda s: s.ready_s is None):
            if standby.is_template:
                started = _start_fork(standby, message, handles)
            elif standby.ready_s is not None:
                started = _start_ready(standby, message, handles)
            else:
                started = _start_after_imports(standby, message, handles)
            if started is None:
                self._drop([standby])
                continue
            if started is standby:
                self.idle.remove(standby)
                self.selector.unregister(standby.socket)
            return started
        return None

    def _trial_gone(self, connection: socket.socket) -> None:
        """End a trial whose hermes-trial has closed its connection."""
        with contextlib.suppress(OSError):
            if connection.recv(1):
                return
        standby = self.running.get(connection)
        if standby is not None:
            self._forget(connection)
            self._end(standby)

    def _forget(self, connection: socket.socket) -> None:
        self.running.pop(connection, None)
        self.selector.unregister(connection)
        connection.close()

    # -- interpreters --------------------------------------------------------------------------

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        for connection, standby in list(self.running.items()):
            code = standby.reaper.poll()
            if code is not None:
                lost = self.running.pop(connection).reaper.is_lost
                if lost:
                    self._end_strays()
                with contextlib.suppress(OSError):
                    connection.sendall(exit_report(code, ended_s=standby.reaper.ended_s()))
                self._forget(connection)
        now_s = time.monotonic()
        self._drop(
            [
                s
                for s in self.idle
                if s.reaper.poll() is not None
                or (s.ready_s is not None and now_s - s.ready_s > _IDLE_LIMIT_S)
            ]
        )

    def _end_strays(self) -> None:
        """End what is below us and no reaper's: their own one was killed."""
        imports_by_profile = {s.reaper.pid for s in (*self.idle, *self.running.values())}
        end_descendants(os.getpid(), END_S, without=imports_by_profile)

    def _replenish(self) -> None:
        if self.last_request is None or self.replenish_at_s is None or self.stopping:
            return
        if time.monotonic() < self.replenish_at_s:
            return
        self.replenish_at_s = None
        profile, environment = self.last_request
        imports = self.imports_by_profile.get(profile)
        if not imports:
            return
        others = [s for s in self.idle if s.profile != profile]
        mine = [s for s in self.idle if s.profile == profile]
        # The first one tells whether it can be copied: then it is enough.
        enough = self.slots if any(s.ready_s is not None for s in mine) else 1
        missing = 0 if any(s.is_template for s in mine) else max(0, enough - len(mine))
        self._drop(others[: max(0, missing - (self.slots - len(self.idle)))])
        for _ in range(missing):
            self._spawn(profile, imports, environment)

    def _spawn(
        self, profile: StandbyProfile, imports: tuple[str, ...], environment: Mapping[str, str]
    ) -> None:
        ours, theirs = socket.socketpair()
        secret = secret_names(environment)  # it may become a trial of another sweep
        lasting = without_temporary_folder(environment)
        clean = {k: v for k, v in lasting.items() if not k.startswith(_PRIVATE) and k not in secret}
        clean.pop("CUDA_VISIBLE_DEVICES", None)
        reaper = fork_reaper(keep=[theirs.fileno()], subreaper=False)
        command = [profile.python, "-c", _START.format(theirs.fileno(), imports)]
        try:
            pid = reaper.start(command, clean, "/", keep=[theirs.fileno()])
        except OSError:
            reaper.end()
            ours.close()
            self.imports_by_profile.pop(profile, None)
            return
        finally:
            theirs.close()
        standby = StandbyInterpreter(reaper, pid, ours, profile, imports)
        self.idle.append(standby)
        self.selector.register(ours, selectors.EVENT_READ, lambda _: self._ready(standby))

    def _ready(self, standby: StandbyInterpreter) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = standby.socket.recv(1)
        if data:
            standby.ready_s = time.monotonic()
            standby.is_template = data == READY_TEMPLATE
            self.replenish_at_s = standby.ready_s
        elif standby in self.idle:
            self._drop([standby])
            # It cannot import this: do not try again.
            self.imports_by_profile.pop(standby.profile, None)

    def _drop(self, standbys: Sequence[StandbyInterpreter]) -> None:
        for standby in standbys:
            self.idle.remove(standby)
            self.selector.unregister(standby.socket)
            self._end(standby)

    def _end(self, standby: StandbyInterpreter) -> None:
        standby.reaper.end()
        standby.socket.close()
        self._end_strays()


def _start_fork(
    standby: StandbyInterpreter, message: dict[str, Any], handles: list[int]
) -> StandbyInterpreter | None:
    """Return a fork of the template that has become the script; None if it failed."""
    near_end, other = socket.socketpair()
    try:
        standby.socket.settimeout(_STARTED_S)
        send(standby.socket, dict(message, copy=True), [*handles, other.fileno()])
        ids = standby.socket.recv(8)
    except OSError:
        ids = b""
    finally:
        other.close()
    if len(ids) < 8:
        near_end.close()  # a copy that is made all the same ends at that
        return None
    reaper, script = (int.from_bytes(ids[n : n + 4], "little") for n in (0, 4))
    unused = socket.socket(socket.AF_UNIX)
    return StandbyInterpreter(
        Reaper(reaper, near_end), script, unused, standby.profile, standby.imports, time.monotonic()
    )


def _start_ready(
    standby: StandbyInterpreter, message: dict[str, Any], handles: list[int]
) -> StandbyInterpreter | None:
    """Return the interpreter itself once it has become the script."""
    try:
        standby.reaper.adopt(message["environment"])
        standby.socket.settimeout(_STARTED_S)
        send(standby.socket, message, handles)
        return standby if standby.socket.recv(1) == STARTED else None
    except OSError:
        return None


def _start_after_imports(
    standby: StandbyInterpreter, message: dict[str, Any], handles: list[int]
) -> StandbyInterpreter | None:
    """Return the interpreter itself, which becomes the script once its imports are done."""
    if standby.reaper.poll() is not None:
        return None
    ordinary_priority(standby.pid)
    try:
        standby.reaper.adopt(message["environment"])
        standby.socket.settimeout(_STARTED_S)
        send(standby.socket, message, handles)
    except OSError:
        return None
    return standby


def _listen(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}")  # nobody finds it before it listens
    fresh.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(str(fresh))
    finally:
        os.umask(before)
    listener.listen(64)
    fresh.replace(path)
    return listener


def profile_of(message: Mapping[str, Any]) -> StandbyProfile:
    """Return a request's profile: interpreter, script, environment that imports depend on."""
    script = os.path.join(message.get("copied_from") or message["directory"], message["script"])
    environment = message["environment"]
    return StandbyProfile(
        message["python"], os.path.realpath(script), import_variables(environment)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m hermes_ops.trial.standby", description=__doc__)
    parser.add_argument("--socket", required=True, type=Path, help="where trials ask")
    parser.add_argument("--slots", required=True, type=int, help="interpreters at most")
    options = parser.parse_args(arguments)
    adopt_orphans()  # the reapers of copies become our children
    StandbyServer(options.socket, options.slots).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())

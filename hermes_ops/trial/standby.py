"""The keeper of standby interpreters: one a machine, on a socket that only its user can open.

The start of Python and the framework is the greater part of a switch. The keeper holds interpreters
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

from hermes_ops.trial.process import adopt_orphans, ordinary_priority
from hermes_ops.trial.process_tree import end_descendants
from hermes_ops.trial.reaper import END_S, Reaper, fork_reaper
from hermes_ops.trial.relevant import relevant
from hermes_ops.trial.standby_client import READY_TEMPLATE, STARTED, receive, send

_IDLE_LIMIT_S = 900.0
_REPLENISH_AFTER_S = 1.0
_STARTED_S = 2.0
_LEAVE_S = 20.0
_PRIVATE = ("HERMES_", "MLFLOW_")
_START = "import sys; from hermes_ops.trial.standby_child import main; main(int({}), {!r})"


@dataclass(frozen=True)
class Profile:
    """Scripts for which the same interpreter will do."""

    python: str
    script: str
    environment: tuple[tuple[str, str], ...]  # what an import may depend on


@dataclass
class Standby:
    """An interpreter that imports, waits, or has become a trial, below a reaper of its own."""

    reaper: Reaper
    pid: int
    socket: socket.socket  # by which it is ordered; a copy is not
    profile: Profile
    imports: tuple[str, ...]
    ready_s: float | None = None
    is_template: bool = False  # it can be copied, so that it is never used up


@dataclass
class Keeper:
    """The keeper's state; `serve` is its loop."""

    path: Path
    slots: int
    idle: list[Standby] = field(default_factory=list)
    running: dict[socket.socket, Standby] = field(default_factory=dict)
    known: dict[Profile, tuple[str, ...]] = field(default_factory=dict)
    last: tuple[Profile, Mapping[str, str]] | None = None
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
        self.last = (profile, message["environment"])
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
        self, profile: Profile, imports: tuple[str, ...], environment: Mapping[str, str]
    ) -> None:
        if self.known.get(profile) != imports:
            self.known[profile] = imports
            self._drop([s for s in self.idle if s.profile == profile])
        self.last = (profile, environment)
        if self.replenish_at_s is None:
            self.replenish_at_s = time.monotonic()

    def _hand_out(
        self, profile: Profile, message: dict[str, Any], handles: list[int]
    ) -> Standby | None:
        """Give a script the interpreter that is furthest: ready, or else still importing.

        One that is still importing takes its order when it is done: it will be sooner than an
        interpreter that begins only now, and the two would slow each other down.
        """
        mine = [s for s in self.idle if s.profile == profile]
        for standby in sorted(mine, key=lambda s: s.ready_s is None):
            if standby.is_template:
                begun = _copied(standby, message, handles)
            elif standby.ready_s is not None:
                begun = _started(standby, message, handles)
            else:
                begun = _promised(standby, message, handles)
            if begun is None:
                self._drop([standby])
                continue
            if begun is standby:
                self.idle.remove(standby)
                self.selector.unregister(standby.socket)
            return begun
        return None

    def _trial_gone(self, connection: socket.socket) -> None:
        """hermes-trial has closed its end: its trial must not live on."""
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
                lost = self.running.pop(connection).reaper.lost
                if lost:
                    self._end_strays()
                with contextlib.suppress(OSError):
                    connection.sendall(json.dumps({"exit": code}).encode() + b"\n")
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
        known = {s.reaper.pid for s in (*self.idle, *self.running.values())}
        end_descendants(os.getpid(), END_S, without=known)

    def _replenish(self) -> None:
        if self.last is None or self.replenish_at_s is None or self.stopping:
            return
        if time.monotonic() < self.replenish_at_s:
            return
        self.replenish_at_s = None
        profile, environment = self.last
        imports = self.known.get(profile)
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
        self, profile: Profile, imports: tuple[str, ...], environment: Mapping[str, str]
    ) -> None:
        ours, theirs = socket.socketpair()
        clean = {k: v for k, v in environment.items() if not k.startswith(_PRIVATE)}
        clean.pop("CUDA_VISIBLE_DEVICES", None)
        reaper = fork_reaper(keep=[theirs.fileno()], subreaper=False)
        command = [profile.python, "-c", _START.format(theirs.fileno(), imports)]
        try:
            pid = reaper.start(command, clean, "/", keep=[theirs.fileno()])
        except OSError:
            reaper.end()
            ours.close()
            self.known.pop(profile, None)
            return
        finally:
            theirs.close()
        standby = Standby(reaper, pid, ours, profile, imports)
        self.idle.append(standby)
        self.selector.register(ours, selectors.EVENT_READ, lambda _: self._ready(standby))

    def _ready(self, standby: Standby) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = standby.socket.recv(1)
        if data:
            standby.ready_s = time.monotonic()
            standby.is_template = data == READY_TEMPLATE
            self.replenish_at_s = standby.ready_s
        elif standby in self.idle:
            self._drop([standby])
            self.known.pop(standby.profile, None)  # it cannot import this: do not try again

    def _drop(self, standbys: Sequence[Standby]) -> None:
        for standby in standbys:
            self.idle.remove(standby)
            self.selector.unregister(standby.socket)
            self._end(standby)

    def _end(self, standby: Standby) -> None:
        standby.reaper.end()
        standby.socket.close()
        self._end_strays()


def _copied(standby: Standby, message: dict[str, Any], handles: list[int]) -> Standby | None:
    """A copy of the template that has become the script, None if it could not be made."""
    own, other = socket.socketpair()
    try:
        standby.socket.settimeout(_STARTED_S)
        send(standby.socket, dict(message, copy=True), [*handles, other.fileno()])
        ids = standby.socket.recv(8)
    except OSError:
        ids = b""
    finally:
        other.close()
    if len(ids) < 8:
        own.close()  # a copy that is made all the same ends at that
        return None
    reaper, script = (int.from_bytes(ids[n : n + 4], "little") for n in (0, 4))
    unused = socket.socket(socket.AF_UNIX)
    return Standby(
        Reaper(reaper, own), script, unused, standby.profile, standby.imports, time.monotonic()
    )


def _started(standby: Standby, message: dict[str, Any], handles: list[int]) -> Standby | None:
    """The interpreter itself once it has become the script."""
    try:
        standby.reaper.adopt(message["environment"])
        standby.socket.settimeout(_STARTED_S)
        send(standby.socket, message, handles)
        return standby if standby.socket.recv(1) == STARTED else None
    except OSError:
        return None


def _promised(standby: Standby, message: dict[str, Any], handles: list[int]) -> Standby | None:
    """The interpreter itself, which becomes the script as soon as its imports are done."""
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


def profile_of(message: Mapping[str, Any]) -> Profile:
    """The profile of a request: interpreter, script, and the environment that imports depend on."""
    script = os.path.join(message.get("copied_from") or message["directory"], message["script"])
    environment = message["environment"]
    return Profile(message["python"], os.path.realpath(script), relevant(environment))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the keeper until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m hermes_ops.trial.standby", description=__doc__)
    parser.add_argument("--socket", required=True, type=Path, help="where trials ask")
    parser.add_argument("--slots", required=True, type=int, help="interpreters at most")
    given = parser.parse_args(arguments)
    adopt_orphans()  # the reapers of copies become our children
    Keeper(given.socket, given.slots).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())

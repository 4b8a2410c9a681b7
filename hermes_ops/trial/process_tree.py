"""Processes as the kernel knows them: who descends from whom, whatever they call themselves.

A process is told by its id and its start time together: an id alone may have been given to another
process since.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

_POLL_S = 0.01


class Process(NamedTuple):
    """One process; `started_ticks` is its start in the kernel's ticks since the boot."""

    pid: int
    started_ticks: int


class _Entry(NamedTuple):
    parent: int
    started_ticks: int
    is_zombie: bool


def process_of(pid: int) -> Process | None:
    """Return the live process with that id; None if there is none or it has ended."""
    entry = _entry(pid)
    return None if entry is None or entry.is_zombie else Process(pid, entry.started_ticks)


def is_alive(process: Process) -> bool:
    """Tell whether that very process is there."""
    return process_of(process.pid) == process


def boot_and_namespace() -> str:
    """Return what process ids are valid in: this boot of the machine, this namespace of ids."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return f"{stream.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class ProcessTable:
    """Who is whose child, read at one moment."""

    def __init__(self) -> None:
        self._entries = {pid: entry for pid in _pids() if (entry := _entry(pid)) is not None}

    def below(self, root: int, without: Collection[int] = ()) -> list[Process]:
        """Return the live descendants of `root`, without those named and all below them."""
        return _below(root, self._entries, without)


def descendants(root: int, without: Collection[int] = ()) -> list[Process]:
    """Return the live descendants of `root`, leaving out those in `without` and all below them."""
    return ProcessTable().below(root, without)


def kill(process: Process, number: int = signal.SIGKILL) -> None:
    """Send a signal to that very process; nothing happens if it has gone or is not ours."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except OSError:  # a kernel without it, or no handle left
        if is_alive(process):
            _send(lambda: os.kill(process.pid, number))
        return
    try:
        if is_alive(process):
            _send(lambda: signal.pidfd_send_signal(handle, number))
    finally:
        os.close(handle)


def _send(action: Callable[[], None]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        action()


def end_all(processes: Iterable[Process], wait_s: float) -> list[Process]:
    """Kill processes with everything below them; return those that are still there in the end."""
    left = list(processes)
    deadline_s = time.monotonic() + wait_s
    while True:
        left = [process for process in left if is_alive(process)]
        below = [found for process in left for found in descendants(process.pid)]
        left = [p for p in dict.fromkeys([*left, *below]) if p.pid != os.getpid()]
        for process in left:
            kill(process)
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(_POLL_S)


def end_descendants(root: int, wait_s: float, without: Collection[int] = ()) -> list[Process]:
    """Kill the descendants of `root` until there is none; return those that did not end."""
    deadline_s = time.monotonic() + wait_s
    while left := descendants(root, without):
        for process in left:
            kill(process)
        if time.monotonic() > deadline_s:
            break
        time.sleep(_POLL_S)
    return left


class Descendants:
    """The descendants of one process, looked at again and again at little cost.

    A process that has been seen outside stays outside, so only new ones are read. One whose
    ancestors were not all there is read again: its parent may just have ended.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._outside: set[int] = set()

    def look(self) -> list[Process]:
        """Return those that live now."""
        pids = set(_pids())
        self._outside &= pids
        new = pids - self._outside
        table = {pid: entry for pid in new if (entry := _entry(pid)) is not None}
        found = _below(self._root, table, ())
        inside = {process.pid for process in found} | {self._root}
        for pid in table:
            if self._is_outside(pid, table, inside):
                self._outside.add(pid)
        return found

    def _is_outside(self, pid: int, table: Mapping[int, _Entry], inside: set[int]) -> bool:
        while pid not in inside:
            entry = table.get(pid)
            if entry is None:
                return pid == 0 or pid in self._outside
            pid = entry.parent
        return False


def _below(root: int, table: Mapping[int, _Entry], without: Collection[int]) -> list[Process]:
    children: dict[int, list[int]] = {}
    for pid, entry in table.items():
        children.setdefault(entry.parent, []).append(pid)
    found: list[Process] = []
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid not in without and pid != root:
                waiting.append(pid)
                if not table[pid].is_zombie:
                    found.append(Process(pid, table[pid].started_ticks))
    return found


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _entry(pid: int) -> _Entry | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            # The name before ")" is the process's own choice: it may hold anything.
            state, *fields = stream.read().rpartition(b")")[2].split()
        return _Entry(int(fields[0]), int(fields[18]), state in (b"Z", b"X"))
    except (OSError, ValueError, IndexError):
        return None

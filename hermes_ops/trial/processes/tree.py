"""Processes as the kernel knows them: who descends from whom, whatever they call themselves.

A process is told by its id and its start time together: an id alone may have been given to another
process since. What a trial starts is marked, and cannot outlive its supervisor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

_POLL_S = 0.01
TRACKER_S = 1.0
"""Seconds that a resource tracker has to remove the shared memory of processes that were killed."""


class Process(NamedTuple):
    """One process; `started_ticks` is its start in the kernel's ticks since the boot."""

    pid: int
    started_ticks: int


class _ProcessStat(NamedTuple):
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


def boot_id() -> str:
    """Return the id of this boot of the machine; empty where the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def boot_and_namespace() -> str:
    """Return what process ids are valid in: this boot of the machine, this namespace of ids."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    boot = boot_id()
    return f"{boot} {namespace}" if boot else ""


class ProcessTable:
    """The parents and children of all processes at one moment."""

    def __init__(self) -> None:
        self._entries = {pid: entry for pid in _pids() if (entry := _entry(pid)) is not None}

    def children(self, parent: int) -> list[Process]:
        """Return the live processes that `parent` has started, without those below them."""
        alive = ((pid, entry) for pid, entry in self._entries.items() if not entry.is_zombie)
        return [Process(pid, e.started_ticks) for pid, e in alive if e.parent == parent]

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


def _kill_each(processes: Iterable[Process], began_s: float) -> None:
    """Kill processes, but a resource tracker only if it has not ended `TRACKER_S` after `began_s`.

    It ends by itself once all the others have, and first removes the shared memory (of
    `multiprocessing`, of joblib) that they have left: nobody else knows of it.
    """
    is_late = time.monotonic() > began_s + TRACKER_S
    for process in processes:
        if is_late or not is_resource_tracker(process):
            kill(process)


def is_resource_tracker(process: Process) -> bool:
    """Tell whether it is the process in which `multiprocessing` keeps track of shared memory."""
    try:
        with open(f"/proc/{process.pid}/cmdline", "rb") as stream:
            return b"resource_tracker import main" in stream.read()
    except OSError:
        return False


def end_all(processes: Iterable[Process], wait_s: float) -> list[Process]:
    """Kill processes with everything below them; return those that are still there in the end."""
    left = list(processes)
    began_s = time.monotonic()
    while True:
        left = [process for process in left if is_alive(process)]
        below = [child for process in left for child in descendants(process.pid)]
        left = [p for p in dict.fromkeys([*left, *below]) if p.pid != os.getpid()]
        _kill_each(left, began_s)
        if not left or time.monotonic() > began_s + wait_s:
            return left
        time.sleep(_POLL_S)


def end_descendants(root: int, wait_s: float, without: Collection[int] = ()) -> list[Process]:
    """Kill the descendants of `root` until there is none; return those that did not end."""
    began_s = time.monotonic()
    while left := descendants(root, without):
        _kill_each(left, began_s)
        if time.monotonic() > began_s + wait_s:
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

    def find_live(self) -> list[Process]:
        """Return those that live now."""
        pids = set(_pids())
        self._outside &= pids
        new = pids - self._outside
        table = {pid: entry for pid in new if (entry := _entry(pid)) is not None}
        inside_processes = _below(self._root, table, ())
        inside = {process.pid for process in inside_processes} | {self._root}
        for pid in table:
            if self._is_outside(pid, table, inside):
                self._outside.add(pid)
        return inside_processes

    def _is_outside(self, pid: int, table: Mapping[int, _ProcessStat], inside: set[int]) -> bool:
        while pid not in inside:
            entry = table.get(pid)
            if entry is None:
                return pid == 0 or pid in self._outside
            pid = entry.parent
        return False


def _below(root: int, table: Mapping[int, _ProcessStat], without: Collection[int]) -> list[Process]:
    children: dict[int, list[int]] = {}
    for pid, entry in table.items():
        children.setdefault(entry.parent, []).append(pid)
    below: list[Process] = []
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid not in without and pid != root:
                waiting.append(pid)
                if not table[pid].is_zombie:
                    below.append(Process(pid, table[pid].started_ticks))
    return below


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _entry(pid: int) -> _ProcessStat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            # The name before ")" is the process's own choice: it may hold anything.
            state, *fields = stream.read().rpartition(b")")[2].split()
        # Where only the first thread has ended the state is Z as well, and the others go on.
        is_zombie = state in (b"Z", b"X") and int(fields[16]) <= 1
        return _ProcessStat(int(fields[0]), int(fields[18]), is_zombie)
    except (OSError, ValueError, IndexError):
        return None


SEGMENT_VARIABLE = "HERMES_SEGMENT"  # marks every process of one segment, wherever it has gone
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


class Child(Protocol):
    """The script's process, started plainly or taken over from a standby interpreter."""

    pid: int
    output: int

    def poll(self) -> int | None:
        """Return the exit code (negative: killed by that signal), None while it lives."""

    def stop(self) -> None:
        """Send SIGTERM to the process; where that is a shell, first to what it runs."""

    def kill(self) -> None:
        """Send SIGKILL to the process; all that it has started ends with it."""


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies; that may have died already."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent has ended."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def ordinary_priority(pid: int) -> None:
    """Take back a lower CPU priority from every thread of a process, where that is allowed."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread), 0)


def sweep_up(token: str, wait_s: float) -> None:
    """Kill every process marked with the segment's token until none is left."""
    began_s = time.monotonic()
    while left := marked(token):
        _kill_each(left, began_s)
        if time.monotonic() > began_s + wait_s:
            return
        time.sleep(_POLL_S)


def marked(token: str, variable: str = SEGMENT_VARIABLE) -> list[Process]:
    """Return the living processes that carry the segment's token, or another, in a variable."""
    needle = os.fsencode(f"{variable}={token}")
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            process = process_of(int(entry.name))
            with contextlib.suppress(OSError):
                if process and needle in (entry / "environ").read_bytes().split(b"\0"):
                    processes.append(process)
    return processes

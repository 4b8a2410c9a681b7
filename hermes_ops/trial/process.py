"""Processes that cannot outlive their supervisor."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Protocol

from hermes_ops.trial.process_tree import Process, kill, process_of

SEGMENT_VARIABLE = "HERMES_SEGMENT"  # marks every process of one segment, wherever it has gone
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


class Child(Protocol):
    """The script's process, started plainly or taken over from a standby interpreter."""

    pid: int
    output: int

    def poll(self) -> int | None:
        """The exit code (negative: killed by that signal), None while it lives."""

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""

    def kill(self) -> None:
        """Send SIGKILL to the process; all that it has started ends with it."""


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process `number` when its parent dies; it may have died already."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


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
    deadline_s = time.monotonic() + wait_s
    while True:
        left = marked(token)
        for process in left:
            kill(process)
        if not left or time.monotonic() > deadline_s:
            return
        time.sleep(0.01)


def marked(token: str) -> list[Process]:
    """The living processes that carry the segment's token in their environment."""
    needle = f"{SEGMENT_VARIABLE}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            process = process_of(int(entry.name))
            with contextlib.suppress(OSError):
                if process and needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(process)
    return found

"""Processes that cannot outlive their supervisor."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

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

    def kill_group(self) -> None:
        """Send SIGKILL to the process and everything in its group."""


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process `number` when its parent dies; it may have died already."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent has ended."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class PlainChild:
    """A freshly started script in a session of its own."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], directory: str | None
    ) -> None:
        parent = os.getpid()
        # One thread here, so the code between fork and exec is safe.
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509
        )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.output = self._process.stdout.fileno()

    def poll(self) -> int | None:
        """The exit code, None while it lives."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Send SIGKILL to the whole group."""
        kill_group(self.pid)


def kill_group(group: int) -> None:
    """Send SIGKILL to a process group that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def ordinary_priority(pid: int) -> None:
    """Take back a lower CPU priority from every thread of a process, where that is allowed."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread), 0)


def start_guard(token: str, group_pipe: tuple[int, int]) -> int:
    """Fork a guard that ends the segment when the supervisor vanishes; return its id.

    The kernel's own signal at a parent's death reaches only the direct child. The guard inherits
    the supervisor's locks: a folder or GPU is free only after everything on it has ended.
    """
    guard = os.fork()
    if guard:
        os.close(group_pipe[0])
        return guard
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _detach(keep=group_pipe[0], close=group_pipe[1])
        _guard(token, group_pipe[0])
    finally:
        os._exit(0)


def _detach(keep: int, close: int) -> None:
    """Let go of the supervisor's terminal and output: their readers wait for the end of file."""
    os.close(close)
    null = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        if handle != keep:
            os.dup2(null, handle)


def _guard(token: str, pipe: int) -> None:
    groups = b""
    while True:
        data = os.read(pipe, 4096)
        if not data:
            break
        groups += data
    if groups.endswith(b"done\n"):
        return
    for group in groups.split():
        kill_group(int(group))
    sweep_up(token, wait_s=5.0)


def sweep_up(token: str, wait_s: float) -> None:
    """Kill every process marked with the segment's token until none is left."""
    deadline_s = time.monotonic() + wait_s
    while True:
        left = marked(token)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left or time.monotonic() > deadline_s:
            return
        time.sleep(0.01)


def marked(token: str) -> list[int]:
    """The living processes that carry the segment's token in their environment."""
    needle = f"{SEGMENT_VARIABLE}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found

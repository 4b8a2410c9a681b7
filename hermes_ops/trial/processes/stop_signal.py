"""SIGTERM to a script that may be a shell script, which passes no signal on.

A shell that gets SIGTERM ends at once, or, with a trap, once what it runs has ended. Either way
what it runs is killed without a checkpoint. So that gets the signal, and the shell does after it.
"""

from __future__ import annotations

import os
import signal

from hermes_ops.trial.processes.tree import Child, Process, ProcessTable, is_alive, kill

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})


class StopSignal:
    """Ask one script to stop; `pass_on` is called again and again after that."""

    def __init__(self) -> None:
        self._awaited: list[Process] | None = None

    def send(self, child: Child, *, is_group: bool = False) -> None:
        """Send SIGTERM to what a shell runs; at once to a script that is no shell, or to a group.

        The workers of a group are to get it together.
        """
        self._awaited = [] if is_group else commands(child.pid)
        for process in self._awaited:
            kill(process, signal.SIGTERM)
        self.pass_on(child)

    def pass_on(self, child: Child) -> None:
        """Send SIGTERM to the script once all that it ran has ended; nothing before `send`."""
        if self._awaited is not None and not any(map(is_alive, self._awaited)):
            self._awaited = None
            child.signal(signal.SIGTERM)


def commands(pid: int) -> list[Process]:
    """Return what a shell runs, with shells replaced by what they run; nothing for other programs.

    What reads a pipe (`| tee log`) is left out: it ends with what writes into that.
    """
    table = ProcessTable()
    found: list[Process] = []
    shells = [pid] if _is_shell(pid) else []
    while shells:
        shell = shells.pop()
        stdin = _stdin(shell)
        for process in table.children(shell):
            own = _stdin(process.pid)
            if own.startswith("pipe:") and own != stdin:
                continue
            if _is_shell(process.pid) and table.children(process.pid):
                shells.append(process.pid)
            else:
                found.append(process)
    return found


def _is_shell(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) in _SHELLS
    except OSError:
        return False


def _stdin(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/0")
    except OSError:
        return ""

"""SIGTERM to a script that may be a shell script, which passes no signal on.

A shell that gets SIGTERM ends at once, or, with a trap, once what it runs has ended. Either way
what it runs is killed without a checkpoint. So that gets the signal, and the shell does after it.
`conda run` counts as a shell: it runs one, and passes no signal on (conda's issue 10351).
"""

from __future__ import annotations

import os
import signal

from hermes_ops.trial.processes.tree import Process, ProcessTable, is_alive, kill

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})
_CONDA = frozenset({b"conda", b"mamba"})


class StopSignal:
    """Ask one script to stop; `pass_on` is called again and again after that.

    `script`: its process; None if it has ended.
    """

    def __init__(self, script: Process | None) -> None:
        self._script = script
        self._awaited: list[Process] | None = None

    def send(self) -> None:
        """Send SIGTERM to what a shell runs; at once to a script that is no shell."""
        if self._script is None:
            return
        self._awaited = commands(self._script.pid)
        for process in self._awaited:
            kill(process, signal.SIGTERM)
        self.pass_on()

    def follow(self) -> None:
        """Take note that the script is told to stop in another way: a shell then runs no more."""
        if self._script is not None:
            self._awaited = commands(self._script.pid) or None

    def pass_on(self) -> None:
        """Send SIGTERM to the script once all that it ran has ended; nothing before a stop."""
        if self._script is None or self._awaited is None or any(map(is_alive, self._awaited)):
            return
        self._awaited = None
        kill(self._script, signal.SIGTERM)


def commands(pid: int) -> list[Process]:
    """Return what a shell runs, with shells replaced by what they run; nothing for other programs.

    What reads a pipe (`| tee log`) is left out: it ends with what writes into that.
    """
    if not _is_shell(pid):
        return []
    table = ProcessTable()
    found: list[Process] = []
    shells = [pid]
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
        if os.path.basename(os.readlink(f"/proc/{pid}/exe")) in _SHELLS:
            return True
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            _, script, command, *_ = [*stream.read().split(b"\0"), b"", b""]
    except OSError:
        return False
    return os.path.basename(script) in _CONDA and command == b"run"


def _stdin(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/0")
    except OSError:
        return ""

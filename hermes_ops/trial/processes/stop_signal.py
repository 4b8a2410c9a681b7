"""SIGTERM to a script that may be a shell script, which passes no signal on.

A shell that gets SIGTERM ends at once or, with a trap, once the command that it runs has ended.
Either way the command is killed without a checkpoint. So the command gets the signal first, and the
shell when the command has ended. Until then SIGSTOP holds the shell, so that it starts no further
command. `conda run` counts as a shell: it runs one, and passes no signal on (conda issue 10351). So
does every launcher that only waits for its command and has no handler of its own: `accelerate
launch`, `time`, a script that calls `subprocess.run`.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterable
from typing import NamedTuple

from hermes_ops.trial.processes.tree import (
    Process,
    ProcessTable,
    is_alive,
    is_resource_tracker,
    kill,
)

_END_OF_FILE_S = 1.0
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})
_CONDA = frozenset({b"conda", b"mamba"})
_WAITS_FOR_CHILD = "do_wait"  # the kernel's function in which wait4 and waitid sleep


class StopSignal:
    """The stop of one script; call `pass_on` repeatedly after `send` or `expect`.

    `script` is its process, None if it has ended.
    """

    def __init__(self, script: Process | None) -> None:
        self._script = script
        self._run: _ShellRun | None = None
        self._reader: Process | None = None
        self._reader_ends_by_s = math.inf

    def send(self) -> None:
        """Send SIGTERM to what a shell runs; at once to a script that is no shell."""
        if self._script is None:
            return
        self._run = _hold(self._script)
        _signal(self._run.commands, signal.SIGTERM)
        self.pass_on()

    def expect(self) -> None:
        """Prepare for a stop that the script learns of by other means: hold its shells."""
        if self._script is None:
            return
        self._run = _hold(self._script)
        if not (self._run.commands or self._run.readers):
            _signal(self._run.shells, signal.SIGCONT)
            self._run = None

    def pass_on(self) -> None:
        """Send SIGTERM to the script, after a stop, once all commands that it ran have ended."""
        if self._script is None or self._run is None or any(map(is_alive, self._run.commands)):
            return
        if readers := [process for process in self._run.readers if is_alive(process)]:
            self._end_reader(min(readers, key=lambda one: one[::-1]), time.monotonic())
            return
        for number in (signal.SIGTERM, signal.SIGCONT):
            _signal(self._run.shells or [self._script], number)
        self._run = None

    def _end_reader(self, first: Process, now_s: float) -> None:
        """Send SIGTERM to the first reader if it does not end by itself at the end of its input."""
        if self._reader != first:
            self._reader, self._reader_ends_by_s = first, now_s + _END_OF_FILE_S
        elif now_s >= self._reader_ends_by_s:
            self._reader_ends_by_s = math.inf
            kill(first, signal.SIGTERM)


class _ShellRun(NamedTuple):
    """The shells that run the training, and the other processes that they run.

    `readers` are those that read a pipe (`| tee log`), `commands` the rest. A reader passes on the
    last lines of the process that writes into its pipe, and usually ends after it.
    """

    shells: list[Process]
    commands: list[Process]
    readers: list[Process]


def _hold(script: Process) -> _ShellRun:
    """Suspend the shells that run the training, so that they start no further command."""
    run = _ShellRun([script] if _keeps_signals(script.pid) else [], [], [])
    for shell in run.shells:  # grows: shells may run shells
        kill(shell, signal.SIGSTOP)
        table, stdin = ProcessTable(), _stdin(shell.pid)
        for process in table.children(shell.pid):
            own = _stdin(process.pid)
            if is_resource_tracker(process):
                continue  # it ends with the shell
            if own.startswith("pipe:") and own != stdin:
                run.readers.append(process)
            elif _keeps_signals(process.pid) and table.children(process.pid):
                run.shells.append(process)
            else:
                run.commands.append(process)
    return run


def _signal(processes: Iterable[Process], number: int) -> None:
    for process in processes:
        kill(process, number)


def _keeps_signals(pid: int) -> bool:
    """Tell whether a process passes no signal on to what it runs: a shell, or a launcher."""
    return _is_shell(pid) or _only_waits(pid)


def _only_waits(pid: int) -> bool:
    """Tell whether SIGTERM would end a process that waits for the end of a child."""
    try:
        with open(f"/proc/{pid}/wchan", encoding="ascii") as stream:
            if stream.read() != _WAITS_FOR_CHILD:
                return False
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as stream:
            masks = [line.split()[1] for line in stream if line.startswith(("SigIgn:", "SigCgt:"))]
    except OSError:
        return False
    return not any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in masks)


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

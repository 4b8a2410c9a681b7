"""SIGTERM to a script that may be a shell script, which passes no signal on.

A shell that gets SIGTERM ends at once or, with a trap, once the command that it runs has ended.
Either way the command is killed without a checkpoint. So the command gets the signal first, and the
shell when the command has ended. Until then SIGSTOP holds the shell, so that it starts no further
command. `conda run` counts as a shell: it runs one, and passes no signal on (conda issue 10351). So
does every launcher that only waits for its command and has no handler of its own: `accelerate
launch`, `time`, a script that calls `subprocess.run`; and one that SIGTERM would end while the
training below it has a handler (`multiprocessing.spawn`). A launcher that reads what its command
prints is not held, so that the last lines come through: it ends with its command, or gets the
signal soon after.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterable, Sequence
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
_PYTHONS = ("python", "pypy")
_TERMINAL = "/dev/ptmx"  # of which a launcher holds one end, and its command the other
_WAITS_FOR_CHILD = "do_wait"  # the kernel's function in which wait4 and waitid sleep


class StopSignal:
    """The stop of one script; call `pass_on` repeatedly after `send` or `expect`.

    `script` is its process, None if it has ended. `lets_read`: a launcher that reads what its
    command prints is not held.
    """

    def __init__(self, script: Process | None, *, lets_read: bool = True) -> None:
        self._script = script
        self._lets_read = lets_read
        self._run: _ShellRun | None = None
        self._reader: Process | None = None
        self._reader_ends_by_s = math.inf
        self._reader_stop: StopSignal | None = None

    def send(self) -> None:
        """Send SIGTERM to what a shell runs; at once to a script that is no shell."""
        if self._script is None:
            return
        self._run = _hold(self._script, for_signal=True, lets_read=self._lets_read)
        _signal(self._run.commands, signal.SIGTERM)
        self.pass_on()

    def expect(self) -> None:
        """Prepare for a stop that the script learns of by other means: hold its shells."""
        if self._script is None:
            return
        self._run = _hold(self._script, for_signal=False, lets_read=False)

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
        """Stop the first reader if it does not end by itself at the end of its input.

        It may run a training, the next one or its own: `ls *.yaml | xargs -n1 python train.py`.
        """
        if self._reader != first:
            self._reader, self._reader_ends_by_s = first, now_s + _END_OF_FILE_S
            self._reader_stop = None
        elif self._reader_stop is not None:
            self._reader_stop.pass_on()
        elif now_s >= self._reader_ends_by_s:
            self._reader_stop = StopSignal(first, lets_read=False)
            self._reader_stop.send()


class _ShellRun(NamedTuple):
    """The shells that run the training, and the other processes that they run.

    `readers` are those that read a pipe (`| tee log`) or what their own command prints, `commands`
    the rest. A reader passes on the last lines of the process that writes into its pipe, and
    usually ends after it.
    """

    shells: list[Process]
    commands: list[Process]
    readers: list[Process]


def _hold(script: Process, *, for_signal: bool, lets_read: bool) -> _ShellRun:
    """Suspend the shells that run the training, so that they start no further command.

    `for_signal`: SIGTERM comes now, so that each process that would die of it may be a launcher.
    """
    run = _ShellRun([], [], [])
    launchers = [script]
    for launcher in launchers:  # grows: shells may run shells
        table = ProcessTable()
        mine = _run_by(launcher, table, for_signal=for_signal)
        if not mine:
            run.commands.append(launcher)
            continue
        if lets_read and _reads_output(launcher.pid, mine):
            run.readers.append(launcher)
        else:
            kill(launcher, signal.SIGSTOP)
            run.shells.append(launcher)
            known = table.children(launcher.pid)
            mine += [p for p in ProcessTable().children(launcher.pid) if p not in known]
        stdin = _link(launcher.pid, 0)
        for process in mine:
            script_stdin = _link(process.pid, 0)
            is_reader = script_stdin.startswith("pipe:") and script_stdin != stdin
            (run.readers if is_reader else launchers).append(process)
    return run


def _run_by(process: Process, table: ProcessTable, *, for_signal: bool) -> list[Process]:
    """Return the processes that one runs without passing a signal on to them."""
    children = [p for p in table.children(process.pid) if not is_resource_tracker(p)]
    if not children or _is_shell(process.pid):
        return children
    if _has_handler(process.pid) is not False:
        return []
    if _kernel_function(process.pid) == _WAITS_FOR_CHILD:
        return children
    return [p for p in children if for_signal and _trains_with_handler(p, table)]


def _trains_with_handler(process: Process, table: ProcessTable) -> bool:
    """Tell whether a process, or one below it, is a Python that catches SIGTERM."""
    tree = [process, *table.below(process.pid)]
    pids = [p.pid for p in tree if _program(p.pid).startswith(_PYTHONS)]
    return any(_has_handler(pid, ("SigCgt:",)) for pid in pids)


def _reads_output(pid: int, commands: Sequence[Process]) -> bool:
    """Tell whether a process other than a shell reads what one of its commands prints."""
    if _program(pid) in _SHELLS:
        return False
    own = _links(pid)
    ends = {_link(command.pid, number) for command in commands for number in (1, 2)}
    by_pipe = any(end.startswith("pipe:") and end in own for end in ends)
    return by_pipe or (_TERMINAL in own and any(end.startswith("/dev/pts/") for end in ends))


def _signal(processes: Iterable[Process], number: int) -> None:
    for process in processes:
        kill(process, number)


def _has_handler(pid: int, masks_named: tuple[str, ...] = ("SigIgn:", "SigCgt:")) -> bool | None:
    """Tell whether a process ignores or catches SIGTERM; None if that is not known."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as stream:
            masks = [line.split()[1] for line in stream if line.startswith(masks_named)]
    except OSError:
        return None
    return any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in masks)


def _kernel_function(pid: int) -> str:
    """Return the kernel's function in which a process sleeps."""
    try:
        with open(f"/proc/{pid}/wchan", encoding="ascii") as stream:
            return stream.read()
    except OSError:
        return ""


def _is_shell(pid: int) -> bool:
    if _program(pid) in _SHELLS:
        return True
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            _, script, command, *_ = [*stream.read().split(b"\0"), b"", b""]
    except OSError:
        return False
    return os.path.basename(script) in _CONDA and command == b"run"


def _program(pid: int) -> str:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return ""


def _link(pid: int, handle: int) -> str:
    """Return what an open file of a process is: a path, or `pipe:[1234]`."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{handle}")
    except OSError:
        return ""


def _links(pid: int) -> set[str]:
    """Return what a process has open beside its standard input, output and errors."""
    try:
        handles = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return set()
    return {_link(pid, int(handle)) for handle in handles if int(handle) > 2}

"""Find and end the processes of one home, and never anybody else's.

A process is ours if its environment names our `HERMES_HOME` and the program or trial that it
belongs to, if a trial's record has it, or if it descends from a process of a trial. psutil refuses
to signal a process whose id has been taken by another since.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from hermes_ops.trial.process_record import forget_ended, recorded
from hermes_ops.trial.process_tree import Process, ProcessTable, is_alive

# hermes-trial itself gives its script 30 s to write a checkpoint.
TRIAL_GRACE_S = 35.0
PROGRAM_GRACE_S = 2.0
KILL_WAIT_S = 5.0
# What an Airflow task needs to report the exit of its trial before it is ended itself.
REPORT_WAIT_S = 0.5
STANDBY = "standby"


@dataclass(frozen=True, slots=True)
class Member:
    """One live process of a home; `trial` is "" for a service."""

    process: psutil.Process
    program: str
    trial: str
    supervises_trial: bool

    @property
    def pid(self) -> int:
        """The process id."""
        return int(self.process.pid)


def members(home: Path) -> list[Member]:
    """Return every live process of `home`, except this one and those that started it."""
    me = psutil.Process()
    excluded = {me.pid, *(parent.pid for parent in me.parents())}
    found = [_member(process, str(home)) for process in psutil.process_iter()]
    by_pid = {member.pid: member for member in found if member is not None}
    for trial, process in recorded(home):
        _add(by_pid, process, "", trial)
    table = ProcessTable()
    for member in list(by_pid.values()):
        if member.trial or member.program == STANDBY:
            for process in table.below(member.pid):
                _add(by_pid, process, member.program, member.trial)
    return [member for pid, member in by_pid.items() if pid not in excluded]


def _add(by_pid: dict[int, Member], known: Process, program: str, trial: str) -> None:
    """Add a process that does not say itself whose it is."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(known.pid)
        if is_alive(known):  # the id has not been given away in between
            by_pid.setdefault(known.pid, Member(process, program, trial, supervises_trial=False))


def _member(process: psutil.Process, home: str) -> Member | None:
    try:
        environment = process.environ()
        program = environment.get("HERMES_PROGRAM", "")
        trial = environment.get("HERMES_TRIAL", "")
        if environment.get("HERMES_HOME") != home or not (program or trial):
            return None
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        command = process.cmdline()
    except (psutil.Error, OSError):
        return None
    return Member(process, program, trial, bool(trial) and is_trial_command(command))


def is_trial_command(command: list[str]) -> bool:
    """Tell whether a command line is `hermes-trial`'s own, not that of the user's script."""
    if "-m" in command and "hermes_ops.trial" in command:
        return True
    return any(Path(part).name == "hermes-trial" for part in command[:2])


def trials(found: Iterable[Member]) -> list[Member]:
    """Return the processes that belong to trials: `hermes-trial` and what it runs."""
    return [member for member in found if member.trial]


def leaders(found: Iterable[Member]) -> list[Member]:
    """Return one process for each trial: `hermes-trial` itself, without its own helper."""
    guards = {member.pid: member for member in found if member.supervises_trial}
    return [member for member in guards.values() if _parent(member) not in guards]


def _parent(member: Member) -> int:
    try:
        return int(member.process.ppid())
    except psutil.Error:  # it has just ended
        return 0


def end(home: Path, belongs: Callable[[Member], bool] = lambda _: True) -> int:
    """End the processes of `home` that `belongs` picks and return how many there were.

    Trials first: SIGTERM to `hermes-trial`, which has its script write a checkpoint and leaves;
    then everything else, with SIGKILL for what is left after a grace.
    """
    chosen = [member for member in members(home) if belongs(member)]
    if end_trials(chosen):
        time.sleep(REPORT_WAIT_S)
    rest = [member for member in members(home) if belongs(member)]
    _end(rest, PROGRAM_GRACE_S)
    forget_ended(home)
    return len(chosen)


def end_trials(chosen: Iterable[Member]) -> int:
    """End the trials among `chosen` with their checkpoints; return how many processes."""
    of_trials = trials(chosen)
    leaders = [member.process for member in of_trials if member.supervises_trial]
    for process in leaders:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    everyone = [member.process for member in of_trials]
    _, alive = psutil.wait_procs(everyone, timeout=TRIAL_GRACE_S if leaders else 0)
    _kill(alive)
    return len(everyone)


def _end(chosen: Iterable[Member], grace_s: float) -> None:
    processes = [member.process for member in chosen]
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    _kill(alive)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=KILL_WAIT_S)

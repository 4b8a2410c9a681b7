"""Find and end the processes of one home, and never anybody else's.

A process is ours if its environment names our `HERMES_HOME` and the program or trial that it
belongs to, if a trial's record has it, or if it descends from a process of a trial. psutil refuses
to signal a process whose id has been taken by another since. A container that shares our process
ids may have a home of the same name: its folder is another one, and so its processes are not ours.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from hermes_ops.trial.processes.record import forget_ended, recorded
from hermes_ops.trial.processes.tree import Process, ProcessTable, is_alive

# hermes-trial itself gives its script 30 s to write a checkpoint.
TRIAL_GRACE_S = 35.0
PROGRAM_GRACE_S = 2.0
KILL_WAIT_S = 5.0
# What an Airflow task needs to report the exit of its trial before it is ended itself.
REPORT_WAIT_S = 0.5
POLL_S = 0.05
STANDBY = "standby"


@dataclass(frozen=True, slots=True)
class HomeProcess:
    """One live process of a home; `trial` is "" for a service."""

    process: psutil.Process
    program: str
    trial: str
    supervises_trial: bool

    @property
    def pid(self) -> int:
        """The process id."""
        return int(self.process.pid)

    @property
    def started_s(self) -> float:
        """When it was started, Unix time; 0 if it has just ended."""
        try:
            return float(self.process.create_time())
        except psutil.Error:
            return 0.0


def members(home: Path) -> list[HomeProcess]:
    """Return every live process of `home`, except this one and those that started it."""
    me = psutil.Process()
    excluded = {me.pid, *(parent.pid for parent in me.parents())}
    own_members = [_member(process, str(home)) for process in psutil.process_iter()]
    by_pid = {member.pid: member for member in own_members if member is not None}
    for trial, process in recorded(home):
        _add(by_pid, process, "", trial)
    table = ProcessTable()
    for member in list(by_pid.values()):
        if member.trial or member.program == STANDBY:
            for process in table.below(member.pid):
                _add(by_pid, process, member.program, member.trial)
    return [member for pid, member in by_pid.items() if pid not in excluded]


def _add(
    by_pid: dict[int, HomeProcess], recorded_process: Process, program: str, trial: str
) -> None:
    """Add a process whose own environment does not name the home."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(recorded_process.pid)
        if is_alive(recorded_process):  # the id has not been given away in between
            by_pid.setdefault(
                recorded_process.pid, HomeProcess(process, program, trial, supervises_trial=False)
            )


def _member(process: psutil.Process, home: str) -> HomeProcess | None:
    try:
        environment = process.environ()
        program = environment.get("HERMES_PROGRAM", "")
        trial = environment.get("HERMES_TRIAL", "")
        if environment.get("HERMES_HOME") != home or not (program or trial):
            return None
        if process.status() == psutil.STATUS_ZOMBIE or not _sees_same_folder(process.pid, home):
            return None
        command = process.cmdline()
    except (psutil.Error, OSError):
        return None
    return HomeProcess(process, program, trial, bool(trial) and is_trial_command(command))


def _sees_same_folder(pid: int, home: str) -> bool:
    """Tell whether the path of our home leads that process to our folder; True if unknown."""
    try:
        ours, its = os.stat(home), os.stat(f"/proc/{pid}/root{home}")
    except OSError:
        return True
    return (ours.st_dev, ours.st_ino) == (its.st_dev, its.st_ino)


def is_trial_command(command: list[str]) -> bool:
    """Tell whether a command line is `hermes-trial`'s own, not that of the user's script."""
    if "-m" in command and "hermes_ops.trial" in command:
        return True
    return any(Path(part).name == "hermes-trial" for part in command[:2])


def trials(candidates: Iterable[HomeProcess]) -> list[HomeProcess]:
    """Return the processes that belong to trials: `hermes-trial` and what it runs."""
    return [member for member in candidates if member.trial]


def leaders(candidates: Iterable[HomeProcess]) -> list[HomeProcess]:
    """Return one process for each trial: `hermes-trial` itself, without its own helper."""
    guards = {member.pid: member for member in candidates if member.supervises_trial}
    return [member for member in guards.values() if _parent(member) not in guards]


def _parent(member: HomeProcess) -> int:
    try:
        return int(member.process.ppid())
    except psutil.Error:  # it has just ended
        return 0


def programs(candidates: Iterable[HomeProcess]) -> list[HomeProcess]:
    """Return one process for each program: the first that is no child of another of them."""
    services = [member for member in candidates if member.program and not member.trial]
    pids = {(member.program, member.pid) for member in services}
    roots = [m for m in services if (m.program, _parent(m)) not in pids]
    first: dict[str, HomeProcess] = {}
    for member in sorted(roots, key=lambda m: (m.started_s, m.pid)):
        first.setdefault(member.program, member)
    return list(first.values())


def end(home: Path, belongs: Callable[[HomeProcess], bool] = lambda _: True) -> int:
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


def end_programs(home: Path, names: Collection[str], grace_s: float) -> None:
    """End the processes of these programs: SIGTERM, and SIGKILL after the grace."""
    _end((m for m in members(home) if m.program in names and not m.trial), grace_s)


def end_trials(chosen: Iterable[HomeProcess]) -> int:
    """End the trials among `chosen` with their checkpoints; return how many processes."""
    of_trials = trials(chosen)
    leaders = [member.process for member in of_trials if member.supervises_trial]
    for process in leaders:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    everyone = [member.process for member in of_trials]
    alive = _left_after(everyone, TRIAL_GRACE_S if leaders else 0.0)
    _kill(alive)
    return len(everyone)


def _end(chosen: Iterable[HomeProcess], grace_s: float) -> None:
    processes = [member.process for member in chosen]
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _kill(_left_after(processes, grace_s))


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    _left_after(processes, KILL_WAIT_S)


def _left_after(processes: Iterable[psutil.Process], wait_s: float) -> list[psutil.Process]:
    """Wait until all have ended; return those that have not.

    A zombie has ended: in a container whose first process collects none it stays for ever.
    """
    deadline_s = time.monotonic() + wait_s
    while left := [process for process in processes if _runs(process)]:
        if time.monotonic() >= deadline_s:
            return left
        time.sleep(POLL_S)
    return []


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False

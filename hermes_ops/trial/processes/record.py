"""The processes of a running trial on disk: after a kill of everything, the next one ends them.

One file a trial, written by the reaper of its script and removed once nothing of it is left.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hermes_ops.trial.files import read_json, write_json
from hermes_ops.trial.group import RANK_VARIABLE
from hermes_ops.trial.processes.tree import (
    Process,
    boot_and_namespace,
    descendants,
    end_all,
    is_alive,
    kill,
    marked,
)

FOLDER = "processes"


class ProcessRecord(NamedTuple):
    """Where the processes of one trial are written down.

    Further workers of it that have reapers of their own have records beside it, `NAME-RANK.json`.
    """

    path: Path
    trial: str

    def write(self, processes: Sequence[Process]) -> None:
        """Replace what is there; a disk that is full ends nothing."""
        document = {"trial": self.trial, "boot": boot_and_namespace(), "processes": processes}
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, document)

    def alive(self) -> list[Process]:
        """Return those of them that still live, of all its workers."""
        return [process for path in self._paths() for process in _read(path)[1]]

    def end(self, wait_s: float) -> list[Process]:
        """Kill those that live, with all below them; return those that did not end."""
        left = end_all(self.alive(), wait_s)
        if not left:
            self.remove_all()
        return left

    def remove(self) -> None:
        """Remove the record: no process that it names is left."""
        _remove(self.path)

    def remove_all(self) -> None:
        """Remove it with those of further workers: no process is left."""
        for path in self._paths():
            _remove(path)

    def _paths(self) -> list[Path]:
        return [self.path, *sorted(self.path.parent.glob(f"{self.path.stem}-*.json"))]


def record_of(environment: Mapping[str, str]) -> ProcessRecord | None:
    """Return the record of the trial whose script has this environment; None outside a trial.

    It lies in the state folder, where `hermes up` and `hermes down` look, or else in the trial's.
    """
    folder = environment.get("HERMES_TRIAL_DIR")
    if not folder:
        return None
    record, rank = _record(folder, environment), environment.get(RANK_VARIABLE) or "0"
    if rank == "0":
        return record
    return record._replace(path=record.path.with_name(f"{record.path.stem}-{rank}.json"))


def own_record(folder: Path) -> ProcessRecord:
    """Return the record of the trial with that folder, in hermes-trial's own environment."""
    return _record(str(folder), os.environ)


def _record(folder: str, environment: Mapping[str, str]) -> ProcessRecord:
    home, trial = environment.get("HERMES_HOME"), environment.get("HERMES_TRIAL") or "0"
    if home:
        name = hashlib.sha256(folder.encode()).hexdigest()[:24]
        return ProcessRecord(Path(home, FOLDER, f"{name}.json"), trial)
    return ProcessRecord(Path(folder, "processes.json"), trial)


def recorded(home: Path) -> Iterator[tuple[str, Process]]:
    """Yield the live processes of all trials of a state folder, each with its trial's number."""
    for path in (home / FOLDER).glob("*.json"):
        trial, processes = _read(path)
        for process in processes:
            yield trial, process


def forget_ended(home: Path) -> None:
    """Remove the records of which no process lives."""
    for path in (home / FOLDER).glob("*.json"):
        if not _read(path)[1]:
            _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[str, list[Process]]:
    document = read_json(path) or {}
    if document.get("boot") != boot_and_namespace():  # its ids mean nothing here
        return "", []
    try:
        processes = [Process(int(pid), int(ticks)) for pid, ticks in document["processes"]]
    except (KeyError, TypeError, ValueError):
        return "", []
    return str(document.get("trial") or "0"), [p for p in processes if is_alive(p)]


KILL_AFTER_S = 10.0
"""Seconds beyond its grace in which hermes-trial has to end; one that has not then hangs."""

FOLDER_VARIABLE = "HERMES_TRIAL_DIR"
_POLL_S = 0.02


def end_processes(folder: Path, supervisor: Process | None, wait_s: float) -> list[Process]:
    """Kill a trial's supervisor with all that belongs to it; return what did not end.

    The trial's reaper has half of that time to end what is below it: it misses nothing. What is
    left then is killed from here, the reaper too.
    """
    folder, record = folder.resolve(), own_record(folder.resolve())
    everyone = set(record.alive())
    if supervisor is not None:
        everyone |= {supervisor, *descendants(supervisor.pid)}
        kill(supervisor)
    reaped_by_s = time.monotonic() + wait_s / 2
    while any(map(is_alive, everyone)) and time.monotonic() < reaped_by_s:
        time.sleep(_POLL_S)
    everyone |= {*record.alive(), *marked(str(folder), FOLDER_VARIABLE)}
    left = end_all(everyone, wait_s / 2)
    if not left:
        record.remove_all()
    return left

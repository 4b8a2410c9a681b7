"""Locks whose holder hangs and has lost whoever could tell it to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_ops.trial.locks import BusyError, LockHolder, lock_file
from hermes_ops.trial.outcome import PREEMPTED
from hermes_ops.trial.processes.tree import Process, process_of
from tests.standby_server import wait_for
from tests.unit.trial.supervised import SupervisedTrial

HOLD = """
import os, signal, sys
from pathlib import Path
from hermes_ops.trial.locks import LockHolder, lock_file
parent = os.getppid()
holder = LockHolder.current(parent, Path(sys.argv[1]).parent)
if sys.argv[2] == "gone":
    holder = holder._replace(parent=holder.process._replace(started_ticks=1))
lock_file(Path(sys.argv[1]), 0.0, "it", holder)
print("held", flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pause()
"""


@pytest.fixture
def holders(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def hold(holders: list[subprocess.Popen[bytes]], path: Path, parent: str) -> Process:
    command = [sys.executable, "-c", HOLD, str(path), parent]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    holders.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    os.kill(process.pid, signal.SIGSTOP)
    found = process_of(process.pid)
    assert found is not None
    return found


def own(folder: Path) -> LockHolder:
    holder = LockHolder.current(os.getppid(), folder)
    assert holder is not None
    return holder


def test_a_holder_that_hangs_without_its_parent_is_killed(
    tmp_path: Path, holders: list[subprocess.Popen[bytes]]
) -> None:
    path = tmp_path / "trial" / "lock"
    process = hold(holders, path, "gone")
    handle = lock_file(path, 0.0, "it", own(tmp_path), hang_s=0.1)
    assert process_of(process.pid) != process
    assert os.pread(handle, 4, 0)
    os.close(handle)


@pytest.mark.parametrize("hang_s", [0.0, 0.2])
def test_a_holder_whose_parent_lives_keeps_its_lock(
    tmp_path: Path, holders: list[subprocess.Popen[bytes]], hang_s: float
) -> None:
    path = tmp_path / "trial" / "lock"
    process = hold(holders, path, "kept")
    with pytest.raises(BusyError, match="it is still held by another process"):
        lock_file(path, 0.0, "it", own(tmp_path), hang_s)
    assert process_of(process.pid) == process


def test_a_note_that_means_nothing_here_kills_nobody(
    tmp_path: Path, holders: list[subprocess.Popen[bytes]]
) -> None:
    path = tmp_path / "trial" / "lock"
    process = hold(holders, path, "gone")
    for note in ("", "{", "[]", '{"boot": "another", "holder": [[1, 1], [1, 1], "/"]}', "\0" * 9):
        path.write_text(note)
        with pytest.raises(BusyError):
            lock_file(path, 0.0, "it", own(tmp_path), hang_s=0.0)
    assert process_of(process.pid) == process


def test_a_note_that_cannot_be_written_leaves_no_note_of_an_earlier_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier holder's folder may belong to a trial that runs on another GPU by now."""
    path = tmp_path / "lock"
    os.close(lock_file(path, 0.0, "it", own(tmp_path / "earlier")))
    assert b"earlier" in path.read_bytes()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    os.close(lock_file(path, 0.0, "it", own(tmp_path / "later")))
    assert path.read_bytes() == b""


def test_a_trial_that_is_stopped_while_it_waits_for_its_lock_is_preempted(tmp_path: Path) -> None:
    trial = SupervisedTrial(tmp_path)
    handle = lock_file(trial.folder / "lock", 0.0, "it")
    process = trial.supervise(["--lock-wait", "120"], ["true"])
    wait_for((trial.folder / "checkpoints").exists)  # made just before it waits
    process.terminate()
    assert process.wait() == PREEMPTED
    os.close(handle)
    trial.close()

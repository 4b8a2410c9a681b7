"""One writer at a time: locks on the trial's folder and its GPUs, and the fence of lease epochs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from hermes_ops.trial.files import Folder, replace_file
from hermes_ops.trial.processes.record import end_processes
from hermes_ops.trial.processes.tree import Process, boot_and_namespace, is_alive, process_of

RESTART_EPOCH_VARIABLE = "HERMES_BEGAN_ANEW"
"""The lease epoch with which the trial began from scratch; nothing older of it is used."""

_END_S = 10.0
_HOLDER_BYTES = 65_536


class BusyError(Exception):
    """Another holds what this segment needs, or its lease is stale: no fault of the script."""


class LockHolder(NamedTuple):
    """The holder of a lock: a process, its parent when it took the lock, and its trial's folder."""

    process: Process
    parent: Process | None
    folder: str

    @classmethod
    def current(cls, parent: int, folder: Path) -> LockHolder | None:
        """Return this process as a holder; None where the kernel does not say when it began."""
        process = process_of(os.getpid())
        return None if process is None else cls(process, process_of(parent), str(folder))

    @property
    def is_orphan(self) -> bool:
        """Tell whether it was to end: nobody is there any more who could tell it anything."""
        lost_its_parent = self.parent is not None and not is_alive(self.parent)
        return lost_its_parent or not is_alive(self.process)


def lock_file(
    path: Path, wait_s: float, what: str, holder: LockHolder | None = None, hang_s: float = 0.0
) -> int:
    """Lock `path` and return its descriptor, to be kept open; BusyError after `wait_s` seconds.

    `holder` is noted in the file. One that has lost its parent has `hang_s` seconds to end, and is
    then killed with its trial's processes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:  # a link would lock, or even make, another file
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise BusyError(f"{what} cannot be locked: {path} is a link, remove it") from None
    if _lock(handle, wait_s) or (holder is not None and _lock_after_orphan(handle, hang_s)):
        if holder is not None:
            _record_holder(handle, holder)
        return handle
    os.close(handle)
    raise BusyError(f"{what} is still held by another process ({path})")


def _lock(handle: int, wait_s: float) -> bool:
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.02)
        else:
            return True


def _lock_after_orphan(handle: int, hang_s: float) -> bool:
    """Lock what an orphan holds, killing it if it does not end by itself; False for any other."""
    holder = _recorded_holder(handle)
    if holder is None or not holder.is_orphan:
        return False
    if _lock(handle, hang_s):
        return True
    if _recorded_holder(handle) != holder:  # another one has been quicker
        return False
    alive = holder.process if is_alive(holder.process) else None
    end_processes(Path(holder.folder), alive, _END_S)
    return _lock(handle, _END_S)


def _record_holder(handle: int, holder: LockHolder) -> None:
    data = json.dumps({"boot": boot_and_namespace(), "holder": holder}).encode()
    os.ftruncate(handle, 0)  # first: whoever held it before must not be taken for its holder
    with contextlib.suppress(OSError):  # a full disk
        os.pwrite(handle, data, 0)


def _recorded_holder(handle: int) -> LockHolder | None:
    """Return who has noted itself; None of another boot of the machine, or without any."""
    try:
        document = json.loads(os.pread(handle, _HOLDER_BYTES, 0))
        ids, parent, folder = document["holder"]
        holder = Process(int(ids[0]), int(ids[1]))
        other = Process(int(parent[0]), int(parent[1])) if parent else None
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    is_ours = document.get("boot") == boot_and_namespace()
    return LockHolder(holder, other, str(folder)) if is_ours else None


def lock_gpus(
    directory: Path,
    gpus: tuple[str, ...],
    wait_s: float,
    holder: LockHolder | None,
    hang_s: float,
) -> list[int]:
    """Lock each GPU's file, lowest first; none stays locked if one cannot be had."""
    held: list[int] = []
    try:
        for gpu in sorted(gpus):
            path = directory / f"{gpu}.lock"
            held.append(lock_file(path, wait_s, f"GPU {gpu}", holder, hang_s))
    except BaseException:
        for handle in held:
            os.close(handle)
        raise
    return held


def newest_epoch(folder: Folder) -> int:
    """Return the greatest lease epoch seen in the trial's folder; -1 before the first."""
    try:
        return int(folder.epoch.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1


def fence(folder: Folder, epoch: int) -> None:
    """Refuse a lease epoch below one seen before; remember this one. Hold the folder's lock."""
    newest = newest_epoch(folder)
    if epoch < newest:
        root = folder.root
        raise BusyError(f"the lease epoch {epoch} is stale: {newest} has been seen in {root}")
    if epoch > newest:
        replace_file(folder.epoch, str(epoch).encode(), durable=True)

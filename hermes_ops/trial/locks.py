"""One writer at a time: locks on the trial's folder and its GPUs, and the fence of lease epochs."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from hermes_ops.trial.files import Folder


class BusyError(Exception):
    """Another holds what this segment needs, or its lease is stale: no fault of the script."""


def take(path: Path, wait_s: float, what: str) -> int:
    """Lock `path` and return its descriptor, to be kept open; BusyError after `wait_s` seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:  # a link would lock, or even make, another file
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise BusyError(f"{what} cannot be locked: {path} is a link, remove it") from None
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                os.close(handle)
                raise BusyError(f"{what} is still held by another process ({path})") from None
            time.sleep(0.02)
        else:
            return handle


def take_gpus(directory: Path, gpus: tuple[str, ...], wait_s: float) -> list[int]:
    """Lock each GPU's file, lowest first; none stays locked if one cannot be had."""
    held: list[int] = []
    try:
        for gpu in sorted(gpus):
            held.append(take(directory / f"{gpu}.lock", wait_s, f"GPU {gpu}"))
    except BaseException:
        for handle in held:
            os.close(handle)
        raise
    return held


def fence(folder: Folder, epoch: int) -> None:
    """Refuse a lease epoch below one seen before; remember this one. Hold the folder's lock."""
    try:
        seen = int(folder.epoch.read_text(encoding="ascii"))
    except (OSError, ValueError):
        seen = -1
    if epoch < seen:
        raise BusyError(f"the lease epoch {epoch} is stale: {seen} has been seen in {folder.root}")
    if epoch > seen:
        temporary = folder.epoch.with_name(f".epoch.{os.getpid()}.tmp")
        with open(temporary, "w", encoding="ascii") as stream:
            stream.write(str(epoch))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, folder.epoch)

"""How much space a disk has left, and which errors of a write say that it has none."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
DISK_ERRNOS = (*FULL_ERRNOS, errno.EROFS, errno.EIO)
FULL_FREE_BYTES = 16 * 1024**2
FULL_FREE_SHARE = 0.02  # of a small disk
FULL_FREE_FILES = 16
_UNITS, _STEP = ("B", "KiB", "MiB", "GiB", "TiB"), 1024


class DiskSpace(NamedTuple):
    """The free space on the disk of a folder for this user.

    `free_files` is None where the file system has no limit on the number of files.
    """

    folder: Path
    free_bytes: int
    total_bytes: int
    free_files: int | None

    @property
    def is_full(self) -> bool:
        """Tell whether next to nothing can be written any more."""
        return not self.has(min(FULL_FREE_BYTES, int(FULL_FREE_SHARE * self.total_bytes)))

    def has(self, wanted_bytes: int) -> bool:
        """Tell whether that many bytes, and some files, can still be written."""
        return self.free_bytes >= wanted_bytes and not self._lacks_files

    @property
    def _lacks_files(self) -> bool:
        return self.free_files is not None and self.free_files < FULL_FREE_FILES

    def __str__(self) -> str:
        free = f"{format_bytes(self.free_bytes)} free of {format_bytes(self.total_bytes)}"
        if self._lacks_files:
            free += f", room for {self.free_files} more files"
        return free


def space_of(folder: Path) -> DiskSpace | None:
    """Return the space on the disk of a folder; None if that cannot be known."""
    try:
        stats = os.statvfs(folder)
    except OSError:
        return None
    return DiskSpace(
        Path(folder),
        stats.f_bavail * stats.f_frsize,
        stats.f_blocks * stats.f_frsize,
        stats.f_favail if stats.f_files else None,
    )


def disks_of(folders: Iterable[Path]) -> list[DiskSpace]:
    """Return the space on each disk that the folders lie on, in their order, each disk once."""
    by_device: dict[int, DiskSpace] = {}
    for folder in folders:
        try:
            device = os.stat(folder).st_dev
        except OSError:
            continue
        space = space_of(folder)
        if space is not None and device not in by_device:
            by_device[device] = space
    return list(by_device.values())


def format_bytes(size_bytes: float) -> str:
    """Return a number of bytes as a person reads it: `0 B`, `1.5 KiB`, `512 MiB`."""
    size, unit = float(size_bytes), 0
    while size >= _STEP and unit < len(_UNITS) - 1:
        size, unit = size / _STEP, unit + 1
    digits = 0 if unit == 0 or size >= 100 else 1
    return f"{size:.{digits}f} {_UNITS[unit]}"


def write_remedy(error: OSError) -> str:
    """Return what a person can do about a write that failed with this error."""
    if error.errno in FULL_ERRNOS:
        return "free some space on that disk, or raise its quota"
    if error.errno == errno.EROFS:
        return "mount that file system for writing; after an error of the disk it is read-only"
    if error.errno == errno.EIO:
        return "check that disk: the machine's log says more"
    return "correct its owner and permissions"

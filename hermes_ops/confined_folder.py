"""A folder with untrusted content: its files are opened without following any link.

A training script may leave symbolic links, pipes, devices or endless files in its trial's folder.
All code outside the trial reads and writes there through this module: it refuses whatever is not a
regular file inside the folder, and limits the size of what is read at once. The path of the folder
itself is trusted; its last component must not be a link either.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hermes_ops.errors import HermesError

DOCUMENT_BYTES = 64 << 20
"""The greatest file that is read at once."""

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe blocks nobody
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class NotConfinedError(HermesError):
    """A name in the folder is a link, a device, a pipe, or a file that is too large."""


@dataclass(frozen=True, slots=True)
class ConfinedFolder:
    """The folder; names are relative to it, with `/`."""

    root: Path

    def open(self, name: str) -> BinaryIO:
        """Open a regular file for reading.

        FileNotFoundError when there is none; NotConfinedError when it, or a folder on the way to
        it, is a link or something else.
        """
        *folders, leaf = _parts(name)
        handle = self._open_folder(folders, name)
        try:
            file = self._open_at(leaf, _READ, handle, name)
        finally:
            os.close(handle)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise self._refused(name, "is not a regular file")
        return os.fdopen(file, "rb")

    def read(self, name: str, most_bytes: int = DOCUMENT_BYTES) -> bytes:
        """Return a file's content; errors as `open`, and NotConfinedError beyond `most_bytes`."""
        with self.open(name) as stream:
            data = stream.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise self._refused(name, f"has more than {most_bytes:,} bytes")
        return data

    def replace(self, name: str, data: bytes) -> None:
        """Replace whatever has that name by a file, atomically."""
        *folders, leaf = _parts(name)
        temporary = f".{leaf}.{os.getpid()}.tmp"
        handle = self._open_folder(folders, name)
        try:
            _unlink(temporary, handle)
            with os.fdopen(os.open(temporary, _CREATE, 0o644, dir_fd=handle), "wb") as stream:
                stream.write(data)
            os.replace(temporary, leaf, src_dir_fd=handle, dst_dir_fd=handle)
        except OSError:
            _unlink(temporary, handle)
            raise
        finally:
            os.close(handle)

    def touch(self, name: str) -> None:
        """Set a file's time to now, making it if need be; nothing happens to what a link names."""
        *folders, leaf = _parts(name)
        handle = self._open_folder(folders, name)
        try:
            file = self._open_at(leaf, _READ | os.O_CREAT, handle, name)
            try:
                os.utime(file)
            finally:
                os.close(file)
        finally:
            os.close(handle)

    def files(self) -> Iterator[str]:
        """Yield the names of all regular files below the folder, sorted; links are left out."""
        file_names: list[str] = []
        for parent, folders, names, handle in os.fwalk(self.root, follow_symlinks=False):
            folders.sort()
            for name in names:
                if stat.S_ISREG(os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode):
                    file_names.append(Path(parent, name).relative_to(self.root).as_posix())
        yield from sorted(file_names)

    def left_out(self) -> Iterator[str]:
        """Yield the names of what is neither a regular file nor a folder, links first of all."""
        for parent, folders, names, handle in os.fwalk(self.root, follow_symlinks=False):
            for name in (*folders, *names):
                mode = os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    yield Path(parent, name).relative_to(self.root).as_posix()

    def size_bytes(self, name: str) -> int:
        """Return a regular file's size; errors as `open`."""
        with self.open(name) as stream:
            return os.fstat(stream.fileno()).st_size

    def has(self, name: str) -> bool:
        """Return whether a regular file of that name is inside the folder."""
        try:
            self.open(name).close()
        except (OSError, NotConfinedError):
            return False
        return True

    def _open_folder(self, folders: list[str], name: str) -> int:
        try:
            handle = os.open(self.root, _FOLDER)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise NotConfinedError(_message(self.root, "is a link or no folder")) from None
            raise
        for folder in folders:
            try:
                inner = self._open_at(folder, _FOLDER, handle, name)
            finally:
                os.close(handle)
            handle = inner
        return handle

    def _open_at(self, leaf: str, flags: int, handle: int, name: str) -> int:
        try:
            return os.open(leaf, flags, 0o644, dir_fd=handle)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                raise self._refused(name, "is a link, or leads through one") from None
            raise

    def _refused(self, name: str, fact: str) -> NotConfinedError:
        return NotConfinedError(_message(self.root / name, fact))


def confined(path: Path) -> tuple[ConfinedFolder, str]:
    """Return the folder of a file directly inside it, and the file's name."""
    return ConfinedFolder(path.parent), path.name


def _message(path: Path, fact: str) -> str:
    return (
        f"{path} cannot be read: it {fact}. Only regular files inside a trial's folder are read; "
        "let the script write a copy."
    )


def _parts(name: str) -> list[str]:
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r} is no path inside a folder")
    return parts


def _unlink(name: str, handle: int) -> None:
    try:
        os.unlink(name, dir_fd=handle)
    except FileNotFoundError:
        return

"""A working directory of the trial's own: a copy of the script's folder, made once.

What the script writes below its working directory is then no other trial's, and is there again
after a preemption. A file is cloned where the file system can, copied up to `LINKED_BYTES`, and
above that linked: such a link leads to the original, which is for reading only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hermes_ops.trial.files import read_json, write_json

SHARED, COPY = "shared", "copy"
LINKED_BYTES = 64 * 1024**2
MOST_FILES = 20_000
MOST_BYTES = 4 * 1024**3
LINKED_FOLDERS = frozenset((".git", ".hg", ".svn", "node_modules"))
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
_FICLONE = 0x40049409
_LINKS = "workspace.json"


class WorkspaceError(Exception):
    """The folder cannot be copied; the message says why and what to do."""


class WorkspaceEntry(NamedTuple):
    """One entry of the folder: its path there, how it is copied, and its size in bytes."""

    path: str
    kind: str  # "folder", "file" (a copy), "large" (a link unless it can be cloned), "link"
    size_bytes: int = 0
    target: str = ""


def survey(source: Path, without: Collection[Path] = ()) -> list[WorkspaceEntry]:
    """Return all that is to be copied, folders before what is in them.

    Raises: WorkspaceError where the folder is not there, cannot be read, or holds too much.
    """
    if not source.is_dir():
        raise WorkspaceError(f"the folder {source} does not exist: correct trial.directory")
    entries: list[WorkspaceEntry] = []
    total_bytes = 0
    try:
        for entry in _entries(source, {os.path.realpath(path) for path in without}):
            entries.append(entry)
            total_bytes += entry.size_bytes if entry.kind == "file" else 0
            if len(entries) > MOST_FILES or total_bytes > MOST_BYTES:
                raise WorkspaceError(
                    f"{source} holds too much to be copied for each trial (at most "
                    f"{MOST_FILES:,} files and {MOST_BYTES // 1024**3} GiB in files of up to "
                    f"{LINKED_BYTES // 1024**2} MiB): put data and environments elsewhere, or "
                    "give trial.directory a folder with the script alone"
                )
    except OSError as error:
        raise WorkspaceError(
            f"{error.filename or source} cannot be read ({error.strerror}): correct its rights, "
            "or put it elsewhere"
        ) from error
    return entries


def ensure_workspace(source: Path, root: Path, environment: Mapping[str, str]) -> Path:
    """Return the trial's own copy of `source`, made the first time; later it stays as it is.

    Raises: WorkspaceError, and OSError where the copy cannot be written.
    """
    place = root / "workspace"
    if place.is_dir():
        return place
    home = environment.get("HERMES_HOME")
    entries = survey(source, [root, *([Path(home)] if home else [])])
    fresh = root / ".workspace.new"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir(parents=True)
        links: dict[str, list[int]] = {}
        for entry in entries:
            _make(entry, source, fresh, links)
        write_json(root / _LINKS, {"links": links})
        os.replace(fresh, place)
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)  # its disk may be full of it
        raise
    return place


def written_originals(root: Path) -> list[str]:
    """Return the large originals that have been written since they were linked, each once."""
    links = (read_json(root / _LINKS) or {}).get("links") or {}
    changed = {path: now for path, then in links.items() if (now := _stamp(path)) != then}
    if changed:
        with contextlib.suppress(OSError):
            write_json(root / _LINKS, {"links": {**links, **changed}})
    return sorted(changed)


def _entries(source: Path, without: Collection[str]) -> Iterator[WorkspaceEntry]:
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        with os.scandir(source / folder) as members:
            for member in sorted(members, key=lambda m: m.name):
                path = os.path.join(folder, member.name)
                entry = _entry(source, path, member)
                if entry is None or os.path.realpath(member.path) in without:
                    continue
                yield entry
                if entry.kind == "folder":
                    waiting.append(path)


def _entry(source: Path, path: str, member: os.DirEntry[str]) -> WorkspaceEntry | None:
    if member.is_symlink():
        return WorkspaceEntry(path, "link", target=_target(source, path, os.readlink(member.path)))
    if member.is_dir():
        if member.name in LINKED_FOLDERS or _is_environment(member.path):
            return WorkspaceEntry(path, "link", target=os.path.abspath(member.path))
        return WorkspaceEntry(path, "folder")
    details = member.stat()
    if not stat.S_ISREG(details.st_mode):  # a socket, a pipe: of a process that runs
        return None
    kind = "large" if details.st_size > LINKED_BYTES else "file"
    return WorkspaceEntry(path, kind, details.st_size)


def _is_environment(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, mark)) for mark in _ENVIRONMENT_MARKS)


def _target(source: Path, path: str, target: str) -> str:
    """Return the target of a link in the copy: its counterpart there, or the original outside."""
    folder = os.path.dirname(os.path.join(source, path))
    whole = os.path.abspath(os.path.join(folder, target))
    inside = os.path.relpath(whole, source)
    if inside.split(os.sep)[0] == os.pardir:
        return whole
    return os.path.relpath(inside, os.path.dirname(path) or os.curdir)


def _make(entry: WorkspaceEntry, source: Path, fresh: Path, links: dict[str, list[int]]) -> None:
    old, new = os.path.abspath(source / entry.path), fresh / entry.path
    if entry.kind == "folder":
        new.mkdir()
    elif entry.kind == "link":
        os.symlink(entry.target, new)
    elif _cloned(old, new) or entry.kind == "file":
        shutil.copystat(old, new)
    else:
        os.symlink(old, new)
        links[old] = _stamp(old)


def _cloned(old: str, new: Path) -> bool:
    """Copy a file by sharing its blocks until they are written; else copy it if it is small."""
    with open(old, "rb") as reader, open(new, "wb") as writer:
        with contextlib.suppress(OSError):
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            return True
        if os.fstat(reader.fileno()).st_size <= LINKED_BYTES:
            shutil.copyfileobj(reader, writer, 1024**2)
            return True
    new.unlink()
    return False


def _stamp(path: str) -> list[int]:
    try:
        details = os.stat(path)
    except OSError:
        return []
    return [details.st_size, details.st_mtime_ns]

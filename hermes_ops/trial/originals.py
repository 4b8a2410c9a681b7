"""A trial's own checkpoints as they are copied: what is there now, and what is known of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from hermes_ops.trial.copies import File
from hermes_ops.trial.files import Folder, read_json, write_json
from hermes_ops.trial.keeping import unfinished

MARK = "stored.json"


class Entry(NamedTuple):
    """One file or folder directly in the checkpoints' folder; paths are relative to that."""

    files: tuple[File, ...]
    folders: tuple[str, ...] = ()


Snapshot = dict[str, Entry]
"""The committed entries by name."""


def snapshot(checkpoints: Path) -> Snapshot:
    """What is committed there now; what vanishes meanwhile is left out."""
    found: Snapshot = {}
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(checkpoints)):
            if not unfinished(name):
                with contextlib.suppress(OSError):
                    found[name] = _entry(checkpoints, name)
    return found


def _entry(checkpoints: Path, name: str) -> Entry:
    path = checkpoints / name
    if not path.is_dir():
        return Entry((File.of(name, os.stat(path)),))
    files, folders = [], []
    for parent, _, names in os.walk(path):
        inside = os.path.relpath(parent, checkpoints)
        folders.append(inside)
        for file in names:
            seen = os.stat(os.path.join(parent, file))
            files.append(File.of(os.path.join(inside, file), seen))
    return Entry(tuple(sorted(files)), tuple(sorted(folders)))


def digest(entries: Snapshot) -> str:
    """A short name for exactly these files."""
    text = repr([entries[name] for name in sorted(entries)])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Mark(NamedTuple):
    """Whose checkpoints lie in the folder: the last segment's that trained on them.

    `tokens` are of the writers, at that epoch, whose copies are no newer than the folder; `copied`
    is the digest of what was copied or fetched last; not `sound`: a fetch was cut off in between.
    """

    epoch: int = -1
    tokens: tuple[str, ...] = ()
    sound: bool = True
    copied: str = ""

    @classmethod
    def read(cls, folder: Folder) -> Mark:
        """The folder's mark; that of an unknown origin where there is none."""
        known = read_json(folder.root / MARK) or {}
        tokens = known.get("tokens")
        return cls(
            int(known.get("epoch", -1)),
            tuple(str(t) for t in tokens) if isinstance(tokens, list) else (),
            bool(known.get("sound", True)),
            str(known.get("copied", "")),
        )

    def write(self, folder: Folder) -> None:
        """Put it there."""
        write_json(folder.root / MARK, self._asdict(), durable=True)

"""Checkpoints on a volume of their own, which only the pods on its node see.

Whoever empties a trial's folder, for a new beginning or at its end, does not reach them there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from hermes_ops.trial.files import Folder

MARK = "apart"
"""File of the trial's folder: the node on which its checkpoints lie, none of an earlier life."""

EMPTY_OPTION = "--empty"
"""First argument of hermes-trial where it runs no trial, but deletes what folders hold."""


def claim(folder: Folder, node: str) -> None:
    """Before the first segment of a trial: throw away what an earlier life of it has left."""
    mark = folder.root / MARK
    if not mark.exists():
        empty(folder.checkpoints)
        mark.write_text(node, encoding="utf-8")


def give_up(folder: Folder) -> None:
    """The trial has finished: delete its checkpoints, and that it has some."""
    if empty(folder.checkpoints):
        (folder.root / MARK).unlink()


def empty(checkpoints: Path) -> bool:
    """Delete what is in the folder, not the folder: a volume may be mounted there; True if gone."""
    try:
        for name in os.listdir(checkpoints):
            path = checkpoints / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def main(folders: Sequence[str]) -> int:
    """Delete these folders; 1 if one still holds something."""
    gone = True
    for name in folders:
        folder = Path(name)
        if empty(folder):
            with contextlib.suppress(OSError):
                folder.rmdir()
        else:
            gone = False
            print(f"hermes-trial: {folder} cannot be emptied", flush=True)
    return 0 if gone else 1

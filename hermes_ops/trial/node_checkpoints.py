"""Checkpoints on a volume of their own, which only the pods on its node see.

Emptying a trial's folder, for a restart from scratch or at its end, does not reach them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from hermes_ops.trial.files import Folder

MARK = "apart"
"""File of the trial's folder: the node on which its checkpoints lie, none of an earlier life."""

EMPTY_OPTION = "--empty"
"""First argument of hermes-trial where it runs no trial, but deletes what folders hold."""


def claim(folder: Folder, node: str) -> None:
    """Delete what a cleared run of the trial has left, before its first segment."""
    mark = folder.root / MARK
    if not mark.exists():
        delete_content(folder.checkpoints)
        mark.write_text(node, encoding="utf-8")


def release(folder: Folder) -> None:
    """Delete the checkpoints of a finished trial, and the mark that it has some."""
    if delete_content(folder.checkpoints):
        (folder.root / MARK).unlink()


def delete_content(folder: Path, keep: Collection[str] = ()) -> bool:
    """Delete what is in the folder, except for the names to `keep`; return whether it is gone.

    The folder itself stays: a volume may be mounted there.
    """
    try:
        for name in os.listdir(folder):
            if name in keep:
                continue
            path = folder / name
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
        if delete_content(folder):
            with contextlib.suppress(OSError):
                folder.rmdir()
        else:
            gone = False
            print(f"hermes-trial: {folder} cannot be emptied", flush=True)
    return 0 if gone else 1

"""Checkpoints on a volume of their own, which only the pods on its node see.

Whoever empties a trial's folder, for a new beginning or at its end, does not reach them there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from hermes_ops.trial.files import Folder

MARK = "apart"
"""File of the trial's folder: what lies in the checkpoints' volume is this trial's own."""


def claim(folder: Folder) -> None:
    """Before the first segment of a trial: throw away what an earlier life of it has left."""
    mark = folder.root / MARK
    if not mark.exists():
        empty(folder.checkpoints)
        mark.touch()


def empty(checkpoints: Path) -> None:
    """Delete everything in the folder, not the folder itself: it is where a volume is mounted."""
    with contextlib.suppress(OSError):
        for name in os.listdir(checkpoints):
            path = checkpoints / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()

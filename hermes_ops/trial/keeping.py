"""Which of a script's own checkpoints are kept: the newest ones and the best."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from hermes_ops.trial.files import read_json, write_json

KEEP_VARIABLE = "HERMES_KEEP_CHECKPOINTS"
"""How many checkpoints a trial keeps beside the best; without it a script's own all stay."""
UNFINISHED = (".tmp", ".part", ".partial", ".temp", "~")
_LAG_S = 0.15  # a value and the checkpoint written with it are this far apart at the most


def unfinished(name: str) -> bool:
    """Whether a file of that name is hidden, or not yet what it is to become."""
    return name.startswith(".") or name.endswith(UNFINISHED)


def entries(folder: Path) -> list[tuple[float, str]]:
    """The committed files and folders directly in `folder`: (Unix seconds, name), oldest first."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if not unfinished(name):
                with contextlib.suppress(OSError):
                    found.append((os.stat(folder / name).st_mtime, name))
    return sorted(found)


def surplus(names: Sequence[str], keep: int, best: str | None) -> list[str]:
    """What is to go of checkpoints, oldest first: all but the last `keep` and the best."""
    return [name for name in names[: max(0, len(names) - keep)] if name != best]


class Keeper:
    """Deletes a trial's older checkpoints; each entry of the folder counts as one.

    The best is the first one that was written with or after the best value of the objective. What
    it is stands in `kept.json`, for the segments to come.
    """

    def __init__(self, root: Path, checkpoints: Path, keep: int, direction: str | None) -> None:
        self._file = root / "kept.json"
        self._checkpoints = checkpoints
        self._keep = keep
        self._sign = -1.0 if direction == "maximize" else 1.0
        known = read_json(self._file) or {}
        self._loss: float | None = known.get("loss")
        self._best: str | None = known.get("best")
        self._fresh_s: float | None = None  # when a better value came that has no checkpoint yet

    def value(self, value: float, at_s: float) -> None:
        """The objective has this value, seen at that Unix time."""
        loss = self._sign * value
        if loss - loss == 0.0 and (self._loss is None or loss < self._loss):
            self._loss, self._fresh_s = loss, at_s

    def checkpointed(self) -> None:
        """There is a new checkpoint: delete what is no longer wanted."""
        found = entries(self._checkpoints)
        if self._fresh_s is not None:
            since_s = self._fresh_s - _LAG_S
            after = [name for written_s, name in found if written_s >= since_s]
            if after:
                self._best, self._fresh_s = after[0], None
                with contextlib.suppress(OSError):
                    write_json(self._file, {"loss": self._loss, "best": self._best})
        for name in surplus([name for _, name in found], self._keep, self._best):
            _remove(self._checkpoints / name)


def keeper(root: Path, checkpoints: Path) -> Keeper | None:
    """The keeper that the trial's environment asks for; None where all checkpoints stay."""
    asked = os.environ.get(KEEP_VARIABLE, "")
    if not asked.isdigit() or int(asked) < 1:
        return None
    return Keeper(root, checkpoints, int(asked), os.environ.get("HERMES_DIRECTION"))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()

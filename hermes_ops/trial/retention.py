"""Retention of a script's own checkpoints: the newest ones and the best."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from hermes_ops.trial.files import read_json, write_json

KEEP_VARIABLE = "HERMES_KEEP_CHECKPOINTS"
"""How many checkpoints a trial keeps besides the best; without it a script's own all stay."""
UNFINISHED = (".tmp", ".part", ".partial", ".temp", "~")
_LAG_S = 0.15  # a value and the checkpoint written with it are this far apart at the most


def unfinished(name: str) -> bool:
    """Tell whether a file of that name is hidden, or not yet what it is to become."""
    return name.startswith(".") or name.endswith(UNFINISHED)


def entries(folder: Path) -> list[tuple[float, str]]:
    """Return the committed entries directly in `folder`: (Unix seconds, name), oldest first."""
    committed = []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if not unfinished(name):
                with contextlib.suppress(OSError):
                    committed.append((os.stat(folder / name).st_mtime, name))
    return sorted(committed)


def targets(folder: Path) -> dict[str, str]:
    """Return the target of each link in `folder` that leads to another entry of that folder."""
    inside: dict[str, str] = {}
    root = os.path.realpath(folder)
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_symlink():
                target = os.path.relpath(os.path.realpath(entry.path), root).split(os.sep)[0]
                if target not in (os.curdir, os.pardir, entry.name):
                    inside[entry.name] = target
    return inside


def surplus(names: Sequence[str], keep: int, best: str | None) -> list[str]:
    """Return the checkpoints to delete, oldest first: all but the last `keep` and the best."""
    return [name for name in names[: max(0, len(names) - keep)] if name != best]


class CheckpointRetention:
    """Delete a trial's older checkpoints; each entry of the folder counts as one.

    A link to another entry (`latest`) is no checkpoint: it stays, and so does what it leads to.
    The best is the first one that was written with or after the best value of the objective. What
    it is stands in `kept.json`, for the segments to come.
    """

    def __init__(self, root: Path, checkpoints: Path, keep: int, direction: str | None) -> None:
        self._file = root / "kept.json"
        self._checkpoints = checkpoints
        self._keep = keep
        self._sign = -1.0 if direction == "maximize" else 1.0
        saved = read_json(self._file) or {}
        self._loss: float | None = saved.get("loss")
        self._best: str | None = saved.get("best")
        self._fresh_s: float | None = None  # when a better value came that has no checkpoint yet

    def value(self, value: float, at_s: float) -> None:
        """Note a value of the objective, seen at that Unix time."""
        loss = self._sign * value
        if loss - loss == 0.0 and (self._loss is None or loss < self._loss):
            self._loss, self._fresh_s = loss, at_s

    def checkpointed(self) -> None:
        """Note a new checkpoint, and delete those that are no longer wanted."""
        links = targets(self._checkpoints)
        present = [entry for entry in entries(self._checkpoints) if entry[1] not in links]
        if self._fresh_s is not None:
            since_s = self._fresh_s - _LAG_S
            after = [name for written_s, name in present if written_s >= since_s]
            if after:
                self._best, self._fresh_s = after[0], None
                with contextlib.suppress(OSError):
                    write_json(self._file, {"loss": self._loss, "best": self._best})
        for name in surplus([name for _, name in present], self._keep, self._best):
            if name not in links.values():
                _remove(self._checkpoints / name)


def retention_of(root: Path, checkpoints: Path) -> CheckpointRetention | None:
    """Return the retention that the trial's environment asks for; None where all stay."""
    count = os.environ.get(KEEP_VARIABLE, "")
    if not count.isdigit() or int(count) < 1:
        return None
    return CheckpointRetention(root, checkpoints, int(count), os.environ.get("HERMES_DIRECTION"))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()

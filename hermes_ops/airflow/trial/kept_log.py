"""What the triggerer has written into a task's log, kept until the task has written it itself.

Airflow's triggerer (3.3.2) begins its file of a task's log anew with each trigger of a try. So the
lines of a segment also go to a file beside the trial's folder, and the task repeats those of its
earlier segments before it defers once more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hermes_ops.airflow.folders import TrialFolder


@dataclass(slots=True)
class KeptLog:
    """Says each line, and keeps it; a segment that is followed from its beginning is kept anew."""

    path: Path
    say: Callable[[str], None]
    _file: int | None = None
    _over: bool = False

    @classmethod
    def of(cls, folder: TrialFolder, epoch: int, say: Callable[[str], None]) -> KeptLog:
        """That of one segment."""
        return cls(folder.path.with_name(f"{folder.path.name}.{epoch}.log"), say)

    def __call__(self, line: str) -> None:
        """Say it and keep it; where it cannot be kept it is said alone."""
        if self._over:
            return
        self.say(line)
        with contextlib.suppress(OSError):
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
                self._file = os.open(self.path, flags, 0o644)
            os.write(self._file, f"{line}\n".encode(errors="replace"))

    def close(self) -> None:
        """Say no more: somebody else looks after the pod, or it is gone."""
        self._over = True
        if self._file is not None:
            os.close(self._file)
            self._file = None


def taken(folder: TrialFolder) -> Iterator[str]:
    """The kept lines of all segments, oldest first; each file is deleted once it was read."""
    for path in _files(folder):
        with path.open(errors="replace") as lines:
            for line in lines:
                yield line.rstrip("\n")
        path.unlink(missing_ok=True)


def forget(folder: TrialFolder) -> None:
    """Delete what is kept: the trial has ended, and its last segment's lines stand in its log."""
    for path in _files(folder):
        path.unlink(missing_ok=True)


def _files(folder: TrialFolder) -> list[Path]:
    def epoch(path: Path) -> int:
        return int(path.name.split(".")[-2])

    found = folder.path.parent.glob(f"{folder.path.name}.*.log")
    return sorted((p for p in found if p.name.split(".")[-2].isdigit()), key=epoch)

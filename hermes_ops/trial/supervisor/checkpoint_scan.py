"""Looks for checkpoints that a script writes by itself, without the hook."""

from __future__ import annotations

import time
from collections.abc import Callable

from hermes_ops.trial.files import Folder
from hermes_ops.trial.segment_records import newest_checkpoint_s

OUTPUT_LAG_S = 0.15
"""Seconds within which a line that was written together with a checkpoint has been read."""

PERIOD_S = 1.0


class CheckpointScan:
    """Finds each new checkpoint once the values that were written with it have been read.

    The step of a checkpoint is the last one that was reported by then. A script that saves more
    often than `OUTPUT_LAG_S` never rests: what was the newest at the first look counts.

    `is_searching` tells whether lines that had come by a Unix time may still hold values.
    """

    def __init__(
        self,
        folder: Folder,
        is_searching: Callable[[float], bool],
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._is_searching = is_searching
        self._clock = clock  # that of the files
        self._timer = timer  # stays right when the clock is set
        self._due_s = 0.0
        self._unread_s: float | None = None  # of a checkpoint whose values may not be read yet
        self._noticed_s = 0.0  # when that was seen; the clock of its disk may be ahead

    def hasten(self) -> None:
        """Scan at the next call: there are new values, so there may be a checkpoint."""
        self._due_s = 0.0

    def find(self, known_s: float | None, *, final: bool) -> float | None:
        """Return the Unix time of a checkpoint other than that of `known_s`; None: no new one.

        It looks once in `PERIOD_S`; at the script's end (`final`) at once, and waits for nothing.
        """
        look_s = self._timer()
        if not final and look_s < self._due_s:
            return None
        self._due_s = look_s + PERIOD_S
        newest_s = newest_checkpoint_s(self._folder)
        if newest_s is None or newest_s == known_s:
            self._unread_s = None
            return None
        if final or self._unread_s is None or newest_s < self._unread_s:
            self._unread_s, self._noticed_s = newest_s, self._clock()
        read_s = min(self._unread_s, self._noticed_s) + OUTPUT_LAG_S
        if not final and (self._clock() < read_s or self._is_searching(read_s)):
            self._due_s = look_s + OUTPUT_LAG_S
            return None
        found_s, self._unread_s = self._unread_s, None
        return found_s

"""A container's log as it grows, each line once, over every break of the connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hermes_ops.errors import HermesError
from hermes_ops.kubernetes.api import Pods

PAUSE_S = 0.5
OVERLAP_S = 5
"""Seconds of the log that are asked for again after a break; what was seen is left out."""


@dataclass(slots=True)
class LogFollower:
    """Hands each line of a pod's log to `emit`, in the background, until its end."""

    pods: Pods
    name: str
    emit: Callable[[str], None]
    on_end: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    _over: threading.Event = field(default_factory=threading.Event)
    _last: tuple[str, str] = ("", "")
    _last_at_s: float | None = None
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, if it has not."""
        if self._thread is None:
            self._thread = threading.Thread(target=self.run, daemon=True)
            self._thread.start()

    def finish(self, patience_s: float) -> None:
        """The container has ended: wait for the rest of its log, so long at most."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(patience_s)

    def run(self) -> None:
        """Follow until a whole reading was begun after the container's end."""
        while True:
            last_reading = self._over.is_set()
            whole = self._read()
            self.on_end()
            if last_reading or (whole and self._over.is_set()):
                return
            self._over.wait(PAUSE_S)

    def _read(self) -> bool:
        since_s = None
        if self._last_at_s is not None:
            since_s = int(self.clock() - self._last_at_s) + OVERLAP_S
        try:
            for line in self.pods.log(self.name, since_s):
                stamp, _, text = line.partition(" ")
                moment = _moment(stamp)
                if moment > self._last:
                    self._last, self._last_at_s = moment, self.clock()
                    self.emit(text)
        except HermesError:  # it is read again from where it broke off
            return False
        return True


def _moment(stamp: str) -> tuple[str, str]:
    """A time of the log in a form that sorts: seconds, then nanoseconds in nine digits."""
    seconds, _, fraction = stamp.rstrip("Z").partition(".")
    return seconds, fraction.ljust(9, "0")

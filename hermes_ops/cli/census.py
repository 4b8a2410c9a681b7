"""Counts the GPUs that live trial processes hold, from the processes alone."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

PERIOD_S = 0.25


def gpus_of_live_trials(home: Path) -> list[tuple[int, ...]]:
    """The GPU indices of each live `hermes-trial` of this home, from its processes alone."""
    import psutil

    from hermes_ops.stack.processes import leaders, members

    held: list[tuple[int, ...]] = []
    for leader in leaders(members(home)):
        try:
            gpus = leader.process.environ().get("HERMES_GPUS", "")
        except (psutil.Error, OSError):  # it has just ended
            continue
        held.append(tuple(int(g) for g in gpus.split(",") if g))
    return held


@dataclass(slots=True)
class Census:
    """The greatest number of GPUs in use at once while it watched."""

    home: Path
    most: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Count in the background."""
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def close(self) -> int:
        """Stop counting; the greatest number seen."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        return self.most

    def _loop(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self.most = max(self.most, sum(len(g) for g in gpus_of_live_trials(self.home)))

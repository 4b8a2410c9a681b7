"""Which machines of a pool have a worker now: the executor's own workers are asked, in a thread.

A machine counts while exactly one worker takes its queue. It is away once that has not been seen
for `SETTLE_S`: a worker that restarts, or answers late, costs no trial its GPUs. While nobody
answers for the executor, what was seen last holds: a broker that is away says nothing of a machine,
and workers take up to `RECONNECT_S` to come back to it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hermes_ops.airflow.machines import MachineSlots, queue_of
from hermes_ops.errors import Unavailable

log = logging.getLogger(__name__)

SETTLE_S = 10.0
PERIOD_S = 2.0

RECONNECT_S = 40.0
"""Seconds that workers may take to come back to a broker that was away, as they pause meanwhile."""


class WorkerRegistry(Protocol):
    """The workers that an executor knows."""

    def takers(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the workers that take each queue; Unavailable if nobody answers."""


@dataclass(frozen=True, slots=True)
class Absence:
    """A machine that is away: since when, in Unix seconds, and why."""

    since_s: float
    reason: str


@dataclass(slots=True)
class MachineWatch:
    """Remembers when each machine was last seen; safe in threads."""

    machines: MachineSlots
    registry: WorkerRegistry
    clock: Callable[[], float] = time.time
    _seen_s: dict[str, float] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)
    _begun_s: float = 0.0
    _looked_s: float | None = None
    _complaint: str = ""
    _away: frozenset[str] = frozenset()
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._begun_s = self.clock()

    def look(self) -> None:
        """Ask for the workers once, and remember the answer."""
        try:
            takers = self.registry.takers()
        except Unavailable as error:
            if str(error) != self._complaint:
                log.warning("The workers are not known now: %s", error)
            self._complaint = str(error)
            return
        now_s = self.clock()
        with self._lock:
            if self._complaint and self._looked_s is not None:
                for name in self.machines.names:
                    if name not in self._away:
                        self._seen_s[name] = now_s + RECONNECT_S - SETTLE_S
            self._complaint, self._looked_s = "", now_s
            for name in self.machines.names:
                reason = trouble_of(name, takers.get(queue_of(name), ()))
                if reason:
                    self._reasons[name] = reason
                else:
                    self._seen_s[name] = now_s
        self._log_changes()

    def away(self) -> dict[str, Absence]:
        """Return the machines that are away; Unavailable before the first answer."""
        with self._lock:
            if self._looked_s is None:
                raise Unavailable(
                    "the workers of the machines are not known yet: "
                    f"{self._complaint or 'the executor is being asked'}"
                )
            return {
                name: Absence(self._last_s(name), self._reasons.get(name, ""))
                for name in self.machines.names
                if self._looked_s - self._last_s(name) > SETTLE_S
            }

    def _last_s(self, name: str) -> float:
        """Return when a machine was seen last; one that was never seen counts from the start."""
        return self._seen_s.get(name, self._begun_s)

    def _log_changes(self) -> None:
        away = self.away()
        for name in sorted(away.keys() - self._away):
            log.warning("The machine %s is away: %s", name, away[name].reason)
        for name in sorted(self._away - away.keys()):
            log.info("The machine %s is back", name)
        self._away = frozenset(away)

    def start(self) -> None:
        """Ask for the workers periodically, in a thread."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="machines")
        self._thread.start()

    def close(self) -> None:
        """End the thread after its look; do not wait for it."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            except Exception:  # whatever a broker's client raises: the next look may do better
                log.exception("The workers could not be asked")
            self._stop.wait(PERIOD_S)


def trouble_of(machine: str, workers: Sequence[str]) -> str:
    """Return why a machine whose queue these workers take cannot have trials; empty if it can."""
    queue = queue_of(machine)
    if not workers:
        return f"no worker takes its queue {queue}"
    if len(workers) > 1:
        names = ", ".join(sorted(workers))
        return f"{len(workers)} workers take its queue {queue}: end all but one of {names}"
    return ""

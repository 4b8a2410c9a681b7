"""Shortest remaining time first: the baseline that knows how long each job still runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.model import Job
from hermes_ops.core.oracle import Oracle
from hermes_ops.policies.priority import Key, PriorityPolicy


@dataclass(frozen=True, slots=True)
class Srtf(PriorityPolicy):
    """Serve the job with the least time left on the GPUs it asked for.

    Each job that still fits runs (greedy fill); ties go to the first submitted. Source: the
    clairvoyant baseline of Tiresias (NSDI 2019). It needs an oracle.
    """

    oracle: Oracle
    name: ClassVar[str] = "srtf"
    measure: ClassVar[str] = "time left"
    term: ClassVar[str] = "remaining_s"
    preempts: ClassVar[bool] = True

    def key(self, job: Job, now_s: float) -> Key:
        """Return the seconds that the job still runs."""
        return self.oracle.remaining_s(job, now_s)

"""What only a clairvoyant baseline may know, handed to it by the workload."""

from __future__ import annotations

from typing import Protocol

from hermes_ops.core.model import Job


class Oracle(Protocol):
    """The future of each job. A policy with a field named `oracle` runs in a simulation only."""

    def remaining_s(self, job: Job, now_s: float) -> float:
        """Seconds the job still runs, alone on the GPUs that it asked for; at least 0."""
        ...

    def final_loss(self, job: Job) -> float:
        """The lowest loss that the job will have shown at its end; inf for a job without one."""
        ...

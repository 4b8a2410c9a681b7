"""Shortest remaining service first: time left times GPUs, known beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.model import Job, Plan, Snapshot
from hermes_ops.core.oracle import Oracle
from hermes_ops.policies.srtf import shortest_first


@dataclass(frozen=True, slots=True)
class Srsf:
    """Serve the job with the least GPU time left: seconds times GPUs.

    Each job that still fits runs (greedy fill). Ties go to the job with fewer GPUs, then to the
    first submitted: a choice that reproduces the public simulator of Tiresias, where a job that
    was behind stays behind when the two are even. Source: the clairvoyant baseline of Tiresias
    (NSDI 2019). It needs an oracle.
    """

    oracle: Oracle
    name: ClassVar[str] = "srsf"
    preempts: ClassVar[bool] = True

    def initial(self) -> None:
        """None: it remembers nothing."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Serve the jobs in the order of what is left of them."""

        def left(job: Job) -> tuple[float, int]:
            left_s = self.oracle.remaining_s(job, snapshot.time_s)
            return left_s * job.min_gpus, job.min_gpus

        return shortest_first(snapshot, left, "GPU time", "remaining_gpu_s"), memory

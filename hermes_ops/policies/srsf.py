"""Shortest remaining service first: time left times GPUs, known beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.model import Job
from hermes_ops.core.oracle import Oracle
from hermes_ops.policies.priority import Key, PriorityPolicy


@dataclass(frozen=True, slots=True)
class Srsf(PriorityPolicy):
    """Serve the job with the least GPU time left: seconds times GPUs.

    Each job that still fits runs (greedy fill). Ties go to the job with fewer GPUs, then to the
    first submitted: a choice that reproduces the public simulator of Tiresias, where a job that
    was behind stays behind when the two are even. Source: the clairvoyant baseline of Tiresias
    (NSDI 2019). It needs an oracle.
    """

    oracle: Oracle
    name: ClassVar[str] = "srsf"
    measure: ClassVar[str] = "GPU time left"
    term: ClassVar[str] = "remaining_gpu_s"
    preempts: ClassVar[bool] = True

    def key(self, job: Job, now_s: float) -> Key:
        """Return the GPU-seconds that the job still needs, then its GPUs."""
        return self.oracle.remaining_s(job, now_s) * job.min_gpus, job.min_gpus

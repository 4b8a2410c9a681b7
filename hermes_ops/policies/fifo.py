"""First in, first out: the baseline that never stops a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.model import Job, JobId, Reason, Snapshot, Term
from hermes_ops.policies.priority import Key, PriorityPolicy, ServiceOrder


@dataclass(frozen=True, slots=True)
class Fifo(PriorityPolicy):
    """Serve jobs by submission time, then number; the first that does not fit blocks the rest.

    A job gets `min_gpus`. Only a job that needs more GPUs than the whole pool has is passed over.
    """

    name: ClassVar[str] = "fifo"
    backfill: ClassVar[bool] = False

    def key(self, job: Job, now_s: float) -> Key:  # noqa: ARG002 - interface
        """Return the submission time."""
        return job.submitted_s

    def order(self, snapshot: Snapshot) -> tuple[Sequence[Job], Mapping[JobId, Key]]:
        """Return the queue as it is: it is in order of submission already."""
        return snapshot.queue, {}

    def reason(self, job: Job, is_granted: bool, service: ServiceOrder) -> Reason:
        """Return the reason in terms of the place in the line."""
        if job.holds_gpus:
            return PriorityPolicy.reason(self, job, is_granted, service)
        gpus = Term("GPUs needed", job.min_gpus)
        behind = service.first_waiting_before(job)
        if is_granted:
            change = "an earlier submission that fits"
            if behind is None:
                text = "starts: it was submitted before all that wait"
            else:
                text = f"starts: it fits on GPUs that {behind.id}, submitted earlier, cannot use"
            return Reason(text, (gpus,), behind.id if behind else None, change)
        terms = (Term("place in line", service.place_in_line(job)), gpus)
        text = f"waits behind {behind.id}" if behind else "waits for GPUs at the head of the line"
        return Reason(text, terms, behind.id if behind else None, "a running job ending")

"""First in, first out: the baseline that never stops a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.model import Grant, JobId, Phase, Plan, Reason, Snapshot, Term
from hermes_ops.core.order import by_submission
from hermes_ops.core.placement import holdings


@dataclass(frozen=True, slots=True)
class Fifo:
    """Serve jobs by submission time, then number; the first that does not fit blocks the rest.

    A job gets `min_gpus`. Only a job that needs more GPUs than the whole pool has is passed over.
    """

    name: ClassVar[str] = "fifo"
    preempts: ClassVar[bool] = False

    def initial(self) -> None:
        """None: it remembers nothing."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Keep what runs, then start the jobs at the head of the line."""
        held = holdings(snapshot)
        taken = {gpu for gpus in held.values() for gpu in gpus}
        free = sorted(gpu.index for gpu in snapshot.gpus if gpu.index not in taken)
        grants = [Grant(job, gpus) for job, gpus in held.items()]
        reasons = {job: Reason("runs until it ends: fifo never stops a job") for job in held}
        line: list[JobId] = []
        for job in by_submission(j for j in snapshot.jobs if j.phase is not Phase.ENDED):
            if job.holds_gpus and job.id not in held:
                reasons[job.id] = Reason("stops: its GPUs left the pool or another job has them")
            if job.phase not in (Phase.PENDING, Phase.WAITING):
                continue
            terms = (Term("place in line", len(line) + 1), Term("GPUs needed", job.min_gpus))
            if job.min_gpus > len(snapshot.gpus):
                reasons[job.id] = Reason("waits: it needs more GPUs than the pool has", terms)
            elif line or job.min_gpus > len(free):
                first = line[0] if line else None
                text = (
                    f"waits behind {first}" if first else "waits for GPUs at the head of the line"
                )
                reasons[job.id] = Reason(text, terms, first, "a running job ending")
                line.append(job.id)
            else:
                grants.append(Grant(job.id, tuple(free[: job.min_gpus])))
                free = free[job.min_gpus :]
                reasons[job.id] = Reason("starts: it was submitted before all that wait", terms)
        return Plan(tuple(grants), ranking=tuple(line), reasons=reasons), memory

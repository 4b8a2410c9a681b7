"""First in, first out: the baseline that never stops a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.fill import fill, in_line, plain_reason
from hermes_ops.core.model import JobId, LazyReasons, Plan, Reason, Snapshot, Term


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
        grants = fill(snapshot, snapshot.queue, backfill=False, preempt=False)
        ranking = in_line(snapshot, snapshot.queue, grants)
        first = ranking[0] if ranking else None
        starts = {grant.job for grant in grants}.difference(snapshot.stays)

        def explain(job_id: JobId) -> Reason:
            return _reason(snapshot, job_id, starts, first)

        reasons = LazyReasons(snapshot.index, explain)
        return Plan(grants, ranking=ranking, reasons=reasons), memory


def _reason(snapshot: Snapshot, job_id: JobId, starts: set[JobId], first: JobId | None) -> Reason:
    job = snapshot.index[job_id]
    plain = plain_reason(snapshot, job)
    if plain is not None:
        return plain
    if job.holds_gpus:
        return Reason("runs until it ends: fifo never stops a job")
    place = sum(
        j.min_gpus <= len(snapshot.gpus) for j in snapshot.queue[: snapshot.queue.index(job)]
    )
    terms = (Term("place in line", place + 1 - len(starts)), Term("GPUs needed", job.min_gpus))
    if job_id in starts:
        return Reason("starts: it was submitted before all that wait", terms)
    behind = first if job_id != first else None
    text = f"waits behind {behind}" if behind else "waits for GPUs at the head of the line"
    return Reason(text, terms, behind, "a running job ending")

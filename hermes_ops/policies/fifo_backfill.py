"""First in, first out, with back-fill: who does not fit is passed over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.fill import fill, in_line, plain_reason
from hermes_ops.core.model import JobId, LazyReasons, Plan, Reason, Snapshot, Term


@dataclass(frozen=True, slots=True)
class FifoBackfill:
    """Serve jobs by submission time, then number; each that fits on what is left runs.

    A job gets `min_gpus`. Nothing is reserved: a job of many GPUs may wait for ever behind a
    stream of small ones, so no bound on waiting is promised.
    """

    name: ClassVar[str] = "fifo-backfill"
    preempts: ClassVar[bool] = False

    def initial(self) -> None:
        """None: it remembers nothing."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Keep what runs, then start whoever fits, first submitted first."""
        grants = fill(snapshot, snapshot.queue, preempt=False)
        ranking = in_line(snapshot, snapshot.queue, grants)
        starts = {grant.job for grant in grants}.difference(snapshot.stays)

        def explain(job_id: JobId) -> Reason:
            return _reason(snapshot, job_id, starts)

        reasons = LazyReasons(snapshot.index, explain)
        return Plan(grants, ranking=ranking, reasons=reasons), memory


def _reason(snapshot: Snapshot, job_id: JobId, starts: set[JobId]) -> Reason:
    job = snapshot.index[job_id]
    plain = plain_reason(snapshot, job)
    if plain is not None:
        return plain
    if job.holds_gpus:
        return Reason("runs until it ends: fifo-backfill never stops a job")
    terms = (Term("GPUs needed", job.min_gpus),)
    if job_id in starts:
        return Reason("starts: it is the first submitted that fits", terms)
    return Reason("waits: fewer GPUs are idle than it needs", terms, None, "running jobs ending")

"""First in, first out, with back-fill: who does not fit is passed over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.answer import answer
from hermes_ops.core.fill import fill
from hermes_ops.core.model import Job, Plan, Reason, Snapshot, Term


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
        return answer(snapshot, grants, snapshot.queue, _reason), memory


def _reason(job: Job, runs: bool) -> Reason:
    if job.holds_gpus:
        return Reason("runs until it ends: fifo-backfill never stops a job", would_change="its end")
    terms = (Term("GPUs needed", job.min_gpus),)
    if runs:
        change = "an earlier submission that fits"
        return Reason("starts: it is the first submitted that fits", terms, None, change)
    return Reason("waits: fewer GPUs are idle than it needs", terms, None, "running jobs ending")

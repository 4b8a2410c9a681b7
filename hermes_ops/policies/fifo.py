"""First in, first out: the baseline that never stops a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.answer import answer
from hermes_ops.core.fill import fill
from hermes_ops.core.model import Grant, Job, Plan, Reason, Snapshot, Term

_EARLIER = "an earlier submission"


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

        def explain(job: Job, runs: bool) -> Reason:
            return _reason(snapshot, grants, job, runs)

        return answer(snapshot, grants, snapshot.queue, explain), memory


def _reason(snapshot: Snapshot, grants: tuple[Grant, ...], job: Job, runs: bool) -> Reason:
    if job.holds_gpus:
        return Reason("runs until it ends: fifo never stops a job", would_change="its end")
    if runs:
        needed = (Term("GPUs needed", job.min_gpus),)
        return Reason("starts: it was submitted before all that wait", needed, None, _EARLIER)
    granted = {grant.job for grant in grants}
    size = len(snapshot.gpus)
    line = [j for j in snapshot.queue if j.min_gpus <= size and j.id not in granted]
    terms = (Term("place in line", line.index(job) + 1), Term("GPUs needed", job.min_gpus))
    behind = line[0].id if line[0] is not job else None
    text = f"waits behind {behind}" if behind else "waits for GPUs at the head of the line"
    return Reason(text, terms, behind, "a running job ending")

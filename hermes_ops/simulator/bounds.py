"""The least that any policy can need, as a policy: the best trial first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.fill import fill
from hermes_ops.core.model import Plan, Reason, Snapshot
from hermes_ops.core.oracle import Oracle
from hermes_ops.core.order import submission


@dataclass(frozen=True, slots=True)
class OracleBest:
    """Run the trials in the order of the lowest loss that each will ever show.

    Nobody finishes the best trial of a sweep that is there from the start sooner: it starts at
    once and is never stopped. Nothing is stopped for a better one that comes late.
    """

    oracle: Oracle
    name: ClassVar[str] = "oracle-best"
    preempts: ClassVar[bool] = False

    def initial(self) -> None:
        """None: it remembers nothing."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Keep what runs; the free GPUs go to the best of those that wait."""
        jobs = (*snapshot.holding, *snapshot.queue)
        order = sorted(jobs, key=lambda job: (self.oracle.final_loss(job), submission(job)))
        reason = Reason("in the order of the losses that the trials will come to")
        grants = fill(snapshot, order, preempt=False)
        ranking = tuple(job.id for job in order if not job.holds_gpus)
        return Plan(grants, ranking=ranking, reasons=dict.fromkeys(snapshot.index, reason)), memory

"""Shortest remaining time first: the baseline that knows how long each job still runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.answer import answer
from hermes_ops.core.fill import fill
from hermes_ops.core.model import Job, Plan, Reason, Snapshot, Term
from hermes_ops.core.oracle import Oracle
from hermes_ops.core.order import by_submission


@dataclass(frozen=True, slots=True)
class Srtf:
    """Serve the job with the least time left on the GPUs it asked for.

    Each job that still fits runs (greedy fill); ties go to the first submitted. Source: the
    clairvoyant baseline of Tiresias (NSDI 2019). It needs an oracle.
    """

    oracle: Oracle
    name: ClassVar[str] = "srtf"
    preempts: ClassVar[bool] = True

    def initial(self) -> None:
        """None: it remembers nothing."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Serve the jobs in the order of what is left of them."""

        def left(job: Job) -> tuple[float]:
            return (self.oracle.remaining_s(job, snapshot.time_s),)

        return shortest_first(snapshot, left, "time", "remaining_s"), memory


def shortest_first(
    snapshot: Snapshot, left: Callable[[Job], tuple[float, ...]], what: str, term: str
) -> Plan:
    """The plan that serves the jobs in the order of `left`; ties go to the first submitted.

    The first number of `left` is how much of `what` is left of the job, shown as `term`.
    """
    jobs = by_submission((*snapshot.holding, *snapshot.queue))
    keys = {job.id: left(job) for job in jobs}
    order = sorted(jobs, key=lambda job: keys[job.id])

    def explain(job: Job, runs: bool) -> Reason:
        terms = (Term(term, keys[job.id][0]),)
        if runs:
            change = f"a job with less {what} left"
            return Reason(
                f"runs: less {what} is left of it than of those that wait", terms, None, change
            )
        text = f"waits: jobs with less {what} left go first"
        return Reason(text, terms, None, "one of them ending")

    return answer(snapshot, fill(snapshot, order), order, explain)

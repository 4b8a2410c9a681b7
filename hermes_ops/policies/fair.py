"""Fair time-sharing: every job gets one quantum a round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.model import Job, Plan, Reason, Snapshot, Term
from hermes_ops.core.nodes import NodeCapacity
from hermes_ops.policies.toolbox.answer import answer
from hermes_ops.policies.toolbox.fill import fill
from hermes_ops.policies.toolbox.parameter_checks import positive, positive_or_none
from hermes_ops.policies.toolbox.rounds import JoinedRounds, RoundOrder, TimeSlices


@dataclass(frozen=True, slots=True)
class Fair:
    """Serve the job with the fewest quanta since it joined; ties go to the longest waiting.

    Processor sharing by quantum. A job keeps its GPUs for its slice, unless it ends; a job of
    weight w has w quanta a round; one that joins starts in the present round. A quantum is
    `quantum_s` on a grid that all jobs share, or `quantum_steps` reported steps of the job's own:
    with one epoch this is the round robin (RR) to which the Hermes paper compares.

    Our choices: quanta are counted in run time, whatever the number of GPUs, to the nearest whole
    one, so that a slice that ends a little early or late does not change the turn. GPUs that would
    idle in mid-round go to the next that fits. With slices of steps, which end one by one, no job
    starts before one of several GPUs whose turn it is.
    """

    quantum_s: float = 60.0
    quantum_steps: int | None = None
    name: ClassVar[str] = "fair"
    preempts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("quantum_s", self.quantum_s)
        positive_or_none("quantum_steps", self.quantum_steps)

    def initial(self) -> JoinedRounds:
        """Return the first round."""
        return JoinedRounds()

    def decide(self, snapshot: Snapshot, memory: JoinedRounds) -> tuple[Plan, JoinedRounds]:
        """Continue the running slices, then serve the jobs in round order."""
        quanta = TimeSlices(self.quantum_s, self.quantum_steps)
        turns = RoundOrder(snapshot, memory, quanta)
        order = turns.order()
        grants = fill(
            snapshot, order if self.quantum_steps is None else _held_back(snapshot, order)
        )

        def explain(job: Job, is_granted: bool) -> Reason:
            terms = (Term("rounds", turns.rounds[job.id]),)
            if is_granted:
                text = "runs: its slice goes on" if turns.in_slice(job) else "runs: it is its turn"
                return Reason(text, terms, None, "the end of its slice")
            return Reason("waits for its turn", terms, None, "the end of a running job's slice")

        full = len(grants) == len(turns.rounds)
        review_s = None if full else quanta.ends_s(snapshot.time_s)
        return answer(snapshot, grants, order, explain, review_s), turns.memory()


def _held_back(snapshot: Snapshot, order: list[Job]) -> Iterator[Job]:
    """Yield the order without the jobs that wait behind a gang that does not fit yet.

    A job for which its nodes have no room blocks no other: GPUs may become free on other nodes.
    """
    left, blocked, capacity = len(snapshot.gpus), False, NodeCapacity(snapshot)
    for job in order:
        stay = snapshot.retained.get(job.id)
        if stay is not None:
            capacity.reserve(stay.gpus)
        elif blocked or job.min_gpus > len(snapshot.gpus) or not capacity.promise(job):
            continue
        wanted = job.min_gpus if stay is None else len(stay.gpus)
        if wanted <= left:
            left -= wanted
        elif stay is None:
            blocked = True
        yield job

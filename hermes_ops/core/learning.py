"""How many trials of a sweep are open at once when its search learns from results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from hermes_ops.core.model import Job, JobId, Phase, Plan, Reason, Snapshot, SweepId, overlay
from hermes_ops.core.wrapper import Wrapper

M = TypeVar("M")

PER_GPU = 2


@dataclass(frozen=True, slots=True)
class OpenForLearning(Wrapper[M]):
    """Any policy, but a search that learns has results before it gives configurations away.

    Of each sweep in `learning`, whose trials get their configurations from earlier results as
    they are opened, at most `per_gpu` (at least 1) trials for each GPU of the pool are open. The
    inner policy does not see pending trials beyond that, so their GPUs go to others, nor the
    configurations of those it sees, which a replay knows before they are drawn. The bound is the
    threshold of Hermes' queues (Son et al. 2021, Algorithm 1), for every policy and for each
    sweep on its own: both are our choice.
    """

    learning: frozenset[SweepId]
    per_gpu: int = PER_GPU

    def decide(self, snapshot: Snapshot, memory: M) -> tuple[Plan, M]:
        """The inner policy's plan without what is not to be known yet: trials, configurations."""
        most = self.per_gpu * len(snapshot.gpus)
        hidden = _beyond(snapshot, self.learning, most)
        sealed = {job.id for job in snapshot.queue if job.configuration and self._unknown(job)}
        if not hidden and not sealed:
            return self.policy.decide(snapshot, memory)
        seen = tuple(
            replace(job, configuration=()) if job.id in sealed else job
            for job in snapshot.jobs
            if job.id not in hidden
        )
        plan, after = self.policy.decide(replace(snapshot, jobs=seen), memory)
        why = Reason(
            f"waits to be opened: its search learns from results, so {most} trials of its sweep "
            "at most are open at once",
            would_change="one of them ending, or a larger open_per_gpu",
        )
        return replace(plan, reasons=overlay(plan.reasons, dict.fromkeys(hidden, why))), after

    def _unknown(self, job: Job) -> bool:
        return job.phase is Phase.PENDING and job.sweep in self.learning


def _beyond(snapshot: Snapshot, learning: frozenset[SweepId], most: int) -> set[JobId]:
    """The pending trials of learning sweeps for which there is no room, the last ones first."""
    room = dict.fromkeys(learning, most)
    for job in snapshot.jobs:
        if job.sweep in room and job.is_open:
            room[job.sweep] -= 1
    hidden: set[JobId] = set()
    for job in snapshot.queue:
        if job.sweep in room and job.phase is Phase.PENDING:
            room[job.sweep] -= 1
            if room[job.sweep] < 0:
                hidden.add(job.id)
    return hidden

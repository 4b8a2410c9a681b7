"""The quantum: how long a job runs before it may be stopped."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from hermes_ops.core.model import JobId, Snapshot
from hermes_ops.core.placement import holders


@dataclass(frozen=True, slots=True)
class Quantum:
    """How long a job must run, from its start or resume, before it may be stopped.

    `k` times its switch cost of training, after the start-up and restore that come first. Its
    switch cost is measured (`Job.switch_s`), else the largest one known in its sweep, else
    `default_switch_s`; while its parts are unknown the whole cost is taken to come first. With
    the checkpoint at its end a stopped segment thus occupies its GPUs for at least k + 1 switch
    costs.
    """

    k: float = 3.0
    default_switch_s: float = 5.0

    def __post_init__(self) -> None:
        if not (0 <= self.k < inf and 0 <= self.default_switch_s < inf):
            raise ValueError("k and default_switch_s are finite and not negative")

    def costs_s(self, snapshot: Snapshot) -> dict[JobId, float]:
        """The switch cost of each open job, in seconds."""
        largest: dict[str, float] = {}
        for job in snapshot.jobs:
            if job.switch_s is not None:
                largest[job.sweep] = max(largest.get(job.sweep, 0.0), job.switch_s)
        return {
            job.id: largest.get(job.sweep, self.default_switch_s)
            if job.switch_s is None
            else job.switch_s
            for job in snapshot.jobs
            if job.is_open
        }

    def ends_s(self, snapshot: Snapshot) -> dict[JobId, float]:
        """When the quantum of each job that keeps its GPUs ends; only those that it still protects.

        A job without a known start begins its quantum now.
        """
        costs = self.costs_s(snapshot)
        ends: dict[JobId, float] = {}
        for job in holders(snapshot):
            cost = costs[job.id]
            lead = cost if job.switch_s is None else cost - (job.checkpoint_s or 0.0)
            started = snapshot.time_s if job.started_s is None else job.started_s
            end = started + self.k * cost + lead
            if end > snapshot.time_s:
                ends[job.id] = end
        return ends

    def longest_s(self, snapshot: Snapshot) -> float:
        """k + 1 times the largest switch cost of an open job: a quantum with its own switch."""
        costs = self.costs_s(snapshot).values()
        return (self.k + 1) * max(costs, default=self.default_switch_s)

"""The quantum: how long a job runs before it may be stopped."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from hermes_ops.core.model import OPEN_PHASES, JobId, Snapshot, SweepId


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

    def ends_s(self, snapshot: Snapshot) -> dict[JobId, float]:
        """When the quantum of each job that keeps its GPUs ends; only those that it still protects.

        A job without a known start begins its quantum now.
        """
        held = snapshot.held
        ends: dict[JobId, float] = {}
        largest: dict[SweepId, float] | None = None
        for job in snapshot.holding:
            cost, checkpoint_s = job.switch_s, job.checkpoint_s or 0.0
            if cost is None:
                largest = _largest_s(snapshot) if largest is None else largest
                cost, checkpoint_s = largest.get(job.sweep, self.default_switch_s), 0.0
            started = snapshot.time_s if job.started_s is None else job.started_s
            end = started + self.k * cost + (cost - checkpoint_s)
            if end > snapshot.time_s and job.id in held:
                ends[job.id] = end
        return ends

    def longest_s(self, snapshot: Snapshot) -> float:
        """k + 1 times the largest switch cost of an open job: a quantum with its own switch."""
        most, unmeasured = -1.0, set[SweepId]()
        for job in snapshot.jobs:
            cost = (job.checkpoint_s or 0.0) + (job.restore_s or 0.0) + (job.startup_s or 0.0)
            if cost > most and job.phase in OPEN_PHASES:
                most = cost
            if cost == 0.0 and job.switch_s is None and job.phase in OPEN_PHASES:
                unmeasured.add(job.sweep)
        if unmeasured:
            largest = _largest_s(snapshot)
            most = max(most, *(largest.get(s, self.default_switch_s) for s in unmeasured))
        return (self.k + 1) * (most if most >= 0 else self.default_switch_s)


def _largest_s(snapshot: Snapshot) -> dict[SweepId, float]:
    """The largest measured switch cost of each sweep that has one."""
    largest: dict[SweepId, float] = {}
    for job in snapshot.jobs:
        cost = job.switch_s
        if cost is not None and cost > largest.get(job.sweep, -1.0):
            largest[job.sweep] = cost
    return largest

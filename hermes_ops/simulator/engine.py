"""Simulation of a workload under a policy, by the loop that also runs live."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from hermes_ops.core.model import Gpu, Plan, Policy, Snapshot
from hermes_ops.core.wrapper import Wrapper
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.loop import run
from hermes_ops.simulator.cluster import VirtualCluster
from hermes_ops.simulator.event_log import EventLog
from hermes_ops.simulator.workload import SimulationRun, Workload

M = TypeVar("M")


def simulate(
    workload: Workload,
    gpus: tuple[Gpu, ...],
    policy: Policy[M],
    *,
    clock: Callable[[], float] | None = None,
    log: EventLog | None = None,
) -> SimulationRun:
    """Simulate the workload on these GPUs under the policy.

    With a `clock` (real seconds, `time.perf_counter`) the run has the seconds of each decision.
    Raise PlanError when the policy's plan is impossible, ConfigError for a wrong workload.
    """
    cluster = VirtualCluster(workload, gpus, log=log)
    counted = _DecisionCounter(policy, clock)
    run(counted, cluster, counted.initial(), lambda _: cluster.is_over)
    return SimulationRun(
        workload=workload,
        gpus=gpus,
        policy=policy.name,
        outcomes=cluster.outcomes(),
        segments=tuple(cluster.journal.segments),
        observations=tuple(cluster.journal.observations),
        decisions=counted.count[0],
        decision_s=tuple(counted.took_s),
    )


def layout(text: str) -> tuple[Gpu, ...]:
    """Parse the GPUs of "2x4" (two nodes of four GPUs each) or "64" (one node of 64).

    Raise ConfigError for anything else.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)[xX])?([1-9]\d*)", text.strip())
    if match is None:
        allowed = "a number of GPUs, or nodes x GPUs each"
        problem = Problem("gpus", repr(text), allowed, 'write "64" or "16x4"')
        raise ConfigError("the number of GPUs", (problem,))
    nodes, each = int(match[1] or 1), int(match[2])
    return tuple(Gpu(index, f"node-{index // each}") for index in range(nodes * each))


@dataclass(frozen=True, slots=True)
class _DecisionCounter(Wrapper[M]):
    """Counts the decisions and, with a clock, times them."""

    clock: Callable[[], float] | None = None
    count: list[int] = field(default_factory=lambda: [0])
    took_s: list[float] = field(default_factory=list)

    def decide(self, snapshot: Snapshot, memory: M) -> tuple[Plan, M]:
        """Return the inner policy's decision."""
        self.count[0] += 1
        if self.clock is None:
            return self.policy.decide(snapshot, memory)
        started_s = self.clock()
        decision = self.policy.decide(snapshot, memory)
        self.took_s.append(self.clock() - started_s)
        return decision

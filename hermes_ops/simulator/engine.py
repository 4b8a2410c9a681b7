"""Run a workload under a policy in virtual time, by the one loop that also runs live."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import TypeVar

from hermes_ops.core.model import Gpu, Job, JobId, Plan, Policy, Snapshot
from hermes_ops.core.oracle import Oracle
from hermes_ops.core.wrapper import Wrapper
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.loop import run
from hermes_ops.simulator.cluster import VirtualCluster
from hermes_ops.simulator.event_log import EventLog
from hermes_ops.simulator.lives import VirtualJob
from hermes_ops.simulator.workload import Run, Work, Workload

M = TypeVar("M")


def simulate(
    workload: Workload,
    gpus: tuple[Gpu, ...],
    policy: Policy[M],
    *,
    clock: Callable[[], float] | None = None,
    log: EventLog | None = None,
) -> Run:
    """What comes of the workload on these GPUs under the policy.

    With a `clock` (real seconds, `time.perf_counter`) the run has the seconds of each decision.
    Raises PlanError when the policy's plan is impossible, ConfigError for a wrong workload.
    """
    cluster = VirtualCluster(workload, gpus, log=log)
    counted = _Counted(policy, clock)
    run(counted, cluster, counted.initial(), lambda _: cluster.is_over)
    return Run(
        workload=workload,
        gpus=gpus,
        policy=policy.name,
        outcomes=cluster.outcomes(),
        segments=tuple(cluster.journal.segments),
        sights=tuple(cluster.journal.sights),
        decisions=counted.count[0],
        decision_s=tuple(counted.took_s),
    )


def layout(text: str) -> tuple[Gpu, ...]:
    """The GPUs of "2x4" (two nodes of four GPUs each) or "64" (one node of 64).

    Raises ConfigError for anything else.
    """
    found = re.fullmatch(r"(?:([1-9]\d*)[xX])?([1-9]\d*)", text.strip())
    if found is None:
        allowed = "a number of GPUs, or nodes x GPUs each"
        problem = Problem("gpus", repr(text), allowed, 'write "64" or "16x4"')
        raise ConfigError("the GPUs", (problem,))
    nodes, each = int(found[1] or 1), int(found[2])
    return tuple(Gpu(index, f"node-{index // each}") for index in range(nodes * each))


def oracle(workload: Workload) -> Oracle:
    """Who knows the future of the workload's jobs."""
    return _Clairvoyant({work.id: work for work in workload.jobs})


@dataclass(frozen=True, slots=True)
class _Clairvoyant:
    works: dict[JobId, Work] = field(repr=False)

    def remaining_s(self, job: Job, now_s: float) -> float:
        """Seconds of training that are left; exact for the jobs of a simulation."""
        seconds = self.works[job.id].seconds
        if isinstance(job, VirtualJob):
            return max(0.0, seconds - job.progress_s(now_s))
        return max(0.0, seconds - job.attained_gpu_s(now_s) / job.min_gpus)

    def final_loss(self, job: Job) -> float:
        """The lowest finite loss of its whole curve; inf without one."""
        losses = (point.loss for point in self.works[job.id].curve)
        return min((loss for loss in losses if isfinite(loss)), default=inf)


@dataclass(frozen=True, slots=True)
class _Counted(Wrapper[M]):
    """Counts the decisions and, with a clock, times them."""

    clock: Callable[[], float] | None = None
    count: list[int] = field(default_factory=lambda: [0])
    took_s: list[float] = field(default_factory=list)

    def decide(self, snapshot: Snapshot, memory: M) -> tuple[Plan, M]:
        """The inner policy's decision."""
        self.count[0] += 1
        if self.clock is None:
            return self.policy.decide(snapshot, memory)
        started_s = self.clock()
        decision = self.policy.decide(snapshot, memory)
        self.took_s.append(self.clock() - started_s)
        return decision

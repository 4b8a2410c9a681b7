"""The one loop, on a cluster that only remembers what it was told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from hermes_ops.core.model import Gpu, Grant, Job, JobId, Phase, Plan, Snapshot, SweepId
from hermes_ops.core.plan import Action, Start
from hermes_ops.errors import PlanError
from hermes_ops.loop import run, tick
from hermes_ops.policies.fifo import Fifo


class Scripted:
    """Each started job ends during the next wait."""

    def __init__(self, trials: int) -> None:
        sweep = SweepId("s")
        self.jobs = [Job(JobId(f"s/{n}"), sweep, 0.0, Phase.PENDING) for n in range(trials)]
        self.started: list[str] = []
        self.waits: list[float | None] = []
        self.closed = 0

    def observe(self) -> Snapshot:
        return Snapshot(float(len(self.waits)), (Gpu(0),), tuple(self.jobs))

    def apply(self, snapshot: Snapshot, plan: Plan, actions: Sequence[Action]) -> None:
        self.started += [str(a.job) for a in actions if isinstance(a, Start)]

    def wait(self, until_s: float | None) -> None:
        self.waits.append(until_s)
        self.jobs = [
            replace(j, phase=Phase.ENDED) if str(j.id) in self.started else j for j in self.jobs
        ]

    def close(self) -> None:
        self.closed += 1


def over(snapshot: Snapshot) -> bool:
    return all(job.phase is Phase.ENDED for job in snapshot.jobs)


@dataclass(frozen=True)
class Impossible:
    name: ClassVar[str] = "impossible"
    preempts: ClassVar[bool] = False

    def initial(self) -> None:
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        return Plan((Grant(JobId("x"), (0,)),)), None


@dataclass(frozen=True)
class Counting:
    name: ClassVar[str] = "counting"
    preempts: ClassVar[bool] = False

    def initial(self) -> int:
        return 0

    def decide(self, snapshot: Snapshot, memory: int) -> tuple[Plan, int]:
        return Plan(review_at_s=10.0 + memory), memory + 1


def test_the_loop_runs_every_trial_and_closes_once() -> None:
    cluster = Scripted(3)
    run(Fifo(), cluster, None, over)
    assert cluster.started == ["s/0", "s/1", "s/2"]
    assert cluster.closed == 1


def test_memory_goes_round_and_the_wait_ends_at_the_review() -> None:
    cluster = Scripted(1)
    memory = run(Counting(), cluster, 0, lambda s: s.time_s >= 2)
    assert memory == 3
    assert cluster.waits == [10.0, 11.0]


def test_an_impossible_plan_is_not_applied_and_the_cluster_is_closed() -> None:
    cluster = Scripted(1)
    policy: Any = Impossible()
    with pytest.raises(PlanError):
        tick(policy, cluster, None)
    with pytest.raises(PlanError):
        run(policy, cluster, None, over)
    assert cluster.started == []
    assert cluster.closed == 1

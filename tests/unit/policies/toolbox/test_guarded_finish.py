"""The order that guards the finish: rules one by one, and Shockwave's trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from hermes_ops.core.model import Plan, Snapshot
from hermes_ops.core.oracle import Oracle
from hermes_ops.policies.toolbox.fill import fill
from hermes_ops.policies.toolbox.guarded_finish import FinishFacts, guarded_finish_order
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.metrics import measure
from hermes_ops.simulator.named_workload import named_workload
from hermes_ops.simulator.oracle import oracle

DATA = Path(__file__).parents[4] / "examples" / "elastic"
EARLY = 1e6


def test_a_job_that_will_soon_be_late_is_first_and_one_that_is_late_is_not() -> None:
    late = FinishFacts(100.0, 60.0, 1, 150.0)
    near = FinishFacts(100.0, 70.0, 1, 200.0)
    nearer = FinishFacts(100.0, 90.0, 1, 200.0)
    short = FinishFacts(0.0, 50.0, 1, EARLY)
    assert guarded_finish_order([late, near, nearer, short], 1, near_s=50.0) == [2, 1, 3, 0]


def test_the_job_that_would_end_last_goes_before_short_ones() -> None:
    jobs = [FinishFacts(0.0, left_s, 1, EARLY) for left_s in (10.0, 1000.0, 20.0)]
    assert guarded_finish_order(jobs, 4) == [1, 0, 2]
    assert guarded_finish_order(jobs, 1) == [1, 0, 2]
    many = [FinishFacts(0.0, left_s, 1, EARLY) for left_s in (500.0, 400.0, 600.0)]
    assert guarded_finish_order(many, 1) == [1, 0, 2]


def test_the_rest_go_by_work_left_then_by_index() -> None:
    jobs = [FinishFacts(0.0, *facts, EARLY) for facts in ((30.0, 4), (50.0, 1), (50.0, 1))]
    assert guarded_finish_order(jobs, 1) == [1, 2, 0]
    assert guarded_finish_order([], 1) == []


@dataclass(frozen=True, slots=True)
class InThatOrder:
    """Serves jobs in the order, knowing what is left; all have 120 / 32 as their contention."""

    oracle: Oracle
    alone_s: dict[str, float]
    name: ClassVar[str] = "guarded-finish"
    preempts: ClassVar[bool] = True

    def initial(self) -> None:
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        jobs, now_s = (*snapshot.holding, *snapshot.queue), snapshot.time_s
        facts = [
            FinishFacts(
                now_s - job.submitted_s,
                self.oracle.remaining_s(job, now_s),
                job.min_gpus,
                3.75 * self.alone_s[job.id],
            )
            for job in jobs
        ]
        order = [jobs[index] for index in guarded_finish_order(facts, len(snapshot.gpus))]
        return Plan(fill(snapshot, order)), memory


def test_on_shockwaves_trace_mean_makespan_and_fairness_are_all_better_than_published() -> None:
    workload = named_workload("shockwave").make(DATA, 1.0).draw(0).workload
    alone_s = {str(work.id): work.alone_s or 0.0 for work in workload.jobs}
    metrics = measure(simulate(workload, layout("8x4"), InThatOrder(oracle(workload), alone_s)))
    assert metrics.mean_completion_seconds == pytest.approx(7_302, rel=0.02)
    assert metrics.makespan_seconds == pytest.approx(21_598, rel=0.02)
    assert (metrics.worst_finish_time_fairness or 9) < 1.05

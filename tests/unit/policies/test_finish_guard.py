"""Jobs of one size under elastic-frontrunner: how long they still train, and who comes first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, Job, JobId, Phase, Plan, Point, Snapshot, SweepId
from hermes_ops.core.oracle import Oracle
from hermes_ops.core.sizes import StepTime
from hermes_ops.policies import make_policy
from hermes_ops.policies.elastic_frontrunner import ElasticFrontrunner
from hermes_ops.policies.elastic_frontrunner.finish_guard import (
    PARTS,
    Crowds,
    FinishFacts,
    Paces,
    contention,
    guarded_finish_order,
    predicted_finish_order,
    with_crowd,
)
from hermes_ops.policies.toolbox.fill import fill
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.metrics import Metrics, measure
from hermes_ops.simulator.oracle import oracle
from hermes_ops.simulator.published_workloads import published_workload
from hermes_ops.simulator.workload import Work, Workload

DATA = Path(__file__).parents[3] / "examples" / "elastic"

EARLY = 1e6


def finish(elapsed_s: float, left_s: float, gpus: int, fair_s: float) -> FinishFacts:
    return FinishFacts(elapsed_s, left_s, gpus, fair_s)


facts = st.builds(
    FinishFacts,
    st.floats(0, 1e5),
    st.floats(1, 1e5),
    st.integers(1, 8),
    st.floats(1, 1e6),
)


@given(st.lists(facts, max_size=12), st.integers(1, 32), st.floats(0.1, 1.5))
def test_all_that_would_be_late_are_served_first_and_none_twice(
    jobs: list[FinishFacts], gpus: int, tail: float
) -> None:
    order = predicted_finish_order(jobs, gpus, tail=tail, near_s=300.0)
    assert len(set(order)) == len(order)
    assert {i for i, job in enumerate(jobs) if job.slack_s < 300.0} <= set(order)


@given(st.lists(facts, min_size=1, max_size=12), st.integers(1, 32))
def test_more_work_of_others_guards_no_further_job(jobs: list[FinishFacts], gpus: int) -> None:
    alone = predicted_finish_order(jobs, gpus, tail=0.9)
    among_others = predicted_finish_order(jobs, gpus, tail=0.9, other_gpu_s=1e6)
    assert set(among_others) <= set(alone)


def test_the_longest_comes_before_those_that_are_late_and_these_go_by_their_deadline() -> None:
    longest = finish(0.0, 5_000.0, 1, 1e6)
    late, near = finish(900.0, 50.0, 1, 800.0), finish(100.0, 100.0, 1, 400.0)
    early = finish(0.0, 100.0, 1, 1e6)
    order = predicted_finish_order([early, late, near, longest], 4, tail=0.9, near_s=300.0)
    assert order == [3, 1, 2]


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50)), min_size=1, max_size=20))
def test_the_contention_of_a_job_is_the_most_jobs_that_it_has_met(
    moments: list[tuple[float, int]],
) -> None:
    now_s, seen = 0.0, list[tuple[float, int]]()
    crowds: Crowds = ()
    for gap_s, jobs in moments:
        now_s += gap_s
        crowds = with_crowd(crowds, now_s, jobs, 0.0)
        seen.append((now_s, jobs))
    for submitted_s, _ in seen:
        most = max(jobs for at_s, jobs in seen if at_s >= submitted_s)
        assert contention(crowds, submitted_s, 4) == max(1.0, most / 4)


def test_without_jobs_met_there_is_no_contention() -> None:
    none: Crowds = ()
    assert contention(none, 0.0, 4) == 1.0


def trained(name: str, *seconds: float, total: int = 20, **more: Any) -> Job:
    """Return a job of one size whose steps took so long."""
    ends, curve = 0.0, []
    for step, took_s in enumerate(seconds, start=1):
        ends += took_s
        curve.append(Point(step, 1.0 / step, ends))
    phase = Phase.ENDED if len(seconds) == total else Phase.WAITING if seconds else Phase.PENDING
    usual: dict[str, Any] = {"model_name": "net", "total_steps": total, "curve": tuple(curve)}
    usual["submitted_s"] = 0.0
    return Job(JobId(name), SweepId("t"), phase=phase, **(usual | more))


def paces(*jobs: Job) -> Paces:
    return Paces.from_snapshot(Snapshot(0.0, (Gpu(0),), jobs))


def test_a_job_has_its_steps_left_at_the_pace_of_its_newest_ones() -> None:
    job = trained("a", *[30.0] * 4, *[10.0] * 6)
    assert paces().left_s(job) == pytest.approx(100.0)
    assert paces().left_s(replace(job, total_steps=None)) is None


def test_a_job_that_has_not_run_has_its_steps_at_the_declared_pace_else_at_its_kinds() -> None:
    fresh = trained("b", step_times=(StepTime(1, 7.0),))
    assert paces().left_s(fresh) == pytest.approx(140.0)
    assert paces().left_s(trained("c")) is None
    assert paces(trained("a", 5.0, 5.0)).left_s(trained("c")) == pytest.approx(100.0)


def test_a_pace_that_changed_in_an_ended_job_is_expected_to_change_in_the_next_of_the_kind() -> (
    None
):
    known = paces(trained("a", *[10.0] * 5, *[20.0] * 15))
    assert known.left_s(trained("b", *[1.0] * 4)) == pytest.approx(1.0 + 2.0 * 15)
    assert known.left_s(trained("b", *[1.0] * 4, model_name="other")) == pytest.approx(16.0)


@given(st.lists(st.floats(0.1, 100.0), min_size=PARTS, max_size=PARTS), st.integers(1, PARTS - 1))
def test_a_job_that_goes_as_an_ended_one_did_has_as_much_left_as_that_had(
    steps_s: list[float], done: int
) -> None:
    steps_s[max(0, done - 5) : done] = [steps_s[done - 1]] * min(5, done)  # a pace of its own
    steps_s[0] = steps_s[0] if done > 5 else steps_s[done - 1]
    known = paces(trained("a", *steps_s))
    left_s = known.left_s(trained("b", *steps_s[:done]))
    assert left_s == pytest.approx(sum(steps_s[done:]), rel=1e-6)


def decided(*jobs: Job, gpus: int, now_s: float = 1_000.0, **options: Any) -> set[str]:
    """Return the jobs that get GPUs."""
    snapshot = Snapshot(now_s, tuple(Gpu(index) for index in range(gpus)), jobs)
    policy = ElasticFrontrunner(**options)
    return {grant.job for grant in policy.decide(snapshot, policy.initial())[0].grants}


def test_the_job_that_would_end_last_runs_beside_short_ones() -> None:
    short = [trained(f"s/{n}", step_times=(StepTime(1, 1.0),), submitted_s=900.0) for n in range(3)]
    long = trained("long", step_times=(StepTime(1, 1_000.0),), submitted_s=900.0)
    assert "long" in decided(long, *short, gpus=2)
    assert "long" not in decided(long, *short, gpus=2, tail=2.0, near_s=0.0)


def test_jobs_of_several_sizes_are_not_guarded() -> None:
    steps = (StepTime(1, 1.0),)
    short = [trained(f"s/{n}", step_times=steps, max_gpus=2) for n in range(3)]
    long = trained("long", step_times=(StepTime(1, 1_000.0),), max_gpus=2, model_name="long")
    assert "long" not in decided(long, *short, gpus=2)


def test_a_small_world_ends_sooner_and_fairer_with_the_guard() -> None:
    works = [long_work("long", 0.0, 40)] + [long_work(f"s/{n}", 30.0 * n, 4) for n in range(40)]
    results = []
    settings: tuple[dict[str, Any], ...] = ({}, {"tail": 9.0, "near_s": 0.0})
    for options in settings:
        workload = Workload("w", tuple(works), round_s=30.0)
        results.append(measure(simulate(workload, layout("4"), ElasticFrontrunner(**options))))
    guarded, bare = results
    assert guarded.makespan_seconds < bare.makespan_seconds


def long_work(name: str, at_s: float, steps: int) -> Work:
    curve = tuple(Point(step, 1.0 / step, 60.0 * step) for step in range(1, steps + 1))
    declared = (StepTime(1, 60.0),)
    return Work(
        JobId(name), at_s, 60.0 * steps, model_name=name[0], total_steps=steps, curve=curve,
        step_times=declared,
    )  # fmt: skip


def on_shockwave(**options: object) -> Metrics:
    workload = published_workload("shockwave").make(DATA, 1.0).draw(0).workload
    policy = make_policy("elastic-frontrunner", options, {"oracle": oracle(workload)})
    return measure(simulate(workload, layout("8x4"), policy))


@pytest.mark.law
def test_on_shockwaves_trace_mean_makespan_and_fairness_hold_with_predicted_times() -> None:
    metrics = on_shockwave()
    assert (metrics.mean_completion_seconds or 9e9) <= 7_500
    assert metrics.makespan_seconds <= 23_000
    assert (metrics.worst_finish_time_fairness or 9.0) <= 1.05


@pytest.mark.law
def test_what_the_prediction_costs_on_shockwaves_trace_is_known() -> None:
    metrics = on_shockwave(known=True)
    assert metrics.mean_completion_seconds == pytest.approx(7_585, rel=0.01)
    assert metrics.makespan_seconds == pytest.approx(21_283, rel=0.01)
    assert (metrics.worst_finish_time_fairness or 9.0) <= 1.05


def test_a_job_of_shockwaves_trace_declares_its_length_with_its_first_batch_alone() -> None:
    jobs = published_workload("shockwave").make(DATA, 1.0).draw(0).workload.jobs
    for work in jobs:
        (declared,) = work.step_times
        assert work.total_steps == len(work.curve)
        assert work.curve[-1].seconds == work.seconds
        seconds = [0.0, *(point.seconds for point in work.curve)]
        assert seconds == sorted(seconds)
        assert declared.gpus == work.gpus
    lengths = [(w.total_steps or 0) * w.step_times[0].seconds / w.seconds for w in jobs]
    assert min(lengths) < 0.8
    assert max(lengths) > 3.0


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
    workload = published_workload("shockwave").make(DATA, 1.0).draw(0).workload
    alone_s = {str(work.id): work.alone_s or 0.0 for work in workload.jobs}
    metrics = measure(simulate(workload, layout("8x4"), InThatOrder(oracle(workload), alone_s)))
    assert metrics.mean_completion_seconds == pytest.approx(7_302, rel=0.02)
    assert metrics.makespan_seconds == pytest.approx(21_598, rel=0.02)
    assert (metrics.worst_finish_time_fairness or 9) < 1.05

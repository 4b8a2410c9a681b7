"""How elastic-frontrunner sizes the trials of sweeps, and shares a pool between sweeps and jobs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.guards import guarded
from hermes_ops.core.model import Gpu, Job, JobId, Phase, Plan, Point, Snapshot, SweepId
from hermes_ops.core.plan import check
from hermes_ops.core.sizes import StepTime
from hermes_ops.policies import make_policy
from hermes_ops.policies.elastic_frontrunner import ElasticFrontrunner
from hermes_ops.policies.elastic_frontrunner.sized_sweeps import GpuClaim, divide
from hermes_ops.policies.elastic_frontrunner.trial_speeds import (
    SearchMemory,
    Stretch,
    TrialSpeeds,
    at_one_size,
)
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.workload import Workload
from hermes_ops.simulator.workload_source import CurvesSource
from hermes_ops.testing.worlds import PowerOfGpus

SPEEDS = {1: 1.0, 2: 1.6, 3: 1.8, 4: 1.9}
EPOCHS = 20


def losses(final: float, epochs: int) -> tuple[Point, ...]:
    """Return a curve that falls to `final`, ten seconds an epoch."""
    steps = range(1, epochs + 1)
    return tuple(Point(n, final + exp(-n / 3), 10.0 * n) for n in steps)


def trial(number: int, sweep: str = "s", **facts: Any) -> Job:
    usual: dict[str, Any] = {
        "max_gpus": 4,
        "total_steps": EPOCHS,
        "configuration": (("rate", number / 100),),
        "phase": Phase.WAITING,
    }
    return Job(JobId(f"{sweep}/{number}"), SweepId(sweep), 0.0, **(usual | facts))


def measured(seconds: float = 10.0, sizes: Iterable[int] = SPEEDS) -> tuple[StepTime, ...]:
    return tuple(StepTime(size, seconds / SPEEDS[size]) for size in sizes)


def decide(*jobs: Job, gpus: int = 4) -> Plan:
    snapshot = Snapshot(1_000.0, tuple(Gpu(g) for g in range(gpus)), jobs)
    policy = ElasticFrontrunner()
    plan, _ = policy.decide(snapshot, policy.initial())
    check(snapshot, plan)
    return plan


def sizes(plan: Plan) -> dict[str, int]:
    return {grant.job: len(grant.gpus) for grant in plan.grants}


def test_a_clear_front_runner_runs_wide() -> None:
    others = [trial(n, curve=losses(1.0 + n / 10, 5), step_times=measured()) for n in range(1, 8)]
    leader = trial(0, curve=losses(0.0, 16), step_times=measured())
    assert sizes(decide(leader, *others))["s/0"] >= 3


def test_equal_trials_run_narrow() -> None:
    alike: dict[str, Any] = {"curve": losses(1.0, 5), "step_times": measured(), "configuration": ()}
    assert set(sizes(decide(*(trial(n, **alike) for n in range(8)))).values()) == {1}


def test_trials_begin_on_one_gpu_while_no_size_was_measured() -> None:
    fresh = [trial(n, phase=Phase.PENDING) for n in range(3)]
    assert sizes(decide(*fresh, gpus=8)) == {"s/0": 1, "s/1": 1, "s/2": 1}


def test_a_size_that_was_measured_to_be_slower_is_left_to_nobody() -> None:
    slow = (StepTime(1, 10.0), StepTime(2, 12.0), StepTime(4, 15.0))
    only = trial(0, curve=losses(0.0, 5), step_times=slow)
    assert sizes(decide(only)) == {"s/0": 1}


def test_a_trial_within_its_slice_keeps_a_gpu_although_others_have_more_chance() -> None:
    slow = trial(
        9, phase=Phase.RUNNING, gpus_held=(0,), curve=losses(3.0, 5), steps_at_start=5,
        step_times=measured(), started_s=900.0,
    )  # fmt: skip
    others = [trial(n, curve=losses(0.0, 5), step_times=measured()) for n in range(4)]
    assert sizes(decide(slow, *others))["s/9"] == 1


@pytest.mark.law
@pytest.mark.parametrize("gpus", ["1", "3"])
@pytest.mark.parametrize("seed", [0, 1])
def test_with_one_size_trials_run_exactly_as_under_frontrunner(gpus: str, seed: int) -> None:
    """Which of the GPUs of the one node a trial has may differ: the order of the grants does."""
    curves = Path(__file__).parents[3] / "examples" / "curves" / "lcbench_adult.npz"
    workload = CurvesSource(curves, trials=6).draw(seed).workload
    found = [
        simulate(workload, layout(gpus), make_policy(name, {})).segments
        for name in ("frontrunner", "elastic-frontrunner")
    ]
    first, second = (
        sorted((replace(each, gpus=tuple(range(len(each.gpus)))) for each in run), key=str)
        for run in found
    )
    assert first == second


def test_no_trial_starts_on_so_few_gpus_that_it_reports_nothing_before_the_deadline() -> None:
    """An epoch takes ten seconds on one GPU, 6.25 on two and 5.3 on four."""
    runs = trial(0, curve=losses(0.2, 6), phase=Phase.RUNNING, gpus_held=(0,), steps_at_start=5)
    waits = [trial(n, curve=losses(0.1 + n / 10, 5), step_times=measured()) for n in (1, 2)]
    new = trial(9, phase=Phase.PENDING)

    def started(left_s: float | None) -> dict[str, int]:
        deadline_s = None if left_s is None else 1_000.0 + left_s
        jobs = [replace(job, deadline_s=deadline_s) for job in (runs, *waits, new)]
        found = sizes(decide(*jobs))
        return {job: size for job, size in found.items() if job != "s/0"}

    assert started(None)
    assert started(500.0) == started(None)
    assert started(9.0)
    assert min(started(9.0).values()) >= 2
    assert started(5.0) == {}


def test_near_the_deadline_the_value_that_is_reached_by_then_counts() -> None:
    """The slow one ends lower, and the quick one is lower at the deadline."""
    deadline_s = 1_000.0 + 45.0
    done = [trial(n, curve=losses(0.4, EPOCHS), phase=Phase.ENDED) for n in (7, 8)]
    slow_curve = tuple(replace(point, seconds=5 * point.seconds) for point in losses(0.05, 4))
    slow, quick = (
        trial(1, curve=slow_curve, max_gpus=1),
        trial(2, curve=losses(0.15, 4), max_gpus=1),
    )

    def first(deadline: float | None) -> set[str]:
        jobs = [replace(job, deadline_s=deadline) for job in (*done, slow, quick)]
        return set(sizes(decide(*jobs, gpus=1)))

    assert first(deadline_s) == {"s/2"}


def test_sweeps_and_other_jobs_have_equal_shares() -> None:
    trials = [trial(n, curve=losses(1.0, 5), step_times=measured()) for n in range(8)]
    plain = [trial(n, "jobs", model_name="net", configuration=()) for n in range(8)]
    plan = sizes(decide(*trials, *plain, gpus=8))
    assert sum(size for job, size in plan.items() if job.startswith("s/")) == 4
    assert sum(size for job, size in plan.items() if job.startswith("jobs/")) == 4


def test_what_other_jobs_leave_free_goes_to_the_sweep() -> None:
    trials = [trial(n, curve=losses(1.0, 5), step_times=measured()) for n in range(8)]
    plain = trial(0, "jobs", model_name="net", configuration=(), max_gpus=1)
    plan = sizes(decide(*trials, plain, gpus=8))
    assert plan.pop("jobs/0") == 1
    assert sum(plan.values()) == 7


def test_a_heavier_sweep_has_the_larger_share() -> None:
    light, heavy = [trial(n) for n in range(9)], [trial(n, "t", weight=3.0) for n in range(9)]
    claims = {SweepId("s"): GpuClaim(light), SweepId("t"): GpuClaim(heavy)}
    shares = divide(claims, 8)
    assert sum(shares.values()) == 8
    assert shares[SweepId("t")] == 6


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 4), max_size=5), st.integers(0, 3)), max_size=4),
    st.integers(0, 12),
)
@settings(deadline=None)
def test_shares_never_exceed_the_pool_and_hold_what_is_pinned(
    drawn: list[tuple[list[int], int]], more: int
) -> None:
    claims = {
        SweepId(str(n)): GpuClaim(
            [trial(k, min_gpus=least) for k, least in enumerate(mins)], 0, pinned
        )
        for n, (mins, pinned) in enumerate(drawn)
    }
    gpus = sum(claim.pinned for claim in claims.values()) + more
    shares = divide(claims, gpus)
    assert sum(shares.values()) <= gpus
    assert all(shares[sweep] >= claim.pinned for sweep, claim in claims.items())


def test_speeds_compare_each_trial_with_itself() -> None:
    fast = trial(0, step_times=measured(1.0, (1, 2)))
    slow = trial(1, step_times=measured(50.0, (2, 4)))
    slowest = trial(2, step_times=measured(900.0, (1,)))
    speeds = TrialSpeeds.from_trials([fast, slow, slowest])
    assert speeds.largest == 4
    for size in (1, 2, 4):
        assert speeds.speed(size) == pytest.approx(SPEEDS[size], rel=0.02)


def test_before_two_sizes_are_measured_the_speed_is_linear() -> None:
    speeds = TrialSpeeds.from_trials([trial(0, step_times=measured(sizes=(1,)))])
    assert [speeds.speed(size) for size in (1, 2, 3)] == [1.0, 2.0, 3.0]


def test_a_curve_of_several_sizes_is_that_of_one() -> None:
    speeds = TrialSpeeds(((1, 1.0), (2, 2.0)), 2)
    points = tuple(Point(n, 1.0, 10.0 * min(n, 2) + 5.0 * max(0, n - 2)) for n in range(1, 5))
    found = at_one_size(trial(0, curve=points), (Stretch(0, 1), Stretch(2, 2)), speeds)
    assert [point.seconds for point in found.curve] == [10.0, 20.0, 30.0, 40.0]


def test_the_memory_knows_on_how_many_gpus_each_part_of_a_curve_was_trained() -> None:
    policy = ElasticFrontrunner()
    running = trial(
        0, phase=Phase.RUNNING, gpus_held=(0,), curve=losses(0.0, 5), step_times=measured()
    )
    before = replace(policy.initial(), search=SearchMemory((), ((running.id, (Stretch(0, 1),)),)))
    pool = tuple(Gpu(g) for g in range(4))
    plan, after = policy.decide(Snapshot(1_000.0, pool, (running,)), before)
    size = len(plan.gpus_of(running.id))
    assert size > 1
    assert dict(after.search.stretches)[running.id] == (Stretch(0, 1), Stretch(5, size))


@st.composite
def sized_sweeps(draw: st.DrawFn) -> Workload:
    """Draw a sweep and jobs of a model, of one and of several sizes."""
    curves = Path(__file__).parents[3] / "examples" / "curves" / "mlp_digits.npz"
    drawn = CurvesSource(
        curves, trials=draw(st.integers(1, 5)), startup_s=draw(st.sampled_from([0.0, 20.0]))
    )
    works = []
    for number, work in enumerate(drawn.draw(draw(st.integers(0, 3))).workload.jobs):
        model = PowerOfGpus(draw(st.sampled_from([(1,), (1, 2, 3, 4), (2, 4)])), 0.7)
        plain = draw(st.booleans())
        name = "net" if plain else None
        works.append(
            replace(
                work, id=JobId(f"{work.sweep}/{number}"), training=model, gpus=model.sizes[0],
                model_name=name, submitted_s=draw(st.sampled_from([0.0, 500.0])),
            )
        )  # fmt: skip
    return Workload("mixed", tuple(works))


@given(sized_sweeps(), st.booleans())
@settings(max_examples=12, deadline=None)
def test_sized_trials_and_other_jobs_all_end(workload: Workload, with_guards: bool) -> None:
    policy: Any = ElasticFrontrunner()
    run = simulate(workload, layout("2x2"), guarded(policy) if with_guards else policy)
    allowed = {w.id: w.training.sizes for w in workload.jobs if w.training is not None}
    assert all(outcome.state == "finished" for outcome in run.outcomes)
    assert all(len(segment.gpus) in allowed[segment.job] for segment in run.segments)


def test_speeds_of_several_batches_are_compared_by_their_samples() -> None:
    times = (StepTime(1, 4.0, local_batch=32), StepTime(2, 5.0, local_batch=32))
    plain = (StepTime(1, 4.0), StepTime(2, 2.5))
    speeds = [
        TrialSpeeds.from_trials([trial(0, step_times=known)]).speed(2) for known in (times, plain)
    ]
    assert speeds[0] == pytest.approx(speeds[1])


def test_a_trial_that_lost_its_gpus_after_its_last_step_is_served_first() -> None:
    others = [trial(n, curve=losses(0.1 * n, 9)) for n in range(1, 6)]
    trained = trial(9, curve=losses(0.05, EPOCHS))
    assert sizes(decide(*others, trained, gpus=1)) == {"s/9": 1}

"""What elastic-frontrunner learns of kinds of jobs, and how it sizes them."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, Job, JobId, Phase, Plan, Point, Snapshot, SweepId
from hermes_ops.core.plan import check
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.errors import ConfigError
from hermes_ops.policies import make_policy
from hermes_ops.policies.elastic_frontrunner import ElasticFrontrunner
from hermes_ops.policies.elastic_frontrunner.kinds import Kind, Knowledge, Progress, expected_work
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.metrics import measure
from hermes_ops.simulator.oracle import oracle
from hermes_ops.simulator.published_workloads import published_workload
from tests.builders import curve

BATCHES = BatchRange(32, 4096, 16, 256)


def times(*places: tuple[int, int, float]) -> tuple[StepTime, ...]:
    """Return steps of 64 samples a GPU by (GPUs, nodes, seconds); computing takes half a second."""
    return tuple(StepTime(g, seconds, nodes, 64, 0.5) for g, nodes, seconds in places)


def job(name: str, phase: Phase = Phase.PENDING, **facts: Any) -> Job:
    usual: dict[str, Any] = {"model_name": "net", "batch_range": BATCHES, "max_gpus": 8}
    return Job(JobId(name), SweepId("t"), 0.0, phase, **(usual | facts))


def decide(*jobs: Job, memory: Knowledge | None = None, gpus: int = 8) -> tuple[Plan, Knowledge]:
    pool = tuple(Gpu(index, f"node-{index // 4}") for index in range(gpus))
    snapshot = Snapshot(1_000.0, pool, jobs)
    plan, after = ElasticFrontrunner().decide(snapshot, memory or Knowledge())
    check(snapshot, plan)
    return plan, after


def sizes(plan: Plan) -> dict[str, int]:
    return {grant.job: len(grant.gpus) for grant in plan.grants}


def running(name: str, *gpus: int, **facts: Any) -> Job:
    facts = {"service_gpu_s": 600.0, "noise_scale": 5_000.0, "startup_s": 1.0} | facts
    return job(name, Phase.RUNNING, gpus_held=gpus, started_s=0.0, **facts)


def test_a_kind_that_nothing_is_known_of_begins_with_its_least_size() -> None:
    assert sizes(decide(job("a"), job("b"))[0]) == {"a": 1, "b": 1}


def test_a_kind_tries_at_most_twice_the_largest_size_that_it_has_measured() -> None:
    grown = decide(running("a", 0, step_times=times((1, 1, 0.5))))[0]
    assert sizes(grown) == {"a": 2}


def test_a_new_job_starts_with_what_others_of_its_kind_have_measured() -> None:
    measured = times((1, 1, 0.5), (2, 1, 0.52), (4, 1, 0.55))
    _, memory = decide(running("a", 0, step_times=measured))
    plan, _ = decide(job("b"), memory=memory)
    assert sizes(plan)["b"] > 2
    assert sizes(decide(job("c", model_name="other"), memory=memory)[0]) == {"c": 1}


def test_a_size_that_was_measured_to_be_slower_is_not_taken() -> None:
    slow = times((1, 1, 0.5), (2, 1, 0.51), (4, 1, 4.0))
    assert sizes(decide(running("a", 0, 1, step_times=slow))[0])["a"] < 4


def test_less_work_left_gets_the_larger_part() -> None:
    measured = times((1, 1, 0.5), (2, 1, 0.6), (4, 1, 0.8), (8, 2, 1.2))
    kinds = ((("net", ""), Kind(measured)),)
    near = running("a", 0, 1, 2, 3, total_steps=10, curve=curve(*[1.0] * 9), step_times=measured)
    far = running("b", 4, 5, 6, 7, total_steps=10, curve=curve(1.0), step_times=measured)
    done = tuple((JobId(name), Progress(900.0, 1_000.0)) for name in ("a", "b"))
    plan, _ = decide(near, far, memory=Knowledge(kinds, done))
    values = {name: plan.reasons[JobId(name)].terms[0].value for name in ("a", "b")}
    assert values["a"] < values["b"]
    assert sizes(plan)["a"] >= sizes(plan).get("b", 0)


def test_a_job_close_to_its_end_is_not_moved() -> None:
    measured = times((1, 1, 0.5), (2, 1, 0.5), (4, 1, 0.5))
    facts: dict[str, Any] = {"total_steps": 100, "curve": curve(*[1.0] * 99), "startup_s": 300.0}
    last = running("a", 0, step_times=measured, **facts)
    done = ((JobId("a"), Progress(1_000.0, 1_000.0)),)
    assert sizes(decide(last, memory=Knowledge((), done))[0]) == {"a": 1}


def test_the_work_of_ended_jobs_is_what_the_next_of_the_kind_have() -> None:
    done = ((JobId("a"), Progress(500.0, 1_000.0)),)
    ended = job("a", Phase.ENDED, curve=curve(1.0))
    _, memory = decide(ended, job("b"), memory=Knowledge((), done))
    assert dict(memory.kinds)["net", ""].works == (500.0,)
    assert JobId("a") not in dict(memory.progress)
    assert expected_work(job("c"), dict(memory.kinds)["net", ""], 20.0) == 500.0


def test_work_follows_from_the_steps_where_no_job_of_the_kind_has_ended() -> None:
    begun = job("a", Phase.WAITING, total_steps=10, curve=curve(1.0, 1.0))
    assert expected_work(begun, Kind(), 50.0) == 250.0
    assert expected_work(job("b"), Kind(), 0.0) is None


def test_the_work_of_a_job_with_a_fixed_batch_is_its_steps_whatever_others_of_the_kind_had() -> (
    None
):
    kind = Kind((StepTime(1, 0.5),), works=(500.0,))
    fixed = job("a", batch_range=None, total_steps=10)
    assert expected_work(fixed, kind, 3.0) == 10.0


@given(
    st.lists(st.integers(1, 50), max_size=5),
    st.floats(0, 1e4),
    st.floats(0, 10),
    st.floats(0, 100),
)
def test_progress_in_steps_is_never_far_from_the_reported_steps(
    gaps: list[int], done: float, rate: float, seconds: float
) -> None:
    steps = list(accumulate(gaps))
    points = tuple(Point(step, 1.0, float(step)) for step in steps)
    reported = job("a", batch_range=None, total_steps=300, curve=points)
    seen = Progress(done, 0.0, rate).seen_in(reported, seconds).until(seconds)
    newest = steps[-1] if steps else 0
    assert newest <= seen <= newest + (gaps[-1] if gaps else 0)


def test_a_size_counts_as_tried_after_a_while_though_no_step_of_it_was_measured() -> None:
    job_facts: dict[str, Any] = {"batch_range": None, "total_steps": 100}
    young = running("a", 0, **job_facts)
    plan, _ = decide(young, memory=Knowledge((), ((JobId("a"), Progress(since_s=990.0)),)))
    assert sizes(plan) == {"a": 1}
    assert plan.review_at_s == 1_050.0
    old = ((JobId("a"), Progress(since_s=900.0)),)
    grown, _ = decide(young, memory=Knowledge((), old))
    assert sizes(grown) == {"a": 2}


def test_without_a_noise_scale_any_batch_of_the_range_is_as_good_a_sample() -> None:
    measured = times((1, 1, 0.5), (2, 1, 0.6), (4, 1, 0.8))
    plan, memory = decide(running("a", 0, 1, noise_scale=None, step_times=measured))
    (grant,) = plan.grants
    assert grant.batch is not None
    assert grant.batch > 32
    held = running("a", *grant.gpus, noise_scale=None, step_times=measured, batch_held=96)
    (again,) = decide(held, memory=memory)[0].grants
    assert again.batch == 96 or again.gpus != grant.gpus
    (noisy,) = decide(running("b", 0, 1, step_times=measured))[0].grants
    assert noisy.batch is None


@pytest.mark.parametrize("facts", [{"weight": -0.1}, {"weight": 1.5}, {"patience": -1.0}])
def test_parameters_out_of_range_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="from 0"):
        ElasticFrontrunner(**facts)


def on_capes(name: str, policy: str, seed: int) -> float:
    workload = published_workload(name).make(Path(), 1.0).draw(seed).workload
    chosen = make_policy(policy, {}, {"oracle": oracle(workload)})
    return measure(simulate(workload, layout("8x8"), chosen)).mean_completion_seconds or 0.0


@pytest.mark.law
@pytest.mark.parametrize("name", ["capes-none", "capes-none-unequal"])
def test_on_capes_jobs_it_is_sooner_without_an_oracle_than_doubling_with_one(name: str) -> None:
    seeds = range(20, 24)
    ours = sum(on_capes(name, "elastic-frontrunner", seed) for seed in seeds)
    assert ours < sum(on_capes(name, "doubling", seed) for seed in seeds)


def test_jobs_of_saxenas_scenario_end_as_soon_as_by_its_own_program() -> None:
    workload = published_workload("saxena-low-queue").make(Path(), 1.0).draw(1).workload
    means = [
        measure(simulate(workload, layout("40"), make_policy(name, {}))).mean_completion_seconds
        for name in ("elastic-frontrunner", "saxena")
    ]
    assert (means[0] or 9e9) < 1.05 * (means[1] or 0.0)


def test_whether_the_work_is_known_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="true or false"):
        make_policy("elastic-frontrunner", {"known": "no"})


@pytest.mark.parametrize("facts", [{"tail": 0.0}, {"near_s": -1.0}])
def test_a_guard_without_sense_is_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="near_s"):
        ElasticFrontrunner(**facts)

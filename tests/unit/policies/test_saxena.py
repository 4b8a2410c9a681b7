"""The dynamic program over GPUs and batches, and the scenario that it was published for."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, Job, JobId, Phase, Snapshot, SweepId
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.policies.saxena import Saxena, Scaling, greatest_sum, scaling
from hermes_ops.policies.toolbox.batch_speeds import (
    IDEAL,
    LinearStepTime,
    batches_of,
    fit_step_time,
)
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.metrics import Metrics, measure
from hermes_ops.simulator.published_workloads import published_workload
from hermes_ops.simulator.saxena_workload import KINDS, SaxenaSource


def waiting(number: int, least: int = 1, most: int = 4) -> Job:
    return Job(
        JobId(f"a/{number}"), SweepId("a"), float(number), Phase.PENDING,
        min_gpus=least, max_gpus=most,
    )  # fmt: skip


def pool(gpus: int, *jobs: Job) -> Snapshot:
    return Snapshot(100.0, tuple(Gpu(n) for n in range(gpus)), jobs)


def sizes(snapshot: Snapshot, policy: Saxena | None = None) -> dict[str, int]:
    plan, _ = (policy or Saxena()).decide(snapshot, None)
    return {grant.job: len(grant.gpus) for grant in plan.grants}


@given(
    tables=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=4),
    spare=st.integers(0, 6),
)
@settings(max_examples=60, deadline=None)
def test_the_program_finds_the_greatest_sum(tables: list[list[int]], spare: int) -> None:
    jobs = [
        Scaling(tuple(range(1, len(t) + 1)), (None,) * len(t), tuple(map(float, t))) for t in tables
    ]
    gpus = len(jobs) + spare
    picks = greatest_sum(jobs, gpus)
    assert sum(job.sizes[pick] for job, pick in zip(jobs, picks, strict=True)) <= gpus
    every = product(*(range(len(job.sizes)) for job in jobs))
    possible = [c for c in every if sum(p + 1 for p in c) <= gpus]
    best = max(sum(job.speed_ups[p] for job, p in zip(jobs, c, strict=True)) for c in possible)
    assert sum(job.speed_ups[p] for job, p in zip(jobs, picks, strict=True)) == best


def test_of_equal_sums_the_earlier_job_has_the_more_gpus() -> None:
    assert sizes(pool(5, waiting(0), waiting(1))) == {"a/0": 4, "a/1": 1}


def test_the_newest_jobs_wait_if_not_all_fit() -> None:
    jobs = (waiting(0, 2), waiting(1, 2), waiting(2, 3, 3), waiting(3, 1))
    assert sizes(pool(5, *jobs)) == {"a/0": 3, "a/1": 2}


def test_a_job_that_does_not_fit_takes_what_the_others_cannot_use() -> None:
    assert sizes(pool(3, waiting(0, 2, 2), waiting(1, 2), waiting(2))) == {"a/0": 2, "a/2": 1}


def test_dropping_ends_the_new_jobs_that_do_not_fit_and_no_other() -> None:
    begun = replace(waiting(2, 2), phase=Phase.WAITING)
    plan, _ = Saxena("drop").decide(pool(2, waiting(0, 2), waiting(1), begun), None)
    assert plan.ends == ("a/1",)
    assert plan.reasons[JobId("a/1")].text == "is dropped: it does not fit"


def test_a_batch_fits_in_one_pass_and_the_best_is_taken_on_each_size() -> None:
    batches = BatchRange(32, 128, most_local=32)
    model = LinearStepTime(0.1, 0.01, 0.2)
    chosen = scaling((1, 2, 4), batches, model)
    assert chosen.batches == (32, 64, 128)
    one, four = 32 / (0.1 + 0.32), 128 / (0.1 + 0.32 + 0.2 * 1.5)
    assert chosen.speed_ups == pytest.approx((1.0, 64 / 0.62 / one, four / one))


def test_a_fixed_largest_batch_needs_all_the_gpus_that_hold_it() -> None:
    batches = BatchRange(32, 128, most_local=32)
    assert scaling((1, 2, 3, 4), batches, IDEAL, "largest").sizes == (4,)


def test_a_job_whose_batch_fits_nowhere_chooses_its_own() -> None:
    chosen = scaling((1, 2), BatchRange(32, 128, most_local=8), IDEAL)
    assert (chosen.sizes, chosen.batches) == ((1, 2), (None, None))


def test_batches_are_multiples_of_the_initial_one_and_few() -> None:
    assert batches_of(BatchRange(32, 100)) == (32, 64, 96, 100)
    many = batches_of(BatchRange(1, 10_000))
    assert (len(many), many[0], many[-1]) == (32, 1, 10_000)


@pytest.mark.parametrize("kind", KINDS)
def test_the_declared_steps_give_every_step_time(kind: str) -> None:
    truth = KINDS[kind]
    model = fit_step_time(
        tuple((t.gpus, float(t.local_batch or 0), t.seconds) for t in truth.profile())
    )
    for gpus, local in product((1, 3, 10), (4, 32)):
        fitted = float(model.seconds(np.array(gpus, np.float64), np.array(local, np.float64)))
        assert fitted == pytest.approx(truth.step_s(gpus, gpus * local))


def test_one_measured_size_is_taken_to_scale_ideally_and_none_as_well() -> None:
    assert fit_step_time(((4, 8.0, 2.0),)) == LinearStepTime(0.0, 0.25, 0.0)
    assert fit_step_time(()) == IDEAL
    assert fit_step_time(((1, 8.0, float("inf")), (2, 8.0, 0.0))) == IDEAL


def test_a_job_that_slows_down_on_more_gpus_stays_small() -> None:
    slow = tuple(StepTime(g, s) for g, s in ((1, 1.0), (2, 3.0), (4, 4.0)))
    jobs = (replace(waiting(0), step_times=slow, sweep=SweepId("b")), waiting(1))
    assert sizes(pool(5, *jobs)) == {"a/0": 1, "a/1": 4}


def test_a_job_of_several_gpus_at_least_that_slows_down_on_more_stays_small_too() -> None:
    slow = tuple(StepTime(g, s) for g, s in ((2, 1.0), (4, 2.0)))
    assert sizes(pool(4, replace(waiting(0, least=2), step_times=slow))) == {"a/0": 2}


def test_steps_as_long_with_more_samples_make_more_samples_cheap_but_not_free() -> None:
    model = fit_step_time(((1, 8.0, 0.5), (1, 16.0, 0.49)))
    assert 0 < model.a_sample_s < 0.01 * 0.5 / 8
    assert model.fixed_s == pytest.approx(0.5, rel=0.02)


def test_what_a_kind_has_measured_holds_for_jobs_that_have_measured_nothing() -> None:
    slow = tuple(StepTime(g, s) for g, s in ((1, 1.0), (2, 3.0), (4, 4.0)))
    assert sizes(pool(6, replace(waiting(0), step_times=slow), waiting(1))) == {"a/0": 1, "a/1": 1}


def figures(name: str, batch: str, seeds: int = 3) -> list[Metrics]:
    source = published_workload(name).make(None, 1.0)  # type: ignore[arg-type]  # it reads no files
    runs = (
        simulate(source.draw(seed).workload, layout("40"), Saxena(batch=batch))
        for seed in range(seeds)
    )
    return [measure(run) for run in runs]


@pytest.mark.law
def test_with_a_queue_under_high_load_twice_as_many_jobs_are_done_as_with_random_batches() -> None:
    elastic, random = (figures("saxena-high-queue", batch) for batch in ("elastic", "random"))
    for ours, theirs in zip(elastic, random, strict=True):
        assert ours.completed_in_window >= 2 * theirs.completed_in_window


def test_at_low_load_jobs_are_done_1_7_times_as_soon_as_with_the_least_batch() -> None:
    elastic, least = (figures("saxena-low-queue", batch) for batch in ("elastic", "least"))
    means = [sum(m.mean_completion_seconds or 0.0 for m in metrics) for metrics in (elastic, least)]
    assert means[1] / means[0] >= 1.7


def test_a_workload_that_drops_ends_every_job_that_does_not_fit_at_once() -> None:
    source = SaxenaSource("bursty", drops=True)
    run = simulate(source.draw(0).workload, layout("40"), Saxena(batch="largest"))
    dropped = [o for o in run.outcomes if o.state == "stopped_early"]
    assert len(dropped) > 100
    assert all(o.first_start_s is None and o.service_gpu_s == 0 for o in dropped)
    assert all((o.ended_s or 0) - o.work.submitted_s <= 600 for o in dropped)


def test_two_batches_on_one_gpu_tell_what_does_not_depend_on_the_batch() -> None:
    model = fit_step_time(((1, 8.0, 0.3), (1, 16.0, 0.5)))
    assert (model.fixed_s, model.a_sample_s, model.a_reduction_s) == pytest.approx((0.1, 0.025, 0))

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, JobId, Point, SweepId
from hermes_ops.simulator.metrics import (
    fairness,
    makespan_s,
    measure,
    percentile,
    regret,
    time_to_best_s,
    time_to_good_s,
    utilisation,
)
from hermes_ops.simulator.workload import (
    JobOutcome,
    LossObservation,
    SimulatedSegment,
    SimulationRun,
    Work,
    Workload,
)


def work(number: int, seconds: float, submitted_s: float = 0.0, **facts: Any) -> Work:
    return Work(JobId(f"s/{number}"), submitted_s, seconds, sweep=SweepId("s"), **facts)


def outcome(job: Work, start_s: float, end_s: float, **facts: Any) -> JobOutcome:
    held_s = facts.pop("held_s", end_s - start_s)
    service = held_s * job.gpus
    given: dict[str, Any] = {
        "state": "finished", "first_start_s": start_s, "ended_s": end_s, "trained_s": job.seconds,
        "service_gpu_s": service, "lost_gpu_s": service - job.seconds * job.gpus,
        "preemptions": 0, "waited_s": end_s - job.submitted_s - held_s,
    }  # fmt: skip
    return JobOutcome(job, **{**given, **facts})


def run(
    outcomes: list[JobOutcome], segments: list[SimulatedSegment], gpus: int = 1, **facts: Any
) -> SimulationRun:
    workload = Workload("hand-made", tuple(o.work for o in outcomes))
    pool = tuple(Gpu(i) for i in range(gpus))
    return SimulationRun(workload, pool, "fifo", tuple(outcomes), tuple(segments), **facts)


def segment(number: int, gpus: tuple[int, ...], begin_s: float, end_s: float) -> SimulatedSegment:
    return SimulatedSegment(JobId(f"s/{number}"), gpus, begin_s, end_s, 0.0, "finished")


def two_in_turn() -> SimulationRun:
    """One GPU: a job of 10 s from 100 to 110, one of 30 s, preempted once, from 110 to 142."""
    first, second = work(0, 10.0, 100.0), work(1, 30.0, 100.0)
    return run(
        [
            outcome(first, 100.0, 110.0),
            outcome(second, 110.0, 142.0, preemptions=1),
        ],
        [segment(0, (0,), 100.0, 110.0), segment(1, (0,), 110.0, 142.0)],
        decisions=2,
        decision_s=(0.001, 0.003),
    )


def test_the_figures_of_two_jobs_in_turn() -> None:
    found = measure(two_in_turn())
    assert (found.jobs, found.finished, found.preemptions, found.decisions) == (2, 2, 1, 2)
    assert found.mean_completion_seconds == 26.0
    assert found.median_completion_seconds == 26.0
    assert found.p95_completion_seconds == pytest.approx(10 + 0.95 * 32)
    assert found.mean_queueing_seconds == 5.0
    assert found.makespan_seconds == 42.0
    assert found.utilisation == 1.0
    assert (found.gpu_seconds, found.lost_gpu_seconds) == (42.0, 2.0)
    assert found.decision_ms == pytest.approx(2.0)
    assert found.time_to_best_seconds is None


def test_a_job_that_was_stopped_early_has_no_completion() -> None:
    seen = two_in_turn()
    ended = replace(seen.outcomes[1], state="stopped_early")
    found = measure(replace(seen, outcomes=(seen.outcomes[0], ended)))
    assert (found.jobs, found.finished) == (2, 1)
    assert found.mean_completion_seconds == 10.0
    assert found.makespan_seconds == 42.0


def test_nothing_finished_has_no_completion_and_no_invented_number() -> None:
    found = measure(run([], [])).document()
    assert found["mean_completion_seconds"] is None
    assert found["fairness_max"] is None
    assert found["decision_ms"] is None
    assert (found["makespan_seconds"], found["utilisation"]) == (0.0, 0.0)


def test_a_percentile_lies_between_the_nearest_values() -> None:
    assert percentile([0.0, 10.0], 95) == pytest.approx(9.5)
    assert percentile([], 95) is None


# -- use of the GPUs ---------------------------------------------------------------------------


def test_an_idle_gpu_is_not_used() -> None:
    job = work(0, 10.0)
    seen = run([outcome(job, 0.0, 10.0)], [segment(0, (1,), 0.0, 10.0)], gpus=4)
    assert utilisation(seen) == 0.25


def test_a_shared_gpu_counts_once() -> None:
    jobs = [work(0, 5.0), work(1, 5.0)]
    seen = run(
        [outcome(j, 0.0, 10.0) for j in jobs],
        [segment(0, (0,), 0.0, 10.0), segment(1, (0,), 0.0, 10.0)],
        gpus=2,
    )
    assert utilisation(seen) == 0.5


def test_time_within_a_longer_segment_counts_once() -> None:
    jobs = [work(n, 5.0) for n in range(3)]
    seen = run(
        [outcome(j, 0.0, 10.0) for j in jobs],
        [segment(0, (0,), 0.0, 10.0), segment(1, (0,), 1.0, 2.0), segment(2, (0,), 3.0, 4.0)],
        gpus=2,
    )
    assert utilisation(seen) == 0.5


pieces = st.lists(
    st.tuples(st.integers(0, 3), st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=20
)


@given(pieces)
def test_utilisation_is_a_part_of_the_whole(found: list[tuple[int, float, float]]) -> None:
    segments = [segment(0, (g,), begin, begin + length) for g, begin, length in found]
    seen = run([outcome(work(0, 1.0), 0.0, 1.0)], segments, gpus=4)
    assert 0.0 <= utilisation(seen) <= 1.0
    assert makespan_s(seen) == max(s.end_s for s in segments)


# -- fairness ----------------------------------------------------------------------------------


def test_two_equal_jobs_that_take_turns_for_half_of_the_gpu_each_are_treated_fairly() -> None:
    jobs = [work(0, 10.0), work(1, 10.0)]
    seen = run([outcome(j, 0.0, 20.0, held_s=10.0) for j in jobs], [])
    assert list(fairness(seen).values()) == [1.0, 1.0]


def test_the_job_that_waited_for_another_paid_for_it() -> None:
    # Alone with its half each would take 20 s while both are there; the second one is alone
    # from 10 to 20, so on its stay 1.5 jobs contend and independently it would take 15 s.
    jobs = [work(0, 10.0), work(1, 10.0)]
    seen = run([outcome(jobs[0], 0.0, 10.0), outcome(jobs[1], 10.0, 20.0)], [])
    assert list(fairness(seen).values()) == [0.5, pytest.approx(20 / 15)]


def test_a_share_is_no_more_than_a_job_asks_for() -> None:
    job = work(0, 10.0)
    assert fairness(run([outcome(job, 5.0, 15.0)], [], gpus=8)) == {job.id: 1.5}


# -- the best trial ----------------------------------------------------------------------------


def learning() -> SimulationRun:
    """Two trials on one GPU; s/1 has the lowest loss (at its first epoch) and ends second."""
    first = work(0, 2.0, curve=(Point(1, 5.0, 1.0), Point(2, 2.01, 2.0)))
    second = work(1, 2.0, curve=(Point(1, 2.0, 1.0), Point(2, 3.0, 2.0)))
    observations = (
        LossObservation(first.id, 1, 5.0, 11.0),
        LossObservation(first.id, 2, 2.01, 12.0),
        LossObservation(second.id, 1, 2.0, 13.0),
        LossObservation(second.id, 2, 3.0, 14.0),
    )
    jobs = [replace(first, submitted_s=10.0), replace(second, submitted_s=10.0)]
    return run(
        [outcome(jobs[0], 10.0, 12.0), outcome(jobs[1], 12.0, 14.0)],
        [segment(0, (0,), 10.0, 12.0), segment(1, (0,), 12.0, 14.0)],
        observations=observations,
    )


def test_the_best_trial_counts_when_it_has_run_all_its_epochs() -> None:
    assert time_to_best_s(learning()) == 4.0


def test_a_best_trial_that_was_stopped_early_is_never_there() -> None:
    seen = learning()
    ended = replace(seen.outcomes[1], state="stopped_early")
    assert time_to_best_s(replace(seen, outcomes=(seen.outcomes[0], ended))) is None


def test_of_two_equal_bests_the_first_submitted_counts() -> None:
    seen = learning()
    equal = [
        replace(o, work=replace(o.work, curve=(Point(1, 1.0, 1.0),))) for o in seen.outcomes
    ]  # fmt: skip
    assert time_to_best_s(run(equal, list(seen.segments))) == 2.0


def test_any_trial_within_one_percent_is_good() -> None:
    assert time_to_good_s(learning()) == 2.0
    assert time_to_good_s(learning(), within=0.001) == 3.0


def test_a_negative_loss_has_its_one_percent_above_it() -> None:
    job = work(0, 2.0, curve=(Point(1, -0.995, 1.0), Point(2, -1.0, 2.0)))
    observations = (LossObservation(job.id, 1, -0.995, 1.0), LossObservation(job.id, 2, -1.0, 2.0))
    assert time_to_good_s(run([outcome(job, 0.0, 2.0)], [], observations=observations)) == 1.0


def test_regret_falls_with_each_better_loss() -> None:
    times_s, regrets = zip(*regret(learning()), strict=True)
    assert times_s == (1.0, 2.0, 3.0)
    assert regrets == (3.0, pytest.approx(0.01), 0.0)


def test_a_loss_as_low_as_the_best_so_far_is_no_fall() -> None:
    job = work(0, 3.0, curve=(Point(1, 4.0, 1.0), Point(2, 4.0, 2.0), Point(3, 3.0, 3.0)))
    observations = tuple(LossObservation(job.id, p.step, p.loss, p.seconds) for p in job.curve)
    found = regret(run([outcome(job, 0.0, 3.0)], [], observations=observations))
    assert found == ((1.0, 1.0), (3.0, 0.0))


def test_a_diverged_loss_is_neither_the_best_nor_observed() -> None:
    job = work(0, 2.0, curve=(Point(1, math.nan, 1.0), Point(2, 4.0, 2.0)))
    observations = (LossObservation(job.id, 1, math.nan, 1.0), LossObservation(job.id, 2, 4.0, 2.0))
    seen = run([outcome(job, 0.0, 2.0)], [], observations=observations)
    assert regret(seen) == ((2.0, 0.0),)
    assert time_to_good_s(seen) == 2.0


losses = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


@given(losses)
def test_regret_never_rises_and_ends_at_nothing_when_all_has_been_seen(found: list[float]) -> None:
    curve = tuple(Point(i, loss, float(i)) for i, loss in enumerate(found, start=1))
    job = work(0, float(len(found)), curve=curve)
    observations = tuple(LossObservation(job.id, p.step, p.loss, p.seconds) for p in curve)
    steps = regret(run([outcome(job, 0.0, job.seconds)], [], observations=observations))
    values = [value for _, value in steps]
    assert values == sorted(values, reverse=True)
    assert values[-1] == 0.0
    assert [at for at, _ in steps] == sorted(at for at, _ in steps)

"""The order of submission is one total order."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Job, JobId, Phase, SweepId
from hermes_ops.core.order import by_submission, submission


def job(number: int, submitted_s: float) -> Job:
    return Job(JobId(f"s/{number}"), SweepId("s"), submitted_s, Phase.WAITING)


@given(st.lists(st.sampled_from((0.0, 1.0, 2.0)), max_size=12), st.randoms(use_true_random=False))
def test_many_jobs_come_in_the_order_of_their_keys(times_s: list[float], chance: Random) -> None:
    jobs = [job(number, time_s) for number, time_s in enumerate(times_s)]
    chance.shuffle(jobs)
    assert by_submission(jobs) == sorted(jobs, key=submission)


def test_of_jobs_that_came_together_the_tenth_is_behind_the_second() -> None:
    late = job(1, 5.0)
    assert by_submission([late, job(10, 0.0), job(2, 0.0)]) == [job(2, 0.0), job(10, 0.0), late]


def test_jobs_that_came_at_different_times_come_by_time_whatever_their_ids() -> None:
    assert by_submission([job(1, 2.0), job(9, 1.0)]) == [job(9, 1.0), job(1, 2.0)]

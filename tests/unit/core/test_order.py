"""The order of submission is one total order."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.order import by_submission, submission
from tests.builders import job


@given(st.lists(st.sampled_from((0.0, 1.0, 2.0)), max_size=12), st.randoms(use_true_random=False))
def test_many_jobs_come_in_the_order_of_their_keys(times_s: list[float], chance: Random) -> None:
    jobs = [job(number, submitted_s=time_s) for number, time_s in enumerate(times_s)]
    chance.shuffle(jobs)
    assert by_submission(jobs) == sorted(jobs, key=submission)


def test_of_jobs_that_came_together_the_tenth_is_behind_the_second() -> None:
    late, tenth, second = job(1, submitted_s=5.0), job(10), job(2)
    assert by_submission([late, tenth, second]) == [second, tenth, late]


def test_jobs_that_came_at_different_times_come_by_time_whatever_their_ids() -> None:
    first, late = job(9, submitted_s=1.0), job(1, submitted_s=2.0)
    assert by_submission([late, first]) == [first, late]

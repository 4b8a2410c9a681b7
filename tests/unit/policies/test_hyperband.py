"""Hyperband in tiny worlds."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from hermes_ops.core.model import Job, JobId, Phase, Plan
from hermes_ops.policies.hyperband import Hyperband, shapes
from tests import builders
from tests.builders import decided

trial = partial(builders.trial, total_steps=9)


def plan(*jobs: Job, gpus: int = 1, **parameters: Any) -> Plan:
    return decided(Hyperband(**parameters), *jobs, gpus=gpus)


def granted(found: Plan) -> list[str]:
    return sorted((g.job for g in found.grants), key=lambda job: int(job[2:]))


def test_the_brackets_of_81_steps_are_those_of_the_paper() -> None:
    assert shapes(81, 3) == [
        (81, (1, 3, 9, 27)),
        (34, (3, 9, 27)),
        (15, (9, 27)),
        (8, (27,)),
        (5, ()),
    ]


def test_rungs_of_other_lengths_are_rounded_down_to_whole_steps() -> None:
    assert shapes(51, 3) == [(27, (1, 5, 17)), (12, (5, 17)), (6, (17,)), (4, ())]
    assert shapes(1, 3) == [(1, ())]


def test_trials_are_dealt_to_the_brackets_in_order_of_submission_and_then_again() -> None:
    jobs = [trial(n) for n in range(1, 21)]
    dealt = Hyperband().deal(jobs)
    assert [(len(trials), rungs) for trials, rungs in dealt] == [
        (9, (1, 3)),
        (5, (3,)),
        (3, ()),
        (3, (1, 3)),
    ]
    assert [job for trials, _ in dealt for job in trials] == jobs


def test_the_first_bracket_is_brought_on_before_the_next_one_begins() -> None:
    rung = [trial(n, n / 10) for n in range(1, 10)]
    assert granted(plan(*rung, trial(10), trial(11), gpus=3)) == ["s/1", "s/2", "s/3"]


def test_an_idle_gpu_serves_the_next_bracket_before_those_left_behind() -> None:
    rung = [trial(n, n / 10) for n in range(1, 10)]
    found = plan(*rung, trial(10), gpus=5)
    assert granted(found) == ["s/1", "s/2", "s/3", "s/4", "s/10"]


def test_trials_of_another_bracket_are_not_compared() -> None:
    ended = [trial(n, *[0.9] * 9, phase=Phase.ENDED) for n in range(1, 10)]
    second = [trial(n, n / 100, n / 100, n / 100) for n in range(10, 15)]
    found = plan(*ended, *second)
    assert granted(found) == ["s/10"]
    assert "number 2 of 5 at rung 3" in found.reasons[JobId("s/11")].text


def test_the_last_bracket_runs_to_its_ends() -> None:
    before = [trial(n, *[0.1] * 9, phase=Phase.ENDED) for n in range(1, 15)]
    assert granted(plan(*before, trial(15, *[0.5] * 5, gpu=0), trial(16))) == ["s/15"]


def test_without_known_lengths_the_parameter_counts() -> None:
    jobs = [trial(n, total_steps=None) for n in range(1, 5)]
    assert Hyperband(max_steps=3).deal(jobs)[0] == (jobs[:3], (1,))


def test_jobs_without_curves_are_served_in_order_of_submission() -> None:
    jobs = [trial(n, submitted_s=float(s), total_steps=None) for n, s in ((1, 5), (2, 3), (3, 4))]
    assert granted(plan(*jobs, gpus=2)) == ["s/2", "s/3"]


def test_killing_ends_those_left_behind() -> None:
    rung = [trial(n, n / 10) for n in range(1, 10)]
    assert set(plan(*rung, kill=True).ends) == {f"s/{n}" for n in range(4, 10)}


@pytest.mark.parametrize("wrong", [{"eta": 1}, {"max_steps": 0}])
def test_parameters_that_give_no_brackets_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"eta|max_steps"):
        Hyperband(**wrong)

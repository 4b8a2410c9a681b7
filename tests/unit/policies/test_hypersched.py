"""HyperSched in tiny worlds: steps take 2 s, rungs at 1, 4, 16 steps."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_ops.core.model import Job, JobId, Phase, Plan
from hermes_ops.policies.hypersched import HyperSched
from tests.builders import decided, granted, trial


def plan(*jobs: Job, gpus: int = 1, now_s: float = 100.0, **parameters: Any) -> Plan:
    return decided(HyperSched(**parameters), *jobs, gpus=gpus, now_s=now_s)


def test_a_new_trial_is_opened_while_there_is_time_for_it() -> None:
    """The longest has trained for 8 s: four times that is enough."""
    waiting = trial(3, *[0.5] * 4)
    assert granted(plan(waiting, trial(2), deadline_s=132.0)) == ["s/2"]
    assert granted(plan(waiting, trial(2), deadline_s=131.0)) == ["s/3"]


def test_the_steps_of_a_whole_trial_need_no_more_time_than_they_take() -> None:
    waiting = trial(1, *[0.5] * 4, total_steps=5)
    assert granted(plan(waiting, trial(2, total_steps=5), deadline_s=110.0)) == ["s/2"]
    assert granted(plan(waiting, trial(2, total_steps=5), deadline_s=109.0)) == ["s/1"]


def test_a_trial_that_comes_too_late_is_told_so() -> None:
    found = plan(trial(1, *[0.5] * 4), trial(2), deadline_s=110.0)
    text = found.reasons[JobId("s/2")].text
    assert text == "not opened: 10.0 s are left, a new trial is worth it with 32.0 s"


def test_the_earliest_deadline_of_a_job_counts_without_the_parameter() -> None:
    waiting = trial(1, *[0.5] * 4)
    soon = trial(2, deadline_s=110.0)
    assert granted(plan(waiting, soon, trial(3, deadline_s=900.0))) == ["s/1"]
    assert granted(plan(waiting, soon, deadline_s=900.0)) == ["s/2"]


def test_the_deadline_counts_from_the_first_submission() -> None:
    waiting = trial(1, *[0.5] * 4, submitted_s=50.0)
    assert granted(plan(waiting, trial(2, submitted_s=60.0), deadline_s=90.0)) == ["s/2"]
    assert granted(plan(waiting, trial(2, submitted_s=60.0), deadline_s=80.0)) == ["s/1"]


def test_without_a_deadline_new_trials_open_before_paused_ones_resume() -> None:
    assert granted(plan(trial(1, *[0.5] * 4), trial(2), now_s=1e9)) == ["s/2"]


def test_promotable_trials_come_first_before_and_after_the_limit() -> None:
    rung = [trial(n, n / 10) for n in (1, 2, 3, 4)]
    assert granted(plan(*rung, trial(5), deadline_s=1000.0)) == ["s/1"]
    assert granted(plan(*rung, trial(5), deadline_s=101.0)) == ["s/1"]


def test_new_trials_open_after_the_limit_once_nothing_else_is_left() -> None:
    ended = trial(1, *[0.5] * 4, phase=Phase.ENDED)
    assert granted(plan(ended, trial(2), deadline_s=1.0)) == ["s/2"]


def test_jobs_without_curves_are_served_in_order_of_submission() -> None:
    jobs = [trial(n, submitted_s=float(s)) for n, s in ((1, 5), (2, 3), (3, 4))]
    assert granted(plan(*jobs, gpus=2)) == ["s/2", "s/3"]


@pytest.mark.parametrize("wrong", [{"eta": 1}, {"deadline_s": -1.0}, {"deadline_s": float("nan")}])
def test_wrong_parameters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"eta|deadline_s"):
        HyperSched(**wrong)

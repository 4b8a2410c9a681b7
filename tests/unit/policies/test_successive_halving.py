"""Successive halving in tiny worlds: rungs at 1, 3, 9 steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from hermes_ops.core.model import Job, JobId, Phase, Plan
from hermes_ops.policies.successive_halving import SuccessiveHalving
from tests import builders
from tests.builders import decided, granted

trial = partial(builders.trial, total_steps=20)


def plan(*jobs: Job, gpus: int = 1, **parameters: Any) -> Plan:
    return decided(SuccessiveHalving(**parameters), *jobs, gpus=gpus)


def test_nobody_goes_on_before_all_have_reached_the_rung() -> None:
    found = plan(trial(1, 0.1, gpu=0), trial(2, 0.9), trial(3))
    assert granted(found) == ["s/3"]
    assert "1 have still to reach rung 1" in found.reasons[JobId("s/1")].text


def test_the_best_third_goes_on_once_all_have_reached_the_rung() -> None:
    rung = [trial(n, loss) for n, loss in ((1, 0.5), (2, 0.1), (3, 0.3), (4, 0.9), (5, 0.7))]
    found = plan(*rung, trial(6, 0.8, gpu=0))
    assert granted(found) == ["s/2"]
    assert granted(plan(*rung, trial(6, 0.8), gpus=2)) == ["s/2", "s/3"]
    assert "number 3 of 6 at rung 1" in found.reasons[JobId("s/1")].text


def test_one_of_the_best_third_does_not_leave_its_gpu_for_another() -> None:
    rung = [trial(n, loss) for n, loss in ((1, 0.5), (2, 0.1), (3, 0.3), (4, 0.9), (5, 0.7))]
    assert granted(plan(*rung, trial(6, 0.2, gpu=0))) == ["s/6"]


def test_of_two_trials_one_goes_on() -> None:
    found = plan(trial(1, 0.5), trial(2, 0.1))
    assert found.reasons[JobId("s/2")].text == "runs to its end, with 1 of 1"
    assert found.reasons[JobId("s/1")].text == "paused: number 2 of 2 at rung 1"


def test_equal_losses_go_on_in_order_of_submission() -> None:
    found = plan(*(trial(n, 0.5, submitted_s=-float(n)) for n in (1, 2, 3)))
    assert granted(found) == ["s/3"]


def test_a_gpu_that_no_straggler_needs_serves_the_best_that_rests() -> None:
    found = plan(trial(1, 0.5), trial(2, 0.1), trial(3, gpu=0, phase=Phase.RUNNING), gpus=2)
    assert granted(found) == ["s/2", "s/3"]


def test_who_runs_on_an_idle_gpu_gives_way_to_those_who_go_on() -> None:
    resting = trial(1, 0.5, 0.4, gpu=0, steps_at_start=1)
    assert granted(plan(resting, trial(2, 0.1), trial(3, 0.9))) == ["s/2"]


def test_a_trial_that_has_ended_is_not_waited_for() -> None:
    found = plan(trial(1, phase=Phase.ENDED), trial(2, 0.4, gpu=0), trial(3, 0.3))
    assert granted(found) == ["s/3"]


def test_those_left_behind_last_resume_first_when_the_best_have_ended() -> None:
    best = trial(1, *[0.1] * 20, phase=Phase.ENDED)
    second = [trial(n, 0.2, 0.2, 0.2) for n in (2, 3)]
    others = [trial(n, 0.15 + n / 10) for n in range(4, 10)]
    found = plan(best, *second, *others)
    assert granted(found) == ["s/2"]
    assert found.ranking[:3] == ("s/3", "s/4", "s/5")


def test_one_trial_alone_runs_to_its_end() -> None:
    assert granted(plan(trial(1, 0.5, gpu=0))) == ["s/1"]


def test_without_known_lengths_the_rungs_go_on() -> None:
    deep = [trial(n, *[n / 10] * 27, total_steps=None) for n in (1, 2, 3)]
    assert granted(plan(*deep)) == ["s/1"]


def test_jobs_without_curves_are_served_in_order_of_submission() -> None:
    jobs = [trial(n, submitted_s=float(s), total_steps=None) for n, s in ((1, 5), (2, 3), (3, 4))]
    assert granted(plan(*jobs, gpus=2)) == ["s/2", "s/3"]


def test_killing_ends_those_left_behind() -> None:
    found = plan(trial(1, 0.5), trial(2, 0.1), trial(3, 0.9, gpu=0), kill=True)
    assert set(found.ends) == {"s/1", "s/3"}
    assert granted(found) == ["s/2"]
    assert plan(trial(1, 0.5), trial(2, 0.1), trial(3), kill=True).ends == ()


@pytest.mark.parametrize("wrong", [{"eta": 1}, {"first_rung": 0}])
def test_parameters_that_give_no_rungs_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"eta|first_rung"):
        SuccessiveHalving(**wrong)

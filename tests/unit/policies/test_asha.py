"""ASHA in tiny worlds: one GPU unless said otherwise, rungs at 1, 3, 9 steps."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest

from hermes_ops.core.model import Job, JobId, Phase, Plan, SweepId
from hermes_ops.policies.asha import Asha
from tests.builders import decided, granted, trial


def plan(*jobs: Job, gpus: int = 1, **parameters: Any) -> Plan:
    return decided(Asha(**parameters), *jobs, gpus=gpus)


def test_a_trial_at_its_rungs_end_makes_room_for_a_new_one() -> None:
    assert granted(plan(trial(1, 0.5, gpu=0), trial(2))) == ["s/2"]


def test_a_trial_between_rungs_keeps_its_gpu_whatever_waits() -> None:
    better = [trial(n, 0.1) for n in (2, 3, 4)]
    assert granted(plan(trial(1, 0.9, 0.8, gpu=0), *better, trial(5))) == ["s/1"]


def test_the_best_third_of_a_rung_is_promoted_before_a_new_trial_opens() -> None:
    found = plan(trial(1, 0.5), trial(2, 0.3), trial(3, 0.9, gpu=0), trial(4))
    assert granted(found) == ["s/2"]
    assert "number 1 of 3 at rung 1" in found.reasons[JobId("s/2")].text


def test_a_trial_in_the_best_third_when_it_reports_goes_straight_on() -> None:
    found = plan(trial(1, 0.5), trial(2, 0.6), trial(3, 0.1, gpu=0), trial(4))
    assert granted(found) == ["s/3"]


def test_who_has_been_promoted_counts_in_its_old_rung() -> None:
    """Of three at rung 1 one may go on, and it has."""
    found = plan(trial(1, 0.1, 0.1, gpu=0), trial(2, 0.3), trial(3, 0.4), trial(4), gpus=2)
    assert granted(found) == ["s/1", "s/4"]


def test_the_highest_rung_is_promoted_first() -> None:
    rung_3 = [trial(n, 0.9, 0.8, loss) for n, loss in ((1, 0.75), (2, 0.7), (3, 0.8))]
    rung_1 = [trial(n, 0.1 * n) for n in (4, 5, 6)]
    assert granted(plan(*rung_3, *rung_1)) == ["s/2"]


def test_the_figure_at_a_rung_is_the_lowest_loss_up_to_it() -> None:
    later = trial(2, 0.6, 0.1, 0.1, gpu=0, steps_at_start=3)
    found = plan(trial(1, 0.5), later, trial(3, 0.7), trial(4, 0.8), gpus=2)
    assert granted(found) == ["s/1", "s/2"]


def test_a_trial_resumed_at_a_rung_runs_on_from_there() -> None:
    resumed = trial(1, 0.9, gpu=0, steps_at_start=1)
    assert granted(plan(resumed, trial(2, 0.1), trial(3, 0.2), trial(4))) == ["s/1"]


def test_a_trial_that_starts_is_not_stopped() -> None:
    starting = trial(1, 0.9, gpu=0, phase=Phase.STARTING)
    assert granted(plan(starting, trial(2, 0.1), trial(3, 0.2), trial(4))) == ["s/1"]


def test_the_best_paused_trial_of_the_highest_rung_resumes_when_nothing_else_is_left() -> None:
    found = plan(trial(1, 0.5), trial(2, 0.9, 0.8, 0.7))
    assert granted(found) == ["s/2"]
    assert "nothing is promotable or new" in found.reasons[JobId("s/2")].text
    assert found.ranking == ("s/1",)


def test_a_rung_at_the_last_step_judges_nobody() -> None:
    last = trial(1, 0.9, 0.8, 0.7, gpu=0, total_steps=3)
    assert granted(plan(last, trial(2))) == ["s/1"]


@pytest.mark.parametrize("loss", [nan, float("inf"), float("-inf")])
def test_a_trial_without_a_finite_loss_is_never_promoted(loss: float) -> None:
    assert granted(plan(*(trial(n, loss) for n in (1, 2, 3)), trial(4))) == ["s/4"]
    assert granted(plan(*(trial(n, loss) for n in (1, 2)), trial(3, 0.5))) == ["s/3"]


def test_ended_trials_count_at_their_rungs() -> None:
    ended = [trial(n, 0.1, phase=Phase.ENDED) for n in (1, 2)]
    assert granted(plan(*ended, trial(3, 0.5), trial(4))) == ["s/4"]


def test_rungs_belong_to_a_sweep() -> None:
    others = [trial(n, 0.1, sweep=SweepId("t"), phase=Phase.ENDED) for n in (7, 8)]
    found = plan(trial(1, 0.5), trial(2, 0.6), trial(3, 0.7), trial(4), *others)
    assert granted(found) == ["s/1"]


def test_the_sweep_with_fewer_gpus_for_its_weight_is_served_first() -> None:
    mine = [trial(1, 0.9, 0.8, gpu=0), trial(2)]
    others = [trial(n, sweep=SweepId("t"), submitted_s=1.0) for n in (3, 4)]
    assert granted(plan(*mine, *others, gpus=2)) == ["s/1", "s/3"]
    heavy = [trial(1, 0.9, 0.8, gpu=0, weight=3.0), trial(2, weight=3.0)]
    assert granted(plan(*heavy, *others, gpus=2)) == ["s/1", "s/2"]


def test_a_job_that_must_not_be_stopped_keeps_its_gpu_at_a_rung() -> None:
    assert granted(plan(trial(1, 0.9, gpu=0, preemptible=False), trial(2))) == ["s/1"]


def test_jobs_without_curves_are_served_in_order_of_submission() -> None:
    jobs = [trial(n, submitted_s=float(s)) for n, s in ((1, 5), (2, 3), (3, 4))]
    assert granted(plan(*jobs, gpus=2)) == ["s/2", "s/3"]


def test_a_gang_is_promoted_whole_or_not_at_all() -> None:
    gang = {"min_gpus": 2, "max_gpus": 2}
    waits = [trial(n, 0.1 * n, **gang) for n in (1, 2, 3)]
    assert granted(plan(*waits, trial(4, 0.9, 0.8, gpu=0), gpus=2)) == ["s/4"]
    assert plan(*waits, gpus=2).gpus_of(JobId("s/1")) == (0, 1)


def test_killing_ends_who_is_not_in_the_best_third_of_a_full_rung() -> None:
    jobs = [trial(1, 0.5), trial(2, 0.3), trial(3, 0.9, gpu=0), trial(4)]
    found = plan(*jobs, kill=True)
    assert set(found.ends) == {"s/1", "s/3"}
    assert granted(found) == ["s/2"]
    assert plan(trial(1, 0.5), trial(2, 0.3), kill=True).ends == ()


@pytest.mark.parametrize("wrong", [{"eta": 1}, {"eta": 2.5}, {"first_rung": 0}, {"eta": True}])
def test_parameters_that_give_no_rungs_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"eta|first_rung"):
        Asha(**wrong)

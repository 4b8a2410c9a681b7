"""POP in tiny worlds: steps take 2 s."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_ops.core.model import Gpu, Job, JobId, Plan, Snapshot
from hermes_ops.policies.pop import Division, Pop, TargetForecast, divide, forecast
from hermes_ops.policies.toolbox.curve_fit import lowest_fits
from tests.builders import decided, granted, trial


def plan(*jobs: Job, gpus: int = 1, now_s: float = 100.0, **parameters: Any) -> Plan:
    return decided(Pop(**parameters), *jobs, gpus=gpus, now_s=now_s)


def falling(floor: float, points: int = 8) -> list[float]:
    return [1 / (0.5 * n + 1) + floor for n in range(1, points + 1)]


def known(job: Job, target: float, horizon: int = 40) -> TargetForecast:
    return forecast(job, lowest_fits([job.curve])[0], target, 0.01, horizon)


def divided(chances: list[float], gpus: int, needs: int = 1) -> Division:
    jobs = [trial(n, 0.5, min_gpus=needs, max_gpus=needs) for n in range(len(chances))]
    pairs = [(TargetForecast(p, 1.0, 0.0, 0.0), j) for p, j in zip(chances, jobs, strict=True)]
    return divide(pairs, Snapshot(0.0, tuple(Gpu(n) for n in range(gpus)), tuple(jobs)))


def test_the_chance_is_even_when_the_predicted_end_is_the_target() -> None:
    job = trial(1, *falling(0.0), total_steps=38)
    assert known(job, 1 / 20).chance == pytest.approx(0.5, abs=0.02)
    assert known(job, 1 / 10).chance > 0.5 > known(job, 1 / 40).chance


def test_who_has_reached_the_target_is_sure_to() -> None:
    assert known(trial(1, *falling(0.0)), 0.3).chance == 1.0


def test_the_remaining_time_ends_where_the_prediction_meets_the_target() -> None:
    job = trial(1, *falling(0.0), total_steps=38)
    assert known(job, 1 / 9.0).remaining_s == pytest.approx(2.0 * (16 - 8), abs=2.0)


def test_a_trial_without_a_length_is_taken_to_the_horizon() -> None:
    job = trial(1, *falling(0.0))
    assert known(job, 0.0, horizon=20).final_loss == pytest.approx(1 / 11, abs=0.01)


def test_p_star_gives_the_most_slots_that_are_desired_and_deserved() -> None:
    """At 0.9: one desired, 3.6 deserved; at 0.6: 3 and 2.4; at 0.1: 4 and 0.4."""
    division = divided([0.6, 0.9, 0.6, 0.1], gpus=4)
    assert division.threshold == 0.6
    assert division.slots == pytest.approx(2.4)
    assert division.promising == ("s/1", "s/0")


def test_of_divisions_with_as_many_slots_the_higher_p_star_counts() -> None:
    assert divided([0.9, 0.25], gpus=4).threshold == 0.9


def test_a_gang_desires_all_its_gpus() -> None:
    assert divided([0.9, 0.8], gpus=4, needs=2).promising == ("s/0",)


def test_a_promising_trial_is_resumed_before_a_new_one_opens() -> None:
    best = trial(1, *falling(0.0))
    assert granted(plan(best, trial(2, *falling(0.5)), trial(3))) == ["s/1"]


def test_what_promising_trials_leave_serves_new_ones() -> None:
    jobs = (trial(1, *falling(0.0)), trial(2, *falling(0.5)), trial(3), trial(4))
    assert granted(plan(*jobs, gpus=2)) == ["s/1", "s/3"]


def test_opportunistic_trials_take_turns_of_a_slice() -> None:
    promising = trial(9, *falling(0.0), gpu=0, steps_at_start=5)
    runs = trial(1, 0.9, 0.9, gpu=1)
    assert granted(plan(promising, runs, trial(2), gpus=2)) == ["s/1", "s/9"]
    over = trial(1, 0.9, 0.9, 0.9, gpu=1)
    assert granted(plan(promising, over, trial(2), gpus=2)) == ["s/2", "s/9"]


def test_a_poor_trial_pauses_and_resumes_when_nothing_else_is_left() -> None:
    best, poor = trial(1, *falling(0.0), gpu=0), trial(2, *falling(0.5), gpu=1)
    assert granted(plan(best, poor, trial(3), gpus=2)) == ["s/1", "s/3"]
    found = plan(best, poor, gpus=2)
    assert granted(found) == ["s/1", "s/2"]
    assert found.reasons[JobId("s/2")].text.startswith("poor, but nothing else is left")


def test_killing_ends_poor_trials() -> None:
    jobs = (trial(1, *falling(0.0), gpu=0), trial(2, *falling(0.5)), trial(3))
    assert plan(*jobs, kill=True).ends == ("s/2",)
    assert plan(*jobs).ends == ()


def test_a_given_target_is_used() -> None:
    jobs = (trial(1, *falling(0.0)), trial(2, *falling(0.5)))
    assert plan(*jobs, target_loss=0.8, kill=True).ends == ()
    assert plan(*jobs, target_loss=-9.0, kill=True).ends == ("s/1", "s/2")


def test_nobody_is_judged_before_the_grace_steps() -> None:
    jobs = (trial(1, *falling(0.0)), trial(2, 9.0, 8.9, 8.8, gpu=0), trial(3))
    assert plan(*jobs, grace_steps=4, kill=True).ends == ()
    assert plan(*jobs, grace_steps=3, kill=True).ends == ("s/2",)


def test_losses_that_are_not_finite_leave_no_chance() -> None:
    broken = trial(2, *[float("nan")] * 4)
    assert granted(plan(trial(1, *falling(0.0)), broken)) == ["s/1"]
    assert plan(trial(1, *falling(0.0)), broken, kill=True).ends == ("s/2",)


def test_jobs_without_curves_are_served_in_order_of_submission() -> None:
    jobs = [trial(n, submitted_s=float(s)) for n, s in ((1, 5), (2, 3), (3, 4))]
    assert granted(plan(*jobs, gpus=2)) == ["s/2", "s/3"]


@pytest.mark.parametrize(
    "wrong", [{"poor": 1.0}, {"poor": -0.1}, {"slice_steps": 0}, {"target_loss": float("inf")}]
)
def test_wrong_parameters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"poor|slice_steps|target_loss"):
        Pop(**wrong)

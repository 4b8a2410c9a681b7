"""Median stopping as a policy, in tiny worlds."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from hermes_ops.core.early_stop import median_rule
from hermes_ops.core.model import Job, JobId, Phase, Plan
from hermes_ops.policies.median import Median
from tests.builders import decided, granted, trial

OTHERS = tuple(trial(n, 1.0, 0.8, 0.6, 0.4, phase=Phase.ENDED) for n in (11, 12, 13, 14))
BAD, GOOD = (0.9, 0.9, 0.9), (0.9, 0.9, 0.7)  # the others' running average at step 3 is 0.8


def plan(*jobs: Job, gpus: int = 1, **parameters: Any) -> Plan:
    return decided(Median(**parameters), *jobs, gpus=gpus)


def test_a_trial_that_is_worse_than_the_median_pauses_for_a_new_one() -> None:
    found = plan(trial(1, *BAD, gpu=0), trial(2), *OTHERS)
    assert granted(found) == ["s/2"]
    text = found.reasons[JobId("s/1")].text
    assert text == "paused: best loss 0.9 at step 3, median 0.8 of 4 others"


def test_a_trial_that_is_not_worse_keeps_its_gpu() -> None:
    assert granted(plan(trial(1, *GOOD, gpu=0), trial(2), *OTHERS)) == ["s/1"]


@pytest.mark.parametrize("loss", [0.5, 0.7])  # three times 0.7 add up to less than 2.1
def test_a_trial_at_the_median_keeps_its_gpu(loss: float) -> None:
    others = [trial(n, loss, loss, loss, phase=Phase.ENDED) for n in (11, 12, 13, 14)]
    assert granted(plan(trial(1, loss, loss, loss, gpu=0), trial(2), *others)) == ["s/1"]


def test_a_trial_does_not_count_among_the_others() -> None:
    """With itself the median would be 0.6."""
    losses = ((11, 0.2), (12, 0.2), (13, 0.9), (14, 0.9))
    others = [trial(n, loss, loss, loss, phase=Phase.ENDED) for n, loss in losses]
    assert granted(plan(trial(1, 0.6, 0.6, 0.6, gpu=0), trial(2), *others)) == ["s/2"]


def test_nobody_is_judged_before_the_grace_steps() -> None:
    assert granted(plan(trial(1, 0.95, 0.95, gpu=0), trial(2), *OTHERS)) == ["s/1"]
    assert granted(plan(trial(1, 0.95, 0.95, gpu=0), trial(2), *OTHERS, grace_steps=2)) == ["s/2"]


def test_nobody_is_judged_against_too_few_others() -> None:
    assert granted(plan(trial(1, *BAD, gpu=0), trial(2), *OTHERS[1:])) == ["s/1"]
    few = plan(trial(1, *BAD, gpu=0), trial(2), *OTHERS[1:], min_others=3)
    assert granted(few) == ["s/2"]


def test_a_waiting_trial_that_is_not_worse_resumes_before_a_new_one_opens() -> None:
    assert granted(plan(trial(1), trial(2, *GOOD), trial(3, *BAD), *OTHERS)) == ["s/2"]


def test_the_lowest_loss_of_the_paused_resumes_when_nothing_else_is_left() -> None:
    found = plan(trial(1, *BAD), trial(2, 0.85, 0.85, 0.85), *OTHERS)
    assert granted(found) == ["s/2"]
    assert found.ranking == ("s/1",)


def test_a_resumed_trial_is_not_judged_before_it_has_reported() -> None:
    resumed = trial(1, *BAD, gpu=0, steps_at_start=3)
    assert granted(plan(resumed, trial(2), *OTHERS)) == ["s/1"]


@pytest.mark.parametrize("loss", [nan, inf])
def test_losses_that_are_not_finite_are_the_worst(loss: float) -> None:
    assert granted(plan(trial(1, loss, loss, loss, gpu=0), trial(2), *OTHERS)) == ["s/2"]
    broken = [trial(n, loss, loss, loss, phase=Phase.ENDED) for n in (11, 12, 13, 14)]
    assert granted(plan(trial(1, *BAD, gpu=0), trial(2), *broken)) == ["s/1"]


def test_killing_ends_whom_the_early_stopping_rule_would_end() -> None:
    jobs = [
        trial(n, *losses, gpu=n if n % 2 else None, steps_at_start=1)
        for n, losses in enumerate((BAD, GOOD, (*BAD, 0.5), (0.5, 0.9), (0.81, 0.82, 0.83)))
    ]
    found = plan(*jobs, *OTHERS, gpus=5, kill=True)
    assert set(found.ends) == set(median_rule([*jobs, *OTHERS])) == {"s/0", "s/4"}


def test_jobs_without_curves_are_served_in_order_of_submission() -> None:
    jobs = [trial(n, submitted_s=float(s)) for n, s in ((1, 5), (2, 3), (3, 4))]
    assert granted(plan(*jobs, gpus=2)) == ["s/2", "s/3"]


@pytest.mark.parametrize("wrong", [{"grace_steps": 0}, {"min_others": 0}])
def test_wrong_parameters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Median(**wrong)

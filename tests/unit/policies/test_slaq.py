"""SLAQ in tiny worlds: steps take 2 s."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from hermes_ops.core.model import Job, Plan
from hermes_ops.policies.slaq import Slaq, predicted_drops
from tests.builders import decided, granted, trial


def plan(*jobs: Job, gpus: int = 1, now_s: float = 100.0, **parameters: Any) -> Plan:
    return decided(Slaq(**parameters), *jobs, gpus=gpus, now_s=now_s)


def falling(rate: float, points: int = 8, scale: float = 1.0) -> list[float]:
    return [scale / (rate * n + 1) for n in range(1, points + 1)]


def test_the_gpu_goes_to_the_greatest_predicted_drop() -> None:
    """A steep curve is soon flat: per slice the slow one still wins more of its own drop."""
    steep, slow = trial(1, *falling(5.0), gpu=0), trial(2, *falling(0.1))
    assert granted(plan(steep, slow)) == ["s/2"]
    assert granted(plan(trial(1, *falling(5.0)), trial(2, *falling(0.1), gpu=0))) == ["s/2"]


def test_a_drop_is_a_share_of_the_jobs_own_largest_drop() -> None:
    small, large = trial(1, *falling(0.5)), trial(2, *falling(0.5, scale=100.0))
    drops = predicted_drops([small, large], slice_s=2.0)
    assert drops[small.id] == pytest.approx(drops[large.id], rel=1e-3)


def test_the_prediction_for_a_clean_curve_is_its_next_point() -> None:
    losses = falling(0.3, points=9)
    job = trial(1, *losses[:8])
    share = (losses[7] - losses[8]) / (losses[0] - losses[7])
    assert predicted_drops([job], slice_s=2.0)[job.id] == pytest.approx(share, rel=1e-2)


def test_a_longer_slice_looks_further() -> None:
    soon, late = (trial(n, *falling(0.3)) for n in (1, 2))
    assert predicted_drops([soon], 2.0)[soon.id] < predicted_drops([late], 20.0)[late.id]


def test_nobody_is_predicted_to_run_past_its_last_step() -> None:
    job = trial(1, *falling(0.3), total_steps=8)
    assert predicted_drops([job], 2.0)[job.id] == 0.0


def test_a_job_with_fewer_than_two_points_is_seen_first() -> None:
    assert granted(plan(trial(1, *falling(0.1), gpu=0), trial(2, 0.9))) == ["s/2"]
    assert granted(plan(trial(1, *falling(0.1), gpu=0), trial(3))) == ["s/3"]


def test_a_job_with_two_points_goes_on_as_fast_as_between_them() -> None:
    job = trial(1, 1.0, 0.6)
    assert predicted_drops([job], 2.0)[job.id] == pytest.approx(1.0)
    assert predicted_drops([job], 4.0)[job.id] == pytest.approx(2.0)


@pytest.mark.parametrize("loss", [nan, inf])
def test_a_newest_loss_that_is_not_finite_drops_no_more(loss: float) -> None:
    job = trial(1, *falling(0.3), loss)
    assert predicted_drops([job], 2.0)[job.id] == 0.0


def test_a_running_job_is_replaced_only_after_its_slice() -> None:
    runs = trial(1, *falling(5.0), gpu=0, started_s=96.0, steps_at_start=6)
    waits = trial(2, *falling(0.1))
    assert granted(plan(runs, waits, slice_s=5.0)) == ["s/1"]
    assert granted(plan(runs, waits, slice_s=4.0)) == ["s/2"]
    resumed = trial(1, *falling(5.0), gpu=0, started_s=0.0, steps_at_start=8)
    assert granted(plan(resumed, waits, slice_s=4.0)) == ["s/1"]
    ahead = trial(1, *falling(5.0), gpu=0, started_s=3_700.0, steps_at_start=6)  # clock set back
    assert granted(plan(ahead, waits, slice_s=5.0)) == ["s/2"]


def test_the_weight_multiplies_the_drop() -> None:
    light, heavy = trial(1, *falling(0.3)), trial(2, *falling(0.3), weight=2.0)
    assert granted(plan(light, heavy)) == ["s/2"]


def test_of_equals_the_running_job_stays_then_the_earlier_starts() -> None:
    assert granted(plan(trial(1, *falling(0.3)), trial(2, *falling(0.3), gpu=0))) == ["s/2"]
    assert granted(plan(trial(10, *falling(0.3)), trial(2, *falling(0.3)))) == ["s/2"]


def test_jobs_without_curves_are_served_in_order_of_submission() -> None:
    jobs = [trial(n, submitted_s=float(s)) for n, s in ((1, 5), (2, 3), (3, 4))]
    assert granted(plan(*jobs, gpus=2)) == ["s/2", "s/3"]
    runs = trial(1, gpu=0, submitted_s=9.0)
    assert granted(plan(runs, trial(2))) == ["s/1"]


@pytest.mark.parametrize("slice_s", [0.0, -1.0, inf, nan])
def test_a_slice_that_is_no_time_is_refused(slice_s: float) -> None:
    with pytest.raises(ValueError, match="slice_s"):
        Slaq(slice_s=slice_s)

"""FlowCon in tiny worlds: steps take 2 s."""

from __future__ import annotations

from functools import partial
from math import nan
from typing import Any

import pytest

from hermes_ops.core.model import Job, JobId, Plan
from hermes_ops.policies.flowcon import FlowCon, GrowthList, growth
from tests import builders
from tests.builders import decided

trial = partial(builders.trial, share_held=0.25)


def plan(*jobs: Job, gpus: int = 1, now_s: float = 100.0, **parameters: Any) -> Plan:
    return decided(FlowCon(**parameters), *jobs, gpus=gpus, now_s=now_s)


def shares(found: Plan) -> dict[str, float]:
    return {grant.job: grant.share for grant in found.grants}


def on_gpu(found: Plan) -> dict[str, tuple[int, ...]]:
    return {grant.job: grant.gpus for grant in found.grants}


def test_all_jobs_run_at_once_and_fill_the_gpu() -> None:
    found = shares(plan(*(trial(n) for n in range(4))))
    assert found == {f"s/{n}": 0.25 for n in range(4)}


def test_shares_follow_growth_efficiency() -> None:
    """The one's loss changed by 0.3 in its newest 2 s, the other's by 0.1."""
    fast, slow = trial(1, 1.0, 0.7, gpu=0), trial(2, 1.0, 0.9, gpu=0)
    found = plan(fast, slow)
    assert shares(found)["s/2"] == pytest.approx(0.25, abs=1e-3)
    assert shares(found)["s/1"] == pytest.approx(0.75, abs=1e-3)


def test_a_job_without_growth_yet_counts_as_the_fastest() -> None:
    found = shares(plan(trial(1, 1.0, 0.7, gpu=0), trial(2, 1.0, 0.9, gpu=0), trial(3)))
    assert found["s/3"] == found["s/1"] == pytest.approx(3 / 7, abs=1e-3)


def test_a_job_falls_one_list_at_a_time_and_recovers() -> None:
    def rank(*losses: float) -> GrowthList:
        return growth(trial(1, *losses), largest_drop=1.0, alpha=0.1).rank

    assert rank(1.0, 0.5, 0.4) is GrowthList.NEW
    assert rank(1.0, 0.5, 0.49) is GrowthList.WATCHING
    assert rank(1.0, 0.5, 0.49, 0.48) is GrowthList.COMPLETING
    assert rank(1.0, 0.5, 0.49, 0.48, 0.38) is GrowthList.NEW


def test_a_completing_job_gets_the_floor() -> None:
    done = trial(1, 1.0, 0.5, 0.5, 0.5, gpu=0)
    found = plan(done, trial(2, 1.0, 0.5, gpu=0), floor=0.01)
    assert shares(found)["s/1"] == pytest.approx(0.01, abs=1e-3)
    assert "completing" in found.reasons[JobId("s/1")].text


def test_jobs_that_are_all_completing_share_alike() -> None:
    done = [trial(n, 1.0, 0.5, 0.5, 0.5, gpu=0) for n in (1, 2)]
    assert shares(plan(*done)) == {"s/1": 0.5, "s/2": 0.5}


def test_new_jobs_join_the_gpu_with_the_fewest() -> None:
    found = plan(trial(1, gpu=0), trial(2, gpu=0), trial(3), trial(4), gpus=2)
    assert on_gpu(found) == {"s/1": (0,), "s/2": (0,), "s/3": (1,), "s/4": (1,)}


def test_a_job_waits_when_each_gpu_is_full_of_jobs() -> None:
    found = plan(trial(1, gpu=0), trial(2, gpu=0), trial(3), jobs_a_gpu=2)
    assert set(shares(found)) == {"s/1", "s/2"}
    assert found.ranking == ("s/3",)


def test_a_gang_gets_one_share_on_all_its_gpus() -> None:
    gang = trial(1, min_gpus=2, max_gpus=2)
    found = plan(gang, trial(2), gpus=2)
    assert on_gpu(found)["s/1"] == (0, 1)
    assert shares(found)["s/1"] == 0.5


@pytest.mark.parametrize("loss", [nan, float("inf")])
def test_losses_that_are_not_finite_are_no_growth(loss: float) -> None:
    assert growth(trial(1, 1.0, loss), 1.0, 0.05).efficiency == 0.0


def test_the_weight_multiplies_the_growth() -> None:
    light, heavy = trial(1, 1.0, 0.7, gpu=0), trial(2, 1.0, 0.7, gpu=0, weight=3.0)
    assert shares(plan(light, heavy)) == {"s/1": 0.25, "s/2": 0.75}


@pytest.mark.parametrize("wrong", [{"alpha": 2.0}, {"floor": 0.0}, {"jobs_a_gpu": 0}])
def test_wrong_parameters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"alpha|floor|jobs_a_gpu"):
        FlowCon(**wrong)


def test_a_gpu_is_never_given_more_than_once_however_small_the_floor() -> None:
    fast, slow = trial(0, 5.0, 1.0, gpu=0), [trial(n, 1.0, 1.0, 1.0, gpu=0) for n in (1, 2, 3)]
    found = shares(plan(fast, *slow, floor=1e-6))
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    assert min(found.values()) > 0

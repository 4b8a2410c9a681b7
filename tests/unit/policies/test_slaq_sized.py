"""SLAQ with sizes, in tiny worlds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hermes_ops.core.model import Gpu, Job, JobId, Phase, Point, Snapshot, SweepId
from hermes_ops.core.sizes import StepTime
from hermes_ops.errors import ConfigError
from hermes_ops.policies import make_policy
from hermes_ops.policies.slaq_sized import Drops, SlaqSized


def trial(number: int, losses: tuple[float, ...], *, times: tuple[StepTime, ...] = ()) -> Job:
    curve = tuple(Point(n, loss, 10.0 * n) for n, loss in enumerate(losses, start=1))
    return Job(
        JobId(f"a/{number}"), SweepId("a"), float(number), Phase.WAITING, max_gpus=4,
        curve=curve, step_times=times, waiting_since_s=0.0,
    )  # fmt: skip


STEEP, FLAT = (8.0, 4.0), (8.0, 4.0, 3.9, 3.89, 3.889, 3.8889, 3.88889)


def sizes(gpus: int, *jobs: Job, now_s: float = 100.0) -> dict[str, int]:
    snapshot = Snapshot(now_s, tuple(Gpu(n) for n in range(gpus)), jobs)
    plan, _ = SlaqSized(10.0).decide(snapshot, None)
    return {grant.job: len(grant.gpus) for grant in plan.grants}


def test_the_trial_that_still_falls_gets_the_gpus_that_the_other_gains_less_by() -> None:
    assert sizes(5, trial(0, FLAT), trial(1, STEEP)) == {"a/0": 1, "a/1": 4}


def test_a_trial_with_one_report_keeps_its_least_size() -> None:
    assert sizes(4, trial(0, (8.0,))) == {"a/0": 1}


def test_of_more_trials_than_gpus_those_not_seen_come_first() -> None:
    assert sizes(1, trial(0, STEEP), trial(1, ())) == {"a/1": 1}


def test_a_trial_that_slows_down_on_more_gpus_does_not_grow() -> None:
    slower = tuple(StepTime(g, s) for g, s in ((1, 1.0), (2, 3.0), (4, 4.0)))
    assert sizes(4, trial(0, STEEP, times=slower)) == {"a/0": 1}


def test_a_running_trial_keeps_its_size_within_its_slice() -> None:
    held = replace(
        trial(0, STEEP), phase=Phase.RUNNING, gpus_held=(0, 1), started_s=95.0,
        waiting_since_s=None,
    )  # fmt: skip
    assert sizes(4, held) == {"a/0": 2}
    assert sizes(4, held, now_s=105.0) == {"a/0": 4}
    ahead = replace(held, started_s=3_700.0)  # the clock was set back
    assert sizes(4, ahead) == {"a/0": 4}


@pytest.mark.parametrize(("startup_s", "size"), [(0.0, 4), (10.0, 3)])
def test_a_trial_is_not_restarted_for_less_than_the_restart_takes(
    startup_s: float, size: int
) -> None:
    slowly = tuple(StepTime(gpus, 1.0 + 1.0 / gpus) for gpus in (1, 2, 3, 4))  # 7 % less on 4
    held = replace(
        trial(0, STEEP, times=slowly), phase=Phase.RUNNING, gpus_held=(0, 1, 2), started_s=80.0,
        waiting_since_s=None, startup_s=startup_s,
    )  # fmt: skip
    assert sizes(4, held) == {"a/0": size}


def test_a_trial_whose_steps_took_no_time_that_a_clock_shows_has_a_size() -> None:
    curve = (Point(1, 8.0, 0.0), Point(2, 4.0, 0.0))
    snapshot = Snapshot(100.0, (Gpu(0),), (replace(trial(0, ()), curve=curve, max_gpus=1),))
    plan, _ = SlaqSized().decide(snapshot, None)
    assert [len(grant.gpus) for grant in plan.grants] == [1]


def test_a_dip_does_not_hide_a_faster_size_of_twice_the_gpus() -> None:
    drops = Drops((4, 5, 8), (1.0, 0.9, 1.8))
    gain, larger = drops.next(0, 4)
    assert gain == pytest.approx(0.8 / 4)
    assert larger == 2
    assert drops.next(0, 3) == (0.0, 0)


def test_a_slice_of_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="slice_s"):
        make_policy("slaq-sized", {"slice_s": 0})

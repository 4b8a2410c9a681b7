"""Which trials the rules end."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest

from hermes_ops.core.early_stop import (
    EarlyStop,
    Rule,
    asha_rule,
    early_ends,
    median_rule,
    none_rule,
)
from hermes_ops.core.model import Gpu, Grant, Job, JobId, Phase, Snapshot, SweepId
from hermes_ops.core.plan import Stop, check, diff
from hermes_ops.policies.fifo import Fifo
from tests.builders import job


def trial(
    number: int, loss: float, steps: int = 4, phase: Phase = Phase.WAITING, sweep: str = "s"
) -> Job:
    return job(f"{sweep}/{number}", phase, *[loss] * steps)


def ended(number: int, loss: float, steps: int = 4) -> Job:
    return trial(number, loss, steps, Phase.ENDED)


GOOD = [ended(n, 1.0) for n in range(4)]


def test_none_ends_nobody() -> None:
    assert none_rule([*GOOD, trial(9, 5.0)]) == {}


@pytest.mark.parametrize(
    ("what", "jobs", "gone"),
    [
        ("worse than the median", [*GOOD, trial(9, 5.0)], {"s/9"}),
        ("a tie goes on", [*GOOD, trial(9, 1.0)], set()),
        ("too early to tell", [*GOOD, trial(9, 5.0, steps=2)], set()),
        ("too few others", [*GOOD[:3], trial(9, 5.0)], set()),
        ("others that are not so far do not count", [*GOOD, trial(9, 5.0, steps=5)], set()),
        ("a NaN is the worst", [*GOOD, trial(9, nan)], {"s/9"}),
        ("all are NaN", [*(ended(n, nan) for n in range(4)), trial(9, nan)], set()),
        ("a pending trial", [*GOOD, trial(9, 5.0, 0, Phase.PENDING)], set()),
        ("a stopping trial", [*GOOD, trial(9, 5.0, 4, Phase.STOPPING)], set()),
        ("an ended trial", [*GOOD, ended(9, 5.0)], set()),
    ],
)
def test_median(what: str, jobs: list[Job], gone: set[str]) -> None:
    assert set(median_rule(jobs)) == gone, what


@pytest.mark.parametrize(
    ("what", "losses", "steps", "gone"),
    [
        ("fewer than three judge nobody", [1.0, 2.0], 1, set()),
        ("the best third goes on", [1.0, 2.0, 3.0], 1, {"s/1", "s/2"}),
        ("ties go on", [1.0, 1.0, 3.0], 3, {"s/2"}),
        ("two of six go on", [6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 9, {"s/0", "s/1", "s/2", "s/3"}),
        ("a NaN is the worst", [1.0, nan, 2.0], 3, {"s/1", "s/2"}),
    ],
)
def test_asha(what: str, losses: list[float], steps: int, gone: set[str]) -> None:
    assert set(asha_rule([trial(n, x, steps) for n, x in enumerate(losses)])) == gone, what


@pytest.mark.parametrize("rule", [median_rule, asha_rule])
def test_a_trial_that_has_trained_to_its_last_step_is_not_ended_early(rule: Rule) -> None:
    worst = trial(9, 5.0, 4, Phase.RUNNING)
    assert set(rule([*GOOD, replace(worst, total_steps=5)])) == {"s/9"}
    assert rule([*GOOD, replace(worst, total_steps=4)]) == {}


def test_asha_compares_at_the_newest_rung_of_each_trial() -> None:
    ahead = [trial(n, 1.0, steps=9) for n in range(3)]
    assert set(asha_rule([*ahead, trial(3, 2.0, steps=4)])) == {"s/3"}
    assert set(asha_rule([trial(0, 1.0, steps=3), trial(1, 2.0, 9), trial(2, 3.0, 9)])) == set()


def test_each_sweep_is_judged_by_its_own_rule_among_its_own_trials() -> None:
    jobs = (*GOOD, trial(9, 5.0), trial(9, 5.0, sweep="t"))
    snapshot = Snapshot(0.0, (), jobs)
    rules = {SweepId("s"): "median", SweepId("t"): "median"}
    ends = early_ends(snapshot, rules)
    assert set(ends) == {"s/9"}
    assert ends[JobId("s/9")].terms[1].name == "median_loss"
    assert early_ends(snapshot, {}) == {}


def test_the_gpu_of_an_ended_trial_has_a_new_user_at_once() -> None:
    bad = Job(JobId("s/9"), SweepId("s"), 0.0, Phase.RUNNING, (0,), curve=trial(9, 5.0).curve)
    pending = trial(10, 0.0, 0, Phase.PENDING)
    snapshot = Snapshot(0.0, (Gpu(0),), (*GOOD, bad, pending))
    plan, _ = EarlyStop(Fifo(), ((SweepId("s"), "median"),)).decide(snapshot, None)
    check(snapshot, plan)
    assert plan.grants == (Grant(JobId("s/10"), (0,)),)
    stop = diff(snapshot, plan)[0]
    assert isinstance(stop, Stop)
    assert stop.final
    assert stop.job == "s/9"

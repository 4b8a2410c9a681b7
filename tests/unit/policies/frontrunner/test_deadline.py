"""Trials are valued by what they reach before the deadline of their sweep; steps take a second."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, Job, JobId, Phase, Plan, Snapshot
from hermes_ops.core.plan import check
from hermes_ops.policies.frontrunner import Frontrunner
from hermes_ops.testing.policy_contract import comparable
from hermes_ops.testing.worlds import NOW_S, snapshots
from tests.builders import granted, trial

TOTAL = 50


def falling(level: float, steps: int) -> list[float]:
    return [level + (1.0 - level) * exp(-n / 12) for n in range(1, steps + 1)]


def decide(*jobs: Job, left_s: float | None = None, gpus: int = 1, now_s: float = 100.0) -> Plan:
    """Decide with that time until the deadline of every job."""
    deadline_s = None if left_s is None else now_s + left_s
    limited = tuple(replace(job, deadline_s=deadline_s) for job in jobs)
    snapshot = Snapshot(now_s, tuple(Gpu(n) for n in range(gpus)), limited)
    plan, _ = Frontrunner().decide(snapshot, Frontrunner().initial())
    check(snapshot, plan)
    return plan


def steady(name: int, level: float, steps: int, **facts: Any) -> Job:
    return trial(name, *falling(level, steps), total_steps=TOTAL, **facts)


FIELD = tuple(steady(n, 0.5 + n / 50, 8) for n in range(4))
FAST = trial(8, *falling(0.5, 8), total_steps=TOTAL)
SLOW = replace(
    trial(9, *falling(0.1, 8), total_steps=TOTAL),
    curve=tuple(replace(p, seconds=p.step * 10.0) for p in FAST.curve),
)


def test_near_the_deadline_no_trial_starts_that_can_report_nothing_before_it() -> None:
    new = trial(7, total_steps=TOTAL)  # the others have reported every 2 s
    running = steady(0, 0.5, 8, gpu=0)
    assert "s/7" in granted(decide(running, new, left_s=3.0, gpus=2))
    late = decide(running, new, left_s=1.0, gpus=2)
    assert granted(late) == ["s/0"]
    assert "before the deadline" in late.reasons[JobId("s/7")].text
    assert late.review_at_s == 101.0


def test_a_waiting_trial_is_not_resumed_for_nothing() -> None:
    waiting = [replace(job, checkpoint_s=1.0, restore_s=1.0, startup_s=8.0) for job in FIELD]
    assert granted(decide(*waiting, left_s=13.0))
    assert granted(decide(*waiting, left_s=9.0)) == []


def test_a_trial_too_slow_to_get_anywhere_loses_to_one_that_does() -> None:
    """Without the deadline the slow one, which leads, gets the GPU."""
    slow = replace(SLOW, curve=tuple(replace(p, loss=p.loss / 4) for p in SLOW.curve))
    assert granted(decide(*FIELD, FAST, slow)) == ["s/9"]
    assert granted(decide(*FIELD, FAST, slow, left_s=9.0)) != ["s/9"]


@pytest.mark.parametrize("left_s", [-1.0, 0.0, 1e6])
def test_a_deadline_that_has_passed_or_is_far_changes_nothing(left_s: float) -> None:
    jobs = (*FIELD, FAST, SLOW, trial(7, total_steps=TOTAL))
    free, limited = decide(*jobs), decide(*jobs, left_s=left_s)
    assert (limited.grants, limited.ranking) == (free.grants, free.ranking)
    assert limited.review_at_s is None


@given(snapshot=snapshots("frontrunner"), far=st.booleans())
@settings(max_examples=30, deadline=None)
def test_the_plan_is_that_without_a_deadline_where_all_trials_end_in_time(
    snapshot: Snapshot, far: bool
) -> None:
    """Or where it has passed."""
    at_s = NOW_S + 1e12 if far else NOW_S
    free = tuple(replace(job, deadline_s=None) for job in snapshot.jobs)
    limited = tuple(replace(job, deadline_s=at_s) for job in snapshot.jobs)
    policy = Frontrunner()
    plans = [
        comparable(policy.decide(replace(snapshot, jobs=jobs), policy.initial()))
        for jobs in (free, limited)
    ]
    assert plans[0] == plans[1]


@given(snapshot=snapshots("frontrunner"), left_s=st.floats(0.1, 500.0))
@settings(max_examples=30, deadline=None)
def test_before_a_deadline_trials_that_hold_gpus_or_have_no_measured_pace_are_not_held_back(
    snapshot: Snapshot, left_s: float
) -> None:
    at_s = snapshot.time_s + left_s
    limited = replace(snapshot, jobs=tuple(replace(job, deadline_s=at_s) for job in snapshot.jobs))
    plan, _ = Frontrunner().decide(limited, Frontrunner().initial())
    check(limited, plan)
    late = {j.id for j in limited.queue if "deadline" in plan.reasons[j.id].text}
    timed = {j.sweep for j in limited.jobs if j.curve}
    assert all(limited.index[job].sweep in timed for job in late)
    assert not late or plan.review_at_s == at_s
    assert all(limited.index[job].phase in (Phase.PENDING, Phase.WAITING) for job in late)

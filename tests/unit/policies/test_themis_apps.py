"""Finish-time fairness of sweeps and users: forecasts, offers, leases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Job, JobId, Phase, Plan, Point, Snapshot, SweepId
from hermes_ops.core.plan import check
from hermes_ops.policies.themis import Themis, ThemisMemory
from hermes_ops.policies.themis.apps import apps_of, predicted_seconds
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.workload import Work, Workload
from hermes_ops.testing.worlds import snapshots
from tests.builders import curve, granted, trial, world

RATE = (("rate", 0.1),)
LAST_S, NEXT_S = 119.0, 121.0  # before and after the end of the first lease


def of_sweep(name: str, *losses: float, **facts: Any) -> Job:
    """Return a trial with a configuration, submitted at 0, of 10 steps of 2 s."""
    defaults: dict[str, Any] = {"configuration": RATE, "total_steps": 10}
    return trial(name, *losses, **(defaults | facts))


def many(sweep: str, number: int, **facts: Any) -> list[Job]:
    return [of_sweep(f"{sweep}/{n}", **facts) for n in range(number)]


def plan_of(policy: Themis, *jobs: Job, gpus: int = 1, now_s: float = 100.0) -> Plan:
    snapshot = world(*jobs, gpus=gpus, now_s=now_s)
    plan, _ = policy.decide(snapshot, policy.initial())
    check(snapshot, plan)
    return plan


def rho_of(plan: Plan, job: str) -> float:
    return next(term.value for term in plan.reasons[JobId(job)].terms if term.name == "rho")


# -- forecasts -------------------------------------------------------------------------------------


def test_a_trial_without_a_report_is_expected_to_train_at_the_median_pace_of_its_sweep() -> None:
    fast, slow = of_sweep("a/0", 1.0), replace(of_sweep("a/1"), curve=curve(1.0, step_s=30.0))
    usual, new = of_sweep("a/2", 1.0, 0.9), of_sweep("a/3")
    left = predicted_seconds([fast, slow, usual, new], 0.0, 60.0)
    assert left == {"a/0": 18.0, "a/1": 270.0, "a/2": 16.0, "a/3": 20.0}


def test_trials_that_ended_early_shorten_what_is_expected_of_the_others() -> None:
    ended = [
        replace(of_sweep(f"a/{n}", *[1.0] * steps), phase=Phase.ENDED)
        for n, steps in enumerate((2, 4))
    ]
    left = predicted_seconds([*ended, of_sweep("a/8"), of_sweep("a/9", 1, 1, 1)], 0.0, 60.0)
    assert left[JobId("a/8")] == pytest.approx(2 * (2 + 4 + 10) / 3)
    assert left[JobId("a/9")] == pytest.approx(2 * (1 + 7) / 2)


@given(st.lists(st.integers(0, 12), max_size=9), st.integers(0, 10))
def test_no_trial_is_expected_to_train_more_steps_than_it_has_left(
    ended: list[int], step: int
) -> None:
    others = [
        replace(of_sweep(f"a/{n}", *[1.0] * last), phase=Phase.ENDED)
        for n, last in enumerate(ended)
    ]
    mine = replace(of_sweep("a/99"), curve=(Point(max(1, step), 1.0, 4.0),))
    (left,) = predicted_seconds([*others, mine], 0.0, 60.0).values()
    pace = 4.0 / max(1, step)
    assert 0 <= left <= (10 - max(1, step)) * pace + 1e-9


def test_without_steps_a_trial_is_expected_to_train_as_long_again() -> None:
    trained = of_sweep("a/0", total_steps=None, service_gpu_s=500.0)
    assert predicted_seconds([trained], 0.0, 60.0) == {"a/0": 500.0}
    assert predicted_seconds([of_sweep("a/0")], 0.0, 60.0) == {"a/0": 60.0}


def test_a_sweep_alone_in_a_pool_is_fair() -> None:
    trials = [of_sweep(f"a/{n}", 1.0, submitted_s=100.0) for n in range(6)]
    (app,) = apps_of(world(*trials, gpus=2), (), None, by_user=False, least_s=60.0)
    assert app.rho(2) == pytest.approx(1.0)
    assert app.rho(1) == pytest.approx(2.0)


def test_a_sweep_that_gets_its_share_from_the_beginning_stays_fair() -> None:
    """Two sweeps of 4 trials on 4 GPUs, two each: rho stays 1 as their trials train."""
    policy, memory = Themis(knob=0.0), ThemisMemory()
    running = [
        replace(of_sweep(f"{sweep}/{n}", 1.0), phase=Phase.RUNNING, gpus_held=(gpu,))
        for gpu, (sweep, n) in enumerate((s, n) for s in "ab" for n in range(2))
    ]
    waiting = [of_sweep(f"{sweep}/{n}", 1.0) for sweep in "ab" for n in (2, 3)]
    for step in range(1, 5):
        grown = [
            replace(job, curve=curve(*[1.0] * step, step_s=2.0), service_gpu_s=2.0 * step)
            for job in running
        ]
        plan, memory = policy.decide(world(*grown, *waiting, gpus=4, now_s=2.0 * step), memory)
        share = dict((share.app, share.alone_s) for share in memory.apps)
        assert share == {"sweep a": pytest.approx(2.0 * step), "sweep b": pytest.approx(2.0 * step)}
    assert granted(plan) == ["a/0", "a/1", "b/0", "b/1"]


# -- offers ----------------------------------------------------------------------------------------


def test_the_number_of_its_trials_does_not_give_a_sweep_more_gpus() -> None:
    """By jobs nine trials of one sweep get nine times as much as the one of the other."""
    jobs = [*many("a", 9), *many("b", 3)]
    assert granted(plan_of(Themis(knob=0.0), *jobs, gpus=4)) == ["a/0", "a/1", "b/0", "b/1"]
    assert granted(plan_of(Themis("fluid"), *jobs, gpus=4)) == ["a/0", "a/1", "a/2", "a/3"]


def test_all_gpus_are_offered_to_the_few_that_are_furthest_behind() -> None:
    late, new = many("a", 3), many("b", 3, submitted_s=90.0)
    assert granted(plan_of(Themis(knob=0.5), *late, *new, gpus=3)) == ["a/0", "a/1", "a/2"]
    assert granted(plan_of(Themis(knob=0.5), *late, *new, gpus=4)) == [
        *("a/0", "a/1", "a/2"),
        "b/0",
    ]
    assert granted(plan_of(Themis(knob=0.0), *late, *new, gpus=3)) == ["a/0", "a/1", "b/0"]


def test_each_gpu_goes_to_the_app_that_ends_latest_with_what_it_has() -> None:
    """The longer sweep has four times the work, and the same share: it falls behind first."""
    long = many("a", 8, curve=curve(1.0, step_s=8.0), phase=Phase.WAITING)
    short = many("b", 8, curve=curve(1.0, step_s=2.0), phase=Phase.WAITING)
    plan = plan_of(Themis(knob=0.0), *long, *short, gpus=5, now_s=60.0)
    of_long = sum(grant.job.startswith("a/") for grant in plan.grants)
    assert 1 <= of_long <= 4
    assert len(plan.grants) == 5


def test_a_heavier_sweep_has_a_larger_share() -> None:
    jobs = [*many("a", 9, weight=3.0), *many("b", 9)]
    plan = plan_of(Themis(knob=0.0), *jobs, gpus=4)
    assert granted(plan) == ["a/0", "a/1", "a/2", "b/0"]
    assert rho_of(plan, "a/0") > rho_of(plan, "b/0")


def test_by_user_all_sweeps_of_a_user_are_one_app() -> None:
    jobs = [*many("a", 4, user="ann"), *many("b", 4, user="ann"), *many("c", 4, user="bob")]
    assert granted(plan_of(Themis(knob=0.0, by="user"), *jobs, gpus=4)) == [
        *("a/0", "a/1"),
        *("c/0", "c/1"),
    ]
    by_sweep = granted(plan_of(Themis(knob=0.0), *jobs, gpus=3))
    assert by_sweep == ["a/0", "b/0", "c/0"]


def test_jobs_with_the_name_of_a_model_are_apps_of_their_own() -> None:
    jobs = [replace(job, model_name="resnet50") for job in many("a", 4)]
    plan = plan_of(Themis("offers", knob=0.0), *jobs, *many("b", 4), gpus=5)
    assert granted(plan) == ["a/0", "a/1", "a/2", "a/3", "b/0"]


# -- leases ----------------------------------------------------------------------------------------


def test_within_a_lease_only_free_gpus_are_offered() -> None:
    policy = Themis(knob=0.5, lease_s=120.0)
    held = [of_sweep(f"a/{n}", 1.0, gpu=n, submitted_s=100.0) for n in range(2)]
    waiting = many("b", 3, curve=curve(1.0, step_s=2.0), phase=Phase.WAITING)
    _, memory = policy.decide(world(*held, gpus=3, now_s=100.0), policy.initial())
    snapshot = world(*held, *waiting, gpus=3, now_s=LAST_S)
    plan, memory = policy.decide(snapshot, memory)
    assert granted(plan) == ["a/0", "a/1", "b/0"]
    assert plan.review_at_s == 120.0
    after, _ = policy.decide(world(*held, *waiting, gpus=3, now_s=NEXT_S), memory)
    assert granted(after) == ["b/0", "b/1", "b/2"]


def test_a_job_that_must_not_be_stopped_keeps_its_gpu_and_counts_as_given() -> None:
    held = of_sweep("a/0", 1.0, gpu=0, preemptible=False, submitted_s=99.0)
    plan = plan_of(Themis(knob=0.0), held, *many("a", 3), *many("b", 3), gpus=2)
    assert granted(plan) == ["a/0", "b/0"]


def test_the_reasons_say_how_late_a_sweep_would_end() -> None:
    plan = plan_of(Themis(knob=0.0), *many("a", 2), *many("b", 2), gpus=2)
    why = plan.reasons[JobId("a/0")]
    assert why.text.startswith("starts: sweep a would end after")
    assert why.text.endswith("times its time on its share of the GPUs")
    assert why.runner_up == "b/0"
    assert plan.reasons[JobId("b/1")].text.startswith("waits: sweep b would end after")


@given(snapshots("themis"))
def test_whatever_is_observed_the_forecast_is_a_number_above_nothing(snapshot: Snapshot) -> None:
    for by_user in (False, True):
        for app in apps_of(snapshot, (), None, by_user=by_user, least_s=60.0):
            assert 0 < app.independent_s < float("inf")
            assert 0 <= app.rho(1) < float("inf")


# -- in a simulation -------------------------------------------------------------------------------


def sweep(name: str, trials: int) -> tuple[Work, ...]:
    """Return the trials of a sweep, each of 20 steps of 30 s."""
    points = tuple(Point(n, 1.0 / n, 30.0 * n) for n in range(1, 21))
    return tuple(
        Work(
            JobId(f"{name}/{n}"),
            0.0,
            600.0,
            sweep=SweepId(name),
            total_steps=20,
            curve=points,
            configuration=RATE,
        )
        for n in range(trials)
    )


def ends_s(policy: Themis) -> dict[str, float]:
    workload = Workload("two", (*sweep("large", 16), *sweep("small", 4)))
    run = simulate(workload, layout("4"), policy)
    ends: dict[str, float] = {}
    for outcome in run.outcomes:
        assert outcome.ended_s is not None
        ends[outcome.work.sweep] = max(outcome.ended_s, ends.get(outcome.work.sweep, 0.0))
    return ends


def test_a_small_sweep_ends_no_later_than_on_its_half_of_the_pool() -> None:
    """Alone on two GPUs it takes 1,200 s; by jobs it waits for the large one."""
    by_apps, by_jobs = ends_s(Themis()), ends_s(Themis("fluid"))
    assert by_apps["small"] <= 1_200.0 + 120.0
    assert by_jobs["small"] > 2_000.0
    assert by_apps["large"] == pytest.approx(by_jobs["large"], rel=0.05)

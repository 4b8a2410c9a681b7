"""Priority classes within a quota: who goes first in a team, and whom a class never touches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.model import Grant, Job, JobId, Phase, Plan
from hermes_ops.core.plan import check
from hermes_ops.core.priority_class import BUILT_IN_CLASSES, PriorityClass, class_refusal
from hermes_ops.core.quota import Quota, TeamQuota, borrowing_jobs
from hermes_ops.core.within_quota import WithinQuota
from hermes_ops.policies import make_policy
from hermes_ops.testing.worlds import QUOTA, built, snapshots
from tests.builders import job, world

AB = Quota((TeamQuota("a", 2), TeamQuota("b", 2)))
CLASSES = ("interactive", "", "nightly")
NAMES = ("fifo", "fifo-backfill", "2d-las", "fair", "hermes", "elastic-fifo", "elastic-2d-las")


def of(team: str, number: int, of_class: str, *, gpu: int | None = None, **facts: Any) -> Job:
    phase = Phase.PENDING if gpu is None else Phase.RUNNING
    held = {} if gpu is None else {"gpus_held": (gpu,), "started_s": 0.0}
    name = f"{team}/{number}"
    return job(name, phase, virtual_cluster=team, priority_class=of_class, **held, **facts)


def plan_of(quota: Quota, *jobs: Job, gpus: int = 4, policy: str = "fifo") -> Plan:
    within, snapshot = WithinQuota(make_policy(policy, {}), quota), world(*jobs, gpus=gpus)
    plan, _ = within.decide(snapshot, within.initial())
    check(snapshot, plan)
    return plan


def granted(*jobs: Job, quota: Quota = AB, gpus: int = 4, policy: str = "fifo") -> list[str]:
    return sorted(grant.job for grant in plan_of(quota, *jobs, gpus=gpus, policy=policy).grants)


@pytest.mark.parametrize("policy", NAMES)
def test_a_higher_class_of_a_team_goes_first_though_it_came_last(policy: str) -> None:
    jobs = [of("a", n, "nightly") for n in range(4)]
    jobs += [of("a", n, "", submitted_s=5.0) for n in range(4, 7)]
    jobs += [of("a", n, "interactive", submitted_s=9.0) for n in range(7, 9)]
    first = {"a/7", "a/8"}
    assert first < set(granted(*jobs, gpus=4, policy=policy)) <= first | {"a/4", "a/5", "a/6"}


def test_a_higher_class_preempts_a_lower_one_of_its_team_and_says_so() -> None:
    held = [of("a", n, "nightly", gpu=n) for n in range(2)]
    other = [of("b", n, "nightly", gpu=n + 2) for n in range(2)]
    plan = plan_of(AB, *held, *other, of("a", 9, "interactive"))
    assert sorted(grant.job for grant in plan.grants) == ["a/0", "a/9", "b/0", "b/1"]
    why = plan.reasons[JobId("a/1")]
    assert why.text == "preempted because a/9 of team a is of a higher class"
    assert why.runner_up == "a/9"


def test_a_job_that_waits_for_a_higher_class_is_told_so() -> None:
    jobs = [of("a", n, "interactive") for n in range(4)]
    plan = plan_of(AB, *jobs, *(of("b", n, "") for n in range(2)), of("a", 9, ""))
    assert plan.reasons[JobId("a/9")].text == ("waits: trials of a higher class of team a go first")


def test_a_class_takes_no_guaranteed_gpu_of_another_team() -> None:
    held = [of("b", n, "nightly", gpu=n) for n in range(2)]
    assert granted(*held, *(of("a", n, "interactive") for n in range(9))) == [
        "a/0", "a/1", "b/0", "b/1",
    ]  # fmt: skip


def test_a_team_gets_its_own_gpus_back_from_a_higher_class_of_another_team() -> None:
    borrowed = [of("a", n, "interactive", gpu=n) for n in range(4)]
    wanted = [of("b", n, "nightly", submitted_s=9.0) for n in range(2)]
    assert granted(*borrowed, *wanted) == ["a/0", "a/1", "b/0", "b/1"]


@pytest.mark.parametrize(("of_a", "of_b", "holder"), [
    ("nightly", "interactive", "b/0"),
    ("nightly", "nightly", "a/0"),
    ("interactive", "nightly", "a/0"),
])  # fmt: skip
def test_of_teams_that_borrow_alike_the_higher_class_gets_the_gpu(
    of_a: str, of_b: str, holder: str
) -> None:
    """One GPU that nobody is guaranteed: who holds it leaves it for a higher class alone."""
    none = Quota((TeamQuota("a"), TeamQuota("b")))
    jobs = of("a", 0, of_a, gpu=0), of("b", 0, of_b, submitted_s=9.0)
    assert granted(*jobs, quota=none, gpus=1) == [holder]


def test_a_gang_of_a_higher_class_is_not_kept_waiting_by_small_jobs_of_a_lower_one() -> None:
    """Two GPUs are held within a quantum: nothing of a lower class starts on the idle ones."""
    held = [of("a", n, "nightly", gpu=n, preemptible=False) for n in (0, 1)]
    small = [of("a", n, "") for n in range(2, 9)]
    gang = of("a", 9, "interactive", min_gpus=4, submitted_s=9.0)
    alone = Quota((TeamQuota("a", 4),))
    assert granted(*held, *small, gang, quota=alone) == ["a/0", "a/1"]
    assert granted(*small, gang, quota=alone) == ["a/9"]


def test_what_a_user_may_not_hold_goes_to_a_lower_class_of_the_team_first() -> None:
    """The higher class has more jobs than its user may run; others do not borrow the rest."""
    limited = replace(AB, user_limits=(("ann", 1),))
    many = [of("a", n, "interactive", user="ann") for n in range(5)]
    others = [of("b", n, "", gpu=n, user="eve") for n in range(4)]
    got = granted(*many, of("a", 9, "nightly", user="bob"), *others, quota=limited)
    assert got == ["a/0", "a/9", "b/0", "b/1"]


def test_classes_of_one_priority_count_alike() -> None:
    classes = (*BUILT_IN_CLASSES, PriorityClass("batch", 0))
    quota = Quota((TeamQuota("a", 1),), classes=classes)
    jobs = of("a", 0, "batch"), of("a", 1, "", submitted_s=1.0)
    assert granted(*jobs, quota=quota, gpus=1) == ["a/0"]
    late = of("a", 0, "batch", submitted_s=2.0)
    assert granted(late, jobs[1], quota=quota, gpus=1) == ["a/1"]


RESTRICTED = replace(
    AB,
    classes=(
        PriorityClass("interactive", 100, users=frozenset({"ann"})),
        PriorityClass("normal"),
        PriorityClass("gold", 500, teams=frozenset({"b"})),
    ),
)


def test_who_may_not_use_a_class_waits_and_reads_what_is_allowed() -> None:
    jobs = of("a", 0, "interactive", user="bob"), of("a", 1, "gone", user="ann")
    plan = plan_of(RESTRICTED, *jobs)
    assert plan.grants == ()
    assert plan.reasons[JobId("a/0")].text == (
        "waits: user bob of team a may not use the class 'interactive'; allowed is one of normal"
    )
    assert "has no class 'gone'; allowed is one of interactive, normal" in (
        plan.reasons[JobId("a/1")].text
    )


def test_who_may_use_a_class_gets_gpus() -> None:
    jobs = of("a", 0, "interactive", user="ann"), of("b", 1, "gold", user="eve")
    assert granted(*jobs, quota=RESTRICTED) == ["a/0", "b/1"]


def test_a_class_for_nobody_is_refused_to_everybody() -> None:
    closed = {each.name: each for each in (PriorityClass("normal", users=frozenset()),)}
    refusal = class_refusal(closed, "normal", "ann", "a")
    assert refusal is not None
    assert refusal.allowed == "none of the classes of the quota"


def test_a_user_of_no_team_is_not_let_in_by_a_team_without_a_name() -> None:
    assert not PriorityClass("x", teams=frozenset({""})).allows("ann", "")


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_no_trial_that_may_be_stopped_is_served_before_a_higher_class_of_its_team(
    name: str, data: st.DataObject
) -> None:
    gpus = data.draw(st.integers(0, 6))
    jobs, free = [], list(range(gpus))
    for number in range(data.draw(st.integers(0, 12))):
        team, of_class = data.draw(st.sampled_from("ab")), data.draw(st.sampled_from(CLASSES))
        is_held = bool(free) and data.draw(st.booleans())
        gpu = free.pop() if is_held else None
        jobs.append(of(team, number, of_class, gpu=gpu, submitted_s=data.draw(st.floats(0, 9))))
    plan = plan_of(AB, *jobs, gpus=gpus, policy=name)
    held = {grant.job for grant in plan.grants}
    rank = {each.name: each.priority for each in BUILT_IN_CLASSES} | {"": 0}
    for team in "ab":
        mine = [each for each in jobs if each.virtual_cluster == team]
        served = [rank[each.priority_class] for each in mine if each.id in held]
        waiting = [rank[each.priority_class] for each in mine if each.id not in held]
        assert min(served, default=999) >= max(waiting, default=-999)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_classes_change_neither_what_a_team_is_guaranteed_nor_that_no_gpu_idles(
    data: st.DataObject,
) -> None:
    jobs = [
        of(data.draw(st.sampled_from(["a", "b", ""])), n, data.draw(st.sampled_from(CLASSES)))
        for n in range(data.draw(st.integers(0, 12)))
    ]
    gpus = data.draw(st.integers(0, 6))
    plan = plan_of(AB, *jobs, gpus=gpus)
    index = {each.id: each.virtual_cluster for each in jobs}
    held, wanted = Counter(index[g.job] for g in plan.grants), Counter(index.values())
    for team in AB.scaled(gpus).teams:
        assert held[team.name] >= min(team.guaranteed, wanted[team.name])
    assert held.total() == min(gpus, len(jobs))


@pytest.mark.parametrize("name", [*NAMES, "asha", "doubling", "gandiva", "saxena"])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_a_plan_within_classes_is_possible_in_any_world(name: str, data: st.DataObject) -> None:
    within = WithinQuota(built(name, "guarded"), QUOTA)
    snapshot = data.draw(snapshots(name))
    plan, _ = within.decide(snapshot, within.initial())
    check(snapshot, plan)


def test_the_lower_class_of_a_team_is_the_one_that_borrows() -> None:
    jobs = of("a", 0, "nightly", gpu=0), of("a", 1, "interactive", gpu=1)
    plan = Plan((Grant(JobId("a/0"), (0,)), Grant(JobId("a/1"), (1,))))
    quota = Quota((TeamQuota("a", 1),))
    assert borrowing_jobs(world(*jobs, gpus=2), plan, quota) == {"a/0"}

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.config.sweep_rules import with_sweep_rules
from hermes_ops.core.early_stop import EarlyStop
from hermes_ops.core.model import Gpu, Job, JobId, Phase, Plan, Point, Snapshot, SweepId
from hermes_ops.core.plan import Start, check, diff
from hermes_ops.core.sweep_limits import MaxParallel
from hermes_ops.policies import compares_trials, make_policy
from hermes_ops.policies.toolbox.fill import fill
from tests.builders import job


def pending(sweep: str, number: int) -> Job:
    return job(f"{sweep}/{number}", submitted_s=float(number))


def world(sweeps: dict[str, int], gpus: int) -> Snapshot:
    jobs = tuple(pending(s, n) for s, count in sweeps.items() for n in range(count))
    return Snapshot(10.0, tuple(Gpu(i) for i in range(gpus)), jobs)


def limited(policy: str, limits: dict[str, int]) -> MaxParallel[object]:
    inner = make_policy(policy, {})
    of_sweeps = tuple((SweepId(s), n) for s, n in limits.items())
    return MaxParallel(inner, of_sweeps, compares=compares_trials(policy))


def test_a_sweep_never_trains_more_trials_than_its_limit() -> None:
    policy = limited("hermes", {"a": 1})
    plan, _ = policy.decide(world({"a": 5}, gpus=4), policy.initial())
    assert [g.job for g in plan.grants] == ["a/0"]


def test_gpus_that_a_limited_sweep_may_not_use_go_to_another_sweep() -> None:
    policy = limited("hermes", {"a": 1})
    plan, _ = policy.decide(world({"a": 5, "b": 5}, gpus=3), policy.initial())
    sweeps = sorted(g.job.partition("/")[0] for g in plan.grants)
    assert sweeps == ["a", "b", "b"]


def test_a_trial_beyond_the_limit_is_told_why_it_waits() -> None:
    policy = limited("fifo", {"a": 1})
    plan, _ = policy.decide(world({"a": 2}, gpus=2), policy.initial())
    assert "at most 1 trials at once" in plan.reasons[JobId("a/1")].text


def holding(number: int, phase: Phase, *losses: float) -> Job:
    curve = tuple(Point(n, loss, float(n)) for n, loss in enumerate(losses, start=1))
    gpus = () if phase is Phase.STOPPING else (0,)
    return replace(pending("a", number), phase=phase, gpus_held=gpus, curve=curve)


def test_running_trials_that_must_not_be_stopped_stay_beyond_the_limit() -> None:
    policy = limited("fifo", {"a": 1})
    starting, first, second = (
        replace(pending("a", n), phase=phase, gpus_held=(n,), preemptible=False)
        for n, phase in enumerate((Phase.STARTING, Phase.RUNNING, Phase.RUNNING))
    )
    snapshot = Snapshot(10.0, (Gpu(0), Gpu(1), Gpu(2)), (starting, first, second))
    plan, _ = policy.decide(snapshot, policy.initial())
    check(snapshot, plan)
    assert sorted(grant.job for grant in plan.grants) == ["a/1", "a/2"]


@dataclass(frozen=True, slots=True)
class WaitingFirst:
    """Serves the jobs that wait before those that train; all of them where the GPUs suffice."""

    name: ClassVar[str] = "waiting-first"
    preempts: ClassVar[bool] = True

    def initial(self) -> None:
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        grants = fill(snapshot, (*snapshot.queue, *snapshot.holding))
        return Plan(tuple(sorted(grants, key=lambda grant: grant.job, reverse=True))), memory


@pytest.mark.parametrize("limit", [1, 2])
def test_a_trial_that_trains_is_not_stopped_so_that_another_of_its_sweep_may_start(
    limit: int,
) -> None:
    running = [replace(holding(n, Phase.RUNNING, 1.0), gpus_held=(n,)) for n in range(2)]
    jobs = (*running, pending("a", 2), pending("a", 3))
    policy = MaxParallel(WaitingFirst(), ((SweepId("a"), limit),))
    snapshot = Snapshot(10.0, tuple(Gpu(i) for i in range(4)), jobs)
    plan, _ = policy.decide(snapshot, None)
    check(snapshot, plan)
    assert {grant.job for grant in plan.grants} <= {"a/0", "a/1"}
    assert len(plan.grants) == limit


def test_who_follows_a_trial_of_its_sweep_starts_once_that_has_left() -> None:
    policy = limited("hermes", {"a": 1})
    follower = pending("a", 1)

    def granted(*jobs: Job) -> list[JobId]:
        plan, _ = policy.decide(Snapshot(10.0, (Gpu(0), Gpu(1)), jobs), policy.initial())
        return [grant.job for grant in plan.grants]

    assert granted(holding(0, Phase.STOPPING, 1.0, 1.0), follower) == []
    assert len(granted(replace(holding(0, Phase.WAITING, 1.0), gpus_held=()), follower)) == 1


def test_a_gang_that_trains_is_not_hidden_whatever_the_order_of_its_gpus() -> None:
    """It must not be stopped, so the one that waits is what is beyond the limit."""
    gang = replace(holding(1, Phase.RUNNING), gpus_held=(2, 0, 1), min_gpus=3, max_gpus=3)
    jobs = (pending("a", 0), replace(gang, preemptible=False, submitted_s=0.0))
    snapshot = Snapshot(10.0, tuple(Gpu(i) for i in range(5)), jobs)
    for inner in ("asha", "hermes", "fair"):
        policy = limited(inner, {"a": 1})
        plan, _ = policy.decide(snapshot, policy.initial())
        check(snapshot, plan)
        assert [grant.job for grant in plan.grants] == ["a/1"]


@settings(max_examples=60)
@given(
    jobs=st.lists(st.sampled_from([Phase.PENDING, Phase.RUNNING, Phase.STOPPING]), max_size=6),
    limit=st.integers(1, 3),
    name=st.sampled_from(["hermes", "fifo", "asha", "fair"]),
)
def test_no_start_makes_more_trials_hold_gpus_than_the_limit_before_others_have_left(
    jobs: list[Phase], limit: int, name: str
) -> None:
    made = []
    for number, phase in enumerate(jobs):
        job = holding(number, phase, 1.0, 0.9, 0.8) if phase is not Phase.PENDING else None
        held = (number,) if phase is Phase.RUNNING else ()
        made.append(replace(job, gpus_held=held) if job else pending("a", number))
    snapshot = Snapshot(100.0, tuple(Gpu(i) for i in range(8)), tuple(made))
    policy = limited(name, {"a": limit})
    plan, _ = policy.decide(snapshot, policy.initial())
    check(snapshot, plan)
    occupied = sum(phase is not Phase.PENDING for phase in jobs)
    starts = sum(isinstance(action, Start) for action in diff(snapshot, plan))
    assert starts == 0 or occupied + starts <= limit


@settings(max_examples=60)
@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 6), min_size=1),
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 3)),
    st.integers(1, 5),
    st.sampled_from(["hermes", "fifo"]),
)
def test_limits_hold_and_the_plan_is_sound_in_any_world(
    sweeps: dict[str, int], limits: dict[str, int], gpus: int, name: str
) -> None:
    snapshot, policy = world(sweeps, gpus), limited(name, limits)
    plan, _ = policy.decide(snapshot, policy.initial())
    check(snapshot, plan)
    for sweep, limit in limits.items():
        assert sum(g.job.startswith(f"{sweep}/") for g in plan.grants) <= limit


@pytest.mark.parametrize("seed", [0, 3])
def test_the_trial_that_a_limited_sweep_trains_is_the_best_of_all_its_trials(seed: int) -> None:
    """Those beyond the limit stay in the comparison: without their curves another would be best."""
    chance = random.Random(seed)
    jobs = [
        job(f"a/{n}", configuration=(("learning_rate", 10 ** -chance.uniform(1, 4)),))
        for n in range(40)
    ]
    for n in range(8):
        level = chance.random()
        points = tuple(Point(step, level + 1 / step, float(step)) for step in range(1, 4))
        jobs[n] = replace(jobs[n], phase=Phase.WAITING, curve=points)
    jobs = [replace(each, total_steps=50) for each in jobs]
    alone = make_policy("frontrunner", {})
    wanted, _ = alone.decide(Snapshot(10.0, (Gpu(0),), jobs), alone.initial())
    policy, pool = limited("frontrunner", {"a": 1}), tuple(Gpu(i) for i in range(8))
    plan, _ = policy.decide(Snapshot(10.0, pool, jobs), policy.initial())
    assert [grant.job for grant in plan.grants] == [grant.job for grant in wanted.grants]


@pytest.mark.parametrize(("name", "compares"), [("frontrunner", True), ("fifo", False)])
def test_the_policy_of_a_pool_sees_trials_beyond_a_limit_if_it_compares_trials(
    name: str, compares: bool
) -> None:
    rules = with_sweep_rules(make_policy(name, {}), {}, None)
    assert isinstance(rules, EarlyStop)
    assert isinstance(rules.policy, MaxParallel)
    assert rules.policy.compares == compares

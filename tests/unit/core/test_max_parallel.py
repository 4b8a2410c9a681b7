from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, Job, JobId, Phase, Snapshot, SweepId
from hermes_ops.core.parallel import MaxParallel
from hermes_ops.core.plan import check
from hermes_ops.policies import make_policy


def pending(sweep: str, number: int) -> Job:
    return Job(JobId(f"{sweep}/{number}"), SweepId(sweep), float(number), Phase.PENDING)


def world(sweeps: dict[str, int], gpus: int) -> Snapshot:
    jobs = tuple(pending(s, n) for s, count in sweeps.items() for n in range(count))
    return Snapshot(10.0, tuple(Gpu(i) for i in range(gpus)), jobs)


def limited(policy: str, limits: dict[str, int]) -> MaxParallel[object]:
    inner = make_policy(policy, {})
    return MaxParallel(inner, tuple((SweepId(s), n) for s, n in limits.items()))


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

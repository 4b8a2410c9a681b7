"""What every policy owes, over every entry of POLICIES, bare and under both guards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.early_stop import EarlyStop
from hermes_ops.core.guards import Aging, AntiThrash, guarded
from hermes_ops.core.model import (
    Gpu,
    Job,
    JobId,
    Phase,
    Plan,
    Point,
    Policy,
    Snapshot,
    Stop,
    SweepId,
)
from hermes_ops.core.placement import holdings
from hermes_ops.core.plan import check, diff
from hermes_ops.errors import ConfigError
from hermes_ops.memory import decode, encode
from hermes_ops.policies import POLICIES, make_policy

NOW_S = 1_000.0
LOSSES = st.one_of(
    st.floats(0, 10), st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e300])
)
WRAPPERS: dict[str, Any] = {
    "bare": lambda policy: policy,
    "anti-thrash": AntiThrash,
    "aging": lambda policy: Aging(policy, quanta=1),
    "guarded": guarded,
    "early-stop": lambda p: EarlyStop(
        guarded(p), tuple((SweepId(s), "median") for s in ("a", "b"))
    ),
}
each_policy = pytest.mark.parametrize("wrapper", WRAPPERS)
each_name = pytest.mark.parametrize("name", POLICIES)


def built(name: str, wrapper: str) -> Policy[Any]:
    policy: Policy[Any] = WRAPPERS[wrapper](make_policy(name, {}))
    return policy


@st.composite
def curves(draw: st.DrawFn) -> tuple[Point, ...]:
    losses = draw(st.lists(LOSSES, max_size=6))
    gap_s = draw(st.sampled_from([0.0, 0.5, 10.0]))
    return tuple(Point(n, loss, n * gap_s) for n, loss in enumerate(losses, start=1))


@st.composite
def jobs(draw: st.DrawFn, number: int) -> Job:
    sweep = draw(st.sampled_from(["a", "b"]))
    phase = draw(st.sampled_from(list(Phase)))
    smallest = draw(st.sampled_from([1, 1, 1, 2, 3]))
    holds = phase in (Phase.RUNNING, Phase.STARTING)
    held = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)) if holds else []
    some_s = st.none() | st.floats(0, 20)
    return Job(
        id=JobId(f"{sweep}/{number}"),
        sweep=SweepId(sweep),
        submitted_s=draw(st.sampled_from([0.0, 1.0, 2.0])),
        phase=phase,
        gpus_held=tuple(held),
        min_gpus=smallest,
        max_gpus=smallest + draw(st.sampled_from([0, 0, 1])),
        weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
        preemptible=draw(st.booleans()),
        curve=() if phase is Phase.PENDING else draw(curves()),
        started_s=draw(st.none() | st.floats(900, 1_000)) if holds else None,
        waiting_since_s=None if holds else draw(st.none() | st.floats(0, 1_000)),
        steps_at_start=draw(st.integers(0, 6)),
        checkpoint_s=draw(some_s),
        restore_s=draw(some_s),
        startup_s=draw(some_s),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Any world, drift included: GPUs held twice, or by jobs of a pool that has shrunk."""
    gpus = draw(st.lists(st.integers(0, 5), unique=True, max_size=5))
    number = draw(st.integers(0, 12))
    return Snapshot(
        NOW_S, tuple(Gpu(g) for g in gpus), tuple(draw(jobs(number=n)) for n in range(number))
    )


@st.composite
def histories(draw: st.DrawFn, policy: Policy[Any]) -> tuple[Snapshot, Any]:
    """A snapshot and a memory that comes from another world, or from none."""
    other = draw(st.none() | snapshots())
    memory = policy.initial()
    if other is not None:
        _, memory = policy.decide(other, memory)
    return draw(snapshots()), memory


@each_name
@each_policy
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_plan_is_possible_explained_and_independent_of_the_order_of_jobs(
    name: str, wrapper: str, data: st.DataObject
) -> None:
    policy = built(name, wrapper)
    snapshot, memory = data.draw(histories(policy))
    plan, after = policy.decide(snapshot, memory)
    check(snapshot, plan)
    actions = diff(snapshot, plan)

    spoken_of = {j.id for j in snapshot.jobs if j.phase in (Phase.PENDING, Phase.WAITING)}
    spoken_of |= {grant.job for grant in plan.grants} | set(plan.ends)
    spoken_of |= {a.job for a in actions if isinstance(a, Stop)}
    assert spoken_of <= plan.reasons.keys()
    assert repr(decode(encode(after), policy.initial())) == repr(after)

    shuffled = replace(
        snapshot,
        jobs=tuple(data.draw(st.permutations(snapshot.jobs))),
        gpus=tuple(data.draw(st.permutations(snapshot.gpus))),
    )
    again = policy.decide(shuffled, memory)
    assert comparable(again) == comparable((plan, after))
    assert diff(shuffled, again[0]) == actions


@each_name
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_policy_that_does_not_preempt_stops_nothing_that_can_stay(
    name: str, data: st.DataObject
) -> None:
    policy = built(name, "guarded")
    if policy.preempts:
        return
    snapshot, memory = data.draw(histories(policy))
    plan, _ = policy.decide(snapshot, memory)
    assert all(plan.gpus_of(job) == gpus for job, gpus in holdings(snapshot).items())


@each_name
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_running_job_is_stopped_for_nobody(name: str, data: st.DataObject) -> None:
    """Each GPU that a stopped job leaves behind counts: one of them has a new user."""
    policy = built(name, "bare")
    snapshot, memory = data.draw(histories(policy))
    plan, _ = policy.decide(snapshot, memory)
    used = {gpu for grant in plan.grants for gpu in grant.gpus}
    granted = {grant.job for grant in plan.grants}
    for job, gpus in holdings(snapshot).items():
        assert job in granted or used.intersection(gpus)


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match="fifo, hermes"):
        make_policy("best", {})


@pytest.mark.parametrize("parameters", [{"speed": 3}, {"threshold": 0}, {"threshold": "two"}])
def test_a_wrong_parameter_is_refused(parameters: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_policy("hermes", parameters)


def comparable(decision: tuple[Plan, Any]) -> Any:
    plan, memory = decision
    return (
        sorted(plan.grants, key=lambda g: g.job),
        plan.ends,
        plan.ranking,
        plan.review_at_s,
        {job: repr(reason) for job, reason in plan.reasons.items()},
        memory,
    )


def test_the_policy_of_the_documentation_works() -> None:
    text = (Path(__file__).parents[3] / "docs" / "policies.md").read_text(encoding="utf-8")
    code = text.split("```python\n", maxsplit=2)[1].split("```", maxsplit=1)[0]
    lines = [line for line in code.splitlines() if line]
    names: dict[str, Any] = {"__name__": "hermes_ops.policies", "Fifo": POLICIES["fifo"]}
    names |= {"dataclass": dataclass, "replace": replace, "ClassVar": ClassVar, "inf": inf}
    names |= {"Snapshot": Snapshot, "Plan": Plan}
    exec(code, names)
    facts: dict[str, Any] = {"submitted_s": 0.0, "phase": Phase.PENDING}
    long = Job(JobId("a/0"), SweepId("a"), total_steps=9, **facts)
    short = Job(JobId("a/1"), SweepId("a"), total_steps=3, **facts)
    snapshot = Snapshot(NOW_S, (Gpu(0),), (long, short))
    plan, _ = names["Shortest"]().decide(snapshot, None)
    check(snapshot, plan)
    assert [grant.job for grant in plan.grants] == ["a/1"]
    assert len(lines) + 1 == 8  # and its line in POLICIES

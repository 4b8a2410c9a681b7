"""How long a team waits for its guaranteed GPUs, over simulated runs of any policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.guards import Quantum, guarded
from hermes_ops.core.model import Job, JobId, Phase, Plan, Policy, Snapshot, SweepId
from hermes_ops.core.quota import Quota, TeamQuota
from hermes_ops.core.within_quota import WithinQuota
from hermes_ops.core.wrapper import Wrapper
from hermes_ops.policies import make_policy
from tests.unit.core.contrary import Contrary
from tests.unit.core.virtual_cluster import LOOK_EACH_S, SWITCH_S, Trial, VirtualCluster, play

pytestmark = pytest.mark.law

K = 3.0
BOUND_S = (K + 1) * SWITCH_S + LOOK_EACH_S
"""The longest quantum and the switch after it, and the look at which the quantum is over."""

POLICIES = ("fifo", "hermes", "2d-las", "fair", "asha", "frontrunner")
ABLE = (Phase.PENDING, Phase.WAITING, Phase.STARTING, Phase.RUNNING)


class Watched(Wrapper[Any]):
    """Notes the snapshots that it decides on."""

    def __init__(self, policy: Policy[Any]) -> None:
        object.__setattr__(self, "policy", policy)
        object.__setattr__(self, "seen", [])
        object.__setattr__(self, "plans", [])

    seen: list[Snapshot]
    plans: list[Plan]

    def decide(self, snapshot: Snapshot, memory: Any) -> tuple[Plan, Any]:
        self.seen.append(snapshot)
        plan, memory = self.policy.decide(snapshot, memory)
        self.plans.append(plan)
        return plan, memory


def shortfalls(watched: Watched, quota: Quota) -> Iterator[float]:
    """Yield for how many seconds on end each team was granted less than it may call its own."""
    for team in quota.teams:
        since_s = None
        for snapshot, plan in zip(watched.seen, watched.plans, strict=True):
            jobs = {
                job.id
                for job in snapshot.jobs
                if job.virtual_cluster == team.name and job.phase in ABLE
            }
            granted = sum(len(grant.gpus) for grant in plan.grants if grant.job in jobs)
            if granted >= min(team.guaranteed, len(jobs)):
                since_s = None
            elif since_s is None:
                since_s = snapshot.time_s
            else:
                yield snapshot.time_s - since_s


@st.composite
def shared_clusters(
    draw: st.DrawFn, classes: Sequence[str] = ("", "", "interactive", "nightly")
) -> tuple[VirtualCluster, Quota]:
    """A pool of jobs of one GPU that come at any time, and the quota of their teams."""
    gpus = draw(st.integers(2, 4))
    own = draw(st.integers(0, gpus))
    teams = (TeamQuota("a", own), TeamQuota("b", draw(st.integers(0, gpus - own))))
    trials = []
    for number in range(draw(st.integers(2, 10))):
        team = draw(st.sampled_from(["a", "b", ""]))
        job = Job(
            JobId(f"{team or 'none'}/{number}"),
            SweepId(team or "none"),
            draw(st.sampled_from([0.0, 20.0, 45.0])),
            Phase.PENDING,
            virtual_cluster=team,
            priority_class=draw(st.sampled_from(classes)),
        )
        fall = draw(st.sampled_from([0.01, 0.1, 1.0]))
        trials.append(Trial(job, draw(st.sampled_from([1.0, 4.0])), draw(st.integers(3, 40)), fall))
    return VirtualCluster(trials, gpus), Quota(teams)


def assert_bounded(policy: Policy[Any], cluster: VirtualCluster, quota: Quota) -> None:
    within = guarded(policy, k=K, default_switch_s=SWITCH_S)
    watched = Watched(WithinQuota(within, quota, Quantum(K, SWITCH_S)))
    play(watched, cluster, until_s=150.0)
    bound_s = BOUND_S + quota.reclaim_notice_s
    assert max(shortfalls(watched, quota), default=0.0) <= bound_s


@pytest.mark.parametrize("name", POLICIES)
@given(drawn=shared_clusters())
@settings(max_examples=12, deadline=None)
def test_no_team_waits_longer_for_a_guaranteed_gpu_than_a_quantum_and_a_switch(
    name: str, drawn: tuple[VirtualCluster, Quota]
) -> None:
    assert_bounded(make_policy(name, {}), *drawn)


@pytest.mark.parametrize("name", ["fifo", "2d-las", "fair"])
@given(drawn=shared_clusters(), notice_s=st.sampled_from([1.0, 7.0, 30.0]))
@settings(max_examples=8, deadline=None)
def test_a_notice_lengthens_that_wait_by_no_more_than_itself(
    name: str, drawn: tuple[VirtualCluster, Quota], notice_s: float
) -> None:
    cluster, quota = drawn
    assert_bounded(make_policy(name, {}), cluster, replace(quota, reclaim_notice_s=notice_s))


@given(drawn=shared_clusters(classes=[""]), notice_s=st.sampled_from([1.0, 7.0, 30.0]))
@settings(max_examples=12, deadline=None)
def test_no_trial_loses_borrowed_gpus_before_its_notice_is_over(
    drawn: tuple[VirtualCluster, Quota], notice_s: float
) -> None:
    """The policy itself stops no trial: each stop is a reclaim."""
    cluster, quota = drawn
    within = WithinQuota(make_policy("fifo", {}), replace(quota, reclaim_notice_s=notice_s))
    watched = Watched(within)
    play(watched, cluster, until_s=150.0)
    ends: dict[JobId, float] = {}
    for snapshot, plan in zip(watched.seen, watched.plans, strict=True):
        for stopped in snapshot.held.keys() - {grant.job for grant in plan.grants}:
            assert snapshot.time_s >= ends[stopped]
        noticed = dict(plan.notices)
        assert all(end_s > snapshot.time_s for end_s in noticed.values())
        assert all(plan.gpus_of(job) for job in noticed)
        ends = {job: noticed.get(job, end_s) for job, end_s in (ends | noticed).items()}


@given(drawn=shared_clusters())
@settings(max_examples=12, deadline=None)
def test_no_team_waits_longer_under_the_worst_policy_that_leaves_no_gpu_idle(
    drawn: tuple[VirtualCluster, Quota],
) -> None:
    assert_bounded(Contrary(), *drawn)


@pytest.mark.parametrize("gpus", [1, 3])
@pytest.mark.parametrize("name", ["fifo", "2d-las"])
def test_teams_without_a_guarantee_take_turns_and_seldom(name: str, gpus: int) -> None:
    """Where one GPU more is lent to one of them, none keeps it, and it is not passed at once."""
    trials = [
        Trial(
            Job(JobId(f"{team}/{n}"), SweepId(team), 0.0, Phase.PENDING, virtual_cluster=team),
            step_s=2.0,
            steps=1_000,
            fall=0.1,
        )
        for team in "ab"
        for n in range(4)
    ]
    cluster = VirtualCluster(trials, gpus)
    policy = guarded(make_policy(name, {}), k=K, default_switch_s=SWITCH_S)
    quota = Quota((TeamQuota("a"), TeamQuota("b")))
    play(WithinQuota(policy, quota, Quantum(K, SWITCH_S)), cluster, until_s=600.0)
    trained_s = [sum(t.trained_s for t in trials if t.job.virtual_cluster == team) for team in "ab"]
    assert min(trained_s) > 0.7 * max(trained_s)
    if name == "fifo":  # which stops no job itself
        assert sum(trial.job.preemptions for trial in trials) <= 12

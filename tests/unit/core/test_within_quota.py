from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core import within_quota
from hermes_ops.core.model import Gpu, Job, JobId, Phase, Plan, Snapshot
from hermes_ops.core.plan import Stop, check, diff
from hermes_ops.core.quota import Quota, TeamQuota
from hermes_ops.core.within_quota import WithinQuota
from hermes_ops.core.wrapper import Wrapper
from hermes_ops.policies import make_policy, sizes_jobs
from hermes_ops.testing.worlds import QUOTA, built, histories, snapshots
from tests.builders import curve, job, world

NAMES = (
    *("fifo", "fifo-backfill", "2d-las", "fair", "hermes", "asha", "doubling", "gandiva"),
    *("elastic-fifo", "elastic-2d-las", "saxena"),
)
AB = Quota((TeamQuota("a", 2), TeamQuota("b", 2)))


def within(quota: Quota, policy: str = "fifo") -> WithinQuota[Any]:
    return WithinQuota(make_policy(policy, {}), quota, sizes=sizes_jobs(policy))


def of_team(team: str, number: int, *, gpu: int | None = None, **facts: Any) -> Job:
    phase = Phase.PENDING if gpu is None else Phase.RUNNING
    held = {} if gpu is None else {"gpus_held": (gpu,), "started_s": 0.0}
    return job(f"{team}/{number}", phase, virtual_cluster=team, **held, **facts)


def granted(quota: Quota, *jobs: Job, gpus: int = 4, policy: str = "fifo") -> dict[str, int]:
    """Return the GPUs that each team is granted."""
    plan = plan_of(quota, *jobs, gpus=gpus, policy=policy)
    teams = Counter[str]()
    for grant in plan.grants:
        teams[grant.job.partition("/")[0]] += len(grant.gpus)
    return dict(teams)


def plan_of(quota: Quota, *jobs: Job, gpus: int = 4, policy: str = "fifo") -> Plan:
    inner, snapshot = within(quota, policy), world(*jobs, gpus=gpus)
    plan, _ = inner.decide(snapshot, inner.initial())
    check(snapshot, plan)
    return plan


def test_a_team_that_asks_later_still_gets_what_it_was_promised() -> None:
    early = [of_team("a", n) for n in range(9)]
    late = [of_team("b", n, submitted_s=50.0) for n in range(9)]
    assert granted(AB, *early, *late) == {"a": 2, "b": 2}


def test_what_a_team_leaves_idle_is_lent() -> None:
    assert granted(AB, *(of_team("a", n) for n in range(9))) == {"a": 4}
    assert granted(AB, *(of_team("a", n) for n in range(9)), of_team("b", 0)) == {"a": 3, "b": 1}


def test_a_team_that_comes_back_gets_its_gpus_from_the_borrower() -> None:
    borrowed = [of_team("a", n, gpu=n) for n in range(4)]
    plan = plan_of(AB, *borrowed, of_team("b", 0, submitted_s=90.0))
    assert [grant.job for grant in plan.grants] == ["a/0", "a/1", "a/2", "b/0"]
    why = plan.reasons[JobId("a/3")]
    assert why.text.startswith("preempted because team b wants its guaranteed GPUs back; ")
    assert "team a may hold 3 GPUs now, 2 of them its own" in why.text
    assert (why.runner_up, why.would_change) == (
        "b/0",
        "team b leaving its guaranteed GPUs idle",
    )


def test_a_borrower_that_is_stopped_for_a_gang_is_told_which_team_wants_its_gpus() -> None:
    """The gang does not get them yet: another borrower is within its quantum."""
    quota = Quota((TeamQuota("a"), TeamQuota("b", 2)))
    held = [of_team("a", 0, gpu=0), of_team("a", 1, gpu=1, preemptible=False)]
    plan = plan_of(quota, *held, of_team("b", 0, min_gpus=2), gpus=2)
    assert [grant.job for grant in plan.grants] == ["a/1"]
    assert "team b wants its guaranteed GPUs back" in plan.reasons[JobId("a/0")].text


def test_a_borrower_that_is_stopped_for_another_borrower_is_told_so() -> None:
    quota = Quota((TeamQuota("a"), TeamQuota("b")))
    held = [of_team("a", n, gpu=n) for n in range(4)]
    late = [of_team("b", n, submitted_s=90.0) for n in range(4)]
    plan = plan_of(quota, *held, *late)
    stopped = [plan.reasons[JobId(f"a/{n}")].text for n in range(4) if not plan.gpus_of(held[n].id)]
    assert len(stopped) == 2
    assert all("team b now gets its share of the GPUs that are lent" in why for why in stopped)


def test_a_job_beyond_its_users_limit_is_told_that_limit() -> None:
    limited = Quota((TeamQuota("a", 4),), user_limits=(("ann", 1),))
    plan = plan_of(limited, of_team("a", 0, user="ann", min_gpus=2))
    why = plan.reasons[JobId("a/0")].text
    assert why == "waits: user ann may hold 1 GPUs at once"


def test_a_team_without_a_loan_is_never_beyond_its_guarantee() -> None:
    alone = Quota((TeamQuota("a", 1, borrow=0), TeamQuota("b", 2, borrow=1)))
    assert granted(alone, *(of_team("a", n) for n in range(9))) == {"a": 1}
    assert granted(alone, *(of_team("b", n) for n in range(9))) == {"b": 3}


def test_a_user_never_holds_more_than_his_limit() -> None:
    limited = Quota((TeamQuota("a", 4),), user_limits=(("ann", 1),))
    jobs = [of_team("a", n, user="ann") for n in range(3)]
    assert granted(limited, *jobs) == {"a": 1}
    assert granted(limited, *jobs, of_team("a", 9, user="bob")) == {"a": 2}


def test_a_job_starts_once_the_one_in_its_users_place_has_left() -> None:
    limited = Quota((TeamQuota("a", 4),), user_limits=(("ann", 1),))
    leaves = replace(of_team("a", 0, user="ann"), phase=Phase.STOPPING, gpus_to_leave=(0,))
    plan = plan_of(limited, leaves, of_team("a", 1, user="ann"))
    assert plan.grants == ()
    assert "has left its GPUs" in plan.reasons[JobId("a/1")].text


def test_a_job_starts_once_the_one_in_its_teams_place_has_left() -> None:
    """One team has a limit, another one has none."""
    quota = Quota((TeamQuota("a", 1, borrow=0), TeamQuota("b", 1)))
    leaves = replace(of_team("a", 0), phase=Phase.STOPPING, gpus_to_leave=(0,))
    plan = plan_of(quota, leaves, of_team("a", 1), of_team("b", 0))
    assert [grant.job for grant in plan.grants] == ["b/0"]
    assert "has left its GPUs" in plan.reasons[JobId("a/1")].text


def test_idle_gpus_are_shared_by_weight() -> None:
    borrowers = Quota((TeamQuota("a", weight=3.0), TeamQuota("b", weight=1.0)))
    jobs = [of_team(team, n) for team in "ab" for n in range(9)]
    assert granted(borrowers, *jobs, gpus=8) == {"a": 6, "b": 2}


def test_who_has_used_more_borrows_less() -> None:
    borrowers = Quota((TeamQuota("a"), TeamQuota("b")), half_life_s=1_000.0)
    policy = WithinQuota(make_policy("fifo", {}), borrowers)
    pool = tuple(Gpu(index) for index in range(6))
    alone = tuple(of_team("a", n, gpu=n) for n in range(6))
    _, memory = policy.decide(Snapshot(0.0, pool, alone), policy.initial())
    waiting = tuple(of_team(team, n) for team in "ab" for n in range(9, 18))
    plan, _ = policy.decide(Snapshot(2_000.0, pool, waiting), memory)
    teams = Counter(grant.job.partition("/")[0] for grant in plan.grants)
    assert teams["b"] > teams["a"]


def test_a_gang_of_its_team_is_not_kept_waiting_by_smaller_jobs_of_others() -> None:
    """Two GPUs are idle, two are still held within a quantum: nothing else starts on the idle."""
    held = [of_team("a", n, gpu=n, preemptible=False) for n in (0, 1)]
    gang = of_team("b", 0, min_gpus=4, submitted_s=5.0)
    small = [of_team("a", n, submitted_s=1.0) for n in range(2, 9)]
    quota = Quota((TeamQuota("a"), TeamQuota("b", 4)))
    assert granted(quota, *held, gang, *small) == {"a": 2}
    assert granted(quota, gang, *small) == {"b": 4}


def test_guarantees_beyond_a_pool_that_shrank_shrink_in_proportion() -> None:
    quota = Quota((TeamQuota("a", 6), TeamQuota("b", 2))).scaled(4)
    assert [team.guaranteed for team in quota.teams] == [3, 1]
    jobs = [of_team(team, n) for team in "ab" for n in range(9)]
    assert granted(Quota((TeamQuota("a", 6), TeamQuota("b", 2))), *jobs) == {"a": 3, "b": 1}


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=8),
    st.integers(0, 60),
)
def test_scaled_guarantees_add_up_to_at_most_the_pool(given_gpus: list[int], gpus: int) -> None:
    teams = tuple(TeamQuota(str(n), number) for n, number in enumerate(given_gpus))
    scaled = [team.guaranteed for team in Quota(teams).scaled(gpus).teams]
    assert sum(scaled) == min(gpus, sum(given_gpus))
    assert all(new <= old for new, old in zip(scaled, given_gpus, strict=True))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_with_one_team_one_class_and_no_limit_the_plan_is_the_inner_policys(
    name: str, data: st.DataObject
) -> None:
    policy = built(name, "guarded")
    snapshot, memory = data.draw(histories(name, policy))
    one_class = data.draw(st.sampled_from(["", "nightly"]))
    jobs = tuple(replace(each, priority_class=one_class) for each in snapshot.jobs)
    snapshot = replace(snapshot, jobs=jobs)
    limitless = WithinQuota(policy, Quota(others=TeamQuota("", 5)))
    plan, _ = limitless.decide(snapshot, replace(limitless.initial(), inner=memory))
    expected, _ = policy.decide(snapshot, memory)
    assert (plan.grants, plan.ends, plan.ranking) == (
        expected.grants,
        expected.ends,
        expected.ranking,
    )


def test_the_policy_remembers_the_jobs_that_are_hidden_from_it() -> None:
    policy = make_policy("2d-las", {})
    jobs = [of_team("a", n, gpu=n if n < 4 else None, service_gpu_s=9.0 * n) for n in range(9)]
    snapshot = world(*jobs, *(of_team("b", n) for n in range(9)), gpus=4)
    limited = WithinQuota(policy, AB)
    _, memory = limited.decide(snapshot, limited.initial())
    assert memory.inner == policy.decide(snapshot, policy.initial())[1]


def test_hidden_jobs_are_ranked_after_the_others_as_the_policy_ranks_them() -> None:
    alone = Quota((TeamQuota("a", 1, borrow=0), TeamQuota("b", 3)))
    jobs = [of_team("a", n) for n in range(3)] + [of_team("b", n) for n in range(5)]
    ranking = plan_of(alone, *jobs).ranking
    assert [job for job in ranking if job.startswith("a")][-2:] == ["a/1", "a/2"]
    assert ranking.index(JobId("b/4")) < ranking.index(JobId("a/1"))


def test_a_few_decisions_suffice_whatever_number_of_jobs_waits() -> None:
    inner, asked = make_policy("fifo", {}), list[int]()

    class Counting(Wrapper[Any]):
        def decide(self, snapshot: Snapshot, memory: Any) -> tuple[Plan, Any]:
            asked.append(len(snapshot.jobs))
            return inner.decide(snapshot, memory)

    jobs = [of_team(team, n, submitted_s=float(n)) for team in "abc" for n in range(500)]
    teams = Quota(tuple(TeamQuota(team, 2) for team in "abc"), user_limits=(("", 9),))
    policy = WithinQuota(Counting(inner), teams)
    plan, _ = policy.decide(world(*jobs, gpus=6), policy.initial())
    assert len(plan.grants) == 6
    assert len(asked) <= 4


@pytest.mark.parametrize("name", ["fifo", "elastic-frontrunner", "2d-las"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_gpu_is_not_left_idle_by_many_users_at_their_limits(name: str, size: int) -> None:
    """Their jobs come first: those that have a GPU have more jobs, the others want two GPUs."""
    users = [f"user-{n}" for n in range(60)]
    limited = Quota(user_limits=tuple((user, 1) for user in users))
    running = [of_team("a", n, gpu=n, user=user) for n, user in enumerate(users) if size == 1]
    waiting = [of_team("b", n, user=user, min_gpus=size) for n, user in enumerate(users)]
    last = of_team("c", 0, user="late", submitted_s=99.0)
    plan = plan_of(limited, *running, *waiting, last, gpus=len(running) + size, policy=name)
    assert plan.gpus_of(last.id)


@pytest.mark.parametrize("name", ["fifo", "elastic-frontrunner"])
def test_a_team_gets_its_guarantee_however_many_teams_have_more_jobs_than_gpus(name: str) -> None:
    teams = [f"team-{n}" for n in range(60)]
    quota = Quota((*(TeamQuota(team, 1, borrow=0) for team in teams), TeamQuota("late", 1)))
    running = [of_team(team, 0, gpu=n) for n, team in enumerate(teams)]
    waiting = [of_team(team, 1) for team in teams]
    last = of_team("late", 0, submitted_s=99.0)
    plan = plan_of(quota, *running, *waiting, last, gpus=len(teams) + 1, policy=name)
    assert plan.gpus_of(last.id)
    assert len(plan.grants) == len(teams) + 1


def test_no_limit_is_passed_where_the_decisions_are_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(within_quota, "MOST_DECISIONS", 0)
    quota = Quota((TeamQuota("a", 2, borrow=0), TeamQuota("b", 2)), user_limits=(("ann", 1),))
    jobs = [of_team("a", n, user="ann" if n < 3 else "bob", submitted_s=n) for n in range(6)]
    plan = plan_of(quota, *jobs)
    assert [grant.job for grant in plan.grants] == ["a/0", "a/3"]
    assert plan.reasons[JobId("a/1")].text == "waits: user ann may hold 1 GPUs at once"


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_no_limit_is_passed_but_by_jobs_that_must_not_be_stopped(
    name: str, data: st.DataObject
) -> None:
    policy = WithinQuota(built(name, "guarded"), QUOTA)
    snapshot = data.draw(snapshots(name, bound=False))
    plan, _ = policy.decide(snapshot, policy.initial())
    check(snapshot, plan)
    stay = {j.id for j in snapshot.holding if snapshot.held.get(j.id) == plan.gpus_of(j.id)}
    teams, users, fixed_teams, fixed_users = (defaultdict[str, float](float) for _ in range(4))
    for grant in plan.grants:
        owner = snapshot.index[grant.job]
        amount = len(grant.gpus) * grant.share  # policies that share a GPU give parts of it
        teams[owner.virtual_cluster] += amount
        users[owner.user] += amount
        if grant.job in stay:
            fixed_teams[owner.virtual_cluster] += amount
            fixed_users[owner.user] += amount
    scaled = QUOTA.scaled(len(snapshot.gpus))
    for team in scaled.teams:
        assert teams[team.name] <= max(team.limit, fixed_teams[team.name])
    for user, most in QUOTA.user_limits:
        assert users[user] <= max(most, fixed_users[user])


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_no_gpu_idles_while_a_job_of_one_gpu_may_use_it(data: st.DataObject) -> None:
    teams = st.sampled_from(["", "vision", "speech", "other"])
    drawn = [
        of_team("vision", n, gpu=None, user=data.draw(st.sampled_from(["ann", "bob"])))
        for n in range(data.draw(st.integers(0, 9)))
    ]
    jobs = [replace(each, virtual_cluster=data.draw(teams)) for each in drawn]
    gpus = data.draw(st.integers(0, 6))
    plan = plan_of(QUOTA, *jobs, gpus=gpus)
    held = Counter(next(j for j in jobs if j.id == g.job).virtual_cluster for g in plan.grants)
    users = Counter(next(j for j in jobs if j.id == g.job).user for g in plan.grants)
    scaled = QUOTA.scaled(gpus)
    if len(plan.grants) < gpus:
        for each in jobs:
            may = held[each.virtual_cluster] < scaled.team_of(each.virtual_cluster).limit and users[
                each.user
            ] < QUOTA.limit_of_user.get(each.user, gpus)
            assert not may or plan.gpus_of(each.id)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_a_team_gets_its_guarantee_however_many_jobs_others_have(data: st.DataObject) -> None:
    """Running jobs that may be stopped do not stand in its way."""
    wants, others = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 12))
    running = data.draw(st.integers(0, min(others, 6)))
    foreign = [of_team("x", n, gpu=n if n < running else None) for n in range(others)]
    own = [of_team("vision", n, submitted_s=99.0) for n in range(wants)]
    guaranteed = data.draw(st.integers(0, 6))
    quota = Quota((TeamQuota("vision", guaranteed),))
    held = granted(quota, *foreign, *own, gpus=6)
    assert held.get("vision", 0) >= min(wants, guaranteed)
    assert sum(held.values()) == min(6, wants + others)


@pytest.mark.parametrize("name", ["asha", "hyperband"])
def test_trials_are_ended_by_what_all_trials_of_their_sweep_have_shown(name: str) -> None:
    """Also those that are hidden for their team's share count where the policy compares trials."""
    policy, ended = make_policy(name, {"kill": True}), 0
    for seed in range(60):
        chance, gpus = random.Random(seed), iter(range(4))
        jobs = [of_team("b", n) for n in range(4)]
        for number in range(chance.randint(4, 12)):
            losses = [chance.random() for _ in range(chance.choice([1, 3, 9, 10]))]
            gpu = next(gpus, None) if chance.random() < 0.6 else None
            phase = Phase.WAITING if gpu is None else Phase.RUNNING
            trial = of_team("a", number, gpu=gpu, curve=curve(*losses), total_steps=81)
            jobs.append(replace(trial, phase=phase))
        snapshot = world(*jobs, gpus=4)
        plan, _ = WithinQuota(policy, AB).decide(snapshot, WithinQuota(policy, AB).initial())
        check(snapshot, plan)
        expected, _ = policy.decide(snapshot, policy.initial())
        granted_jobs = {grant.job for grant in plan.grants}
        assert set(plan.ends) == set(expected.ends) - granted_jobs
        ended += len(plan.ends)
    assert ended > 10


def test_a_trial_keeps_its_rank_among_trials_that_wait_for_their_team() -> None:
    """Alone at its rung it would not be promoted, and a new one would start."""
    quota = Quota((TeamQuota("a", 1, borrow=0), TeamQuota("b", 3)))
    at_rung = [
        replace(of_team("a", n, curve=curve(1.0 + n)), phase=Phase.WAITING) for n in range(3)
    ]
    jobs = [*at_rung, *(of_team("a", n) for n in range(3, 9)), of_team("b", 0)]
    snapshot, asha = world(*jobs, gpus=4), make_policy("asha", {})
    policy = WithinQuota(asha, quota, compares=True)
    plan, _ = policy.decide(snapshot, policy.initial())
    check(snapshot, plan)
    assert sorted(grant.job for grant in plan.grants) == ["a/0", "b/0"]
    assert plan.reasons[JobId("a/0")].text.startswith("promoted")
    assert len(plan.ranking) == len(set(plan.ranking)) == 8


@pytest.mark.parametrize("name", ["saxena", "afs", "elastic-2d-las"])
@pytest.mark.parametrize("others", [1, 3])
def test_a_job_with_a_range_of_gpus_takes_what_its_team_may_hold(name: str, others: int) -> None:
    """These policies would give a job of the first team more than its team's share."""
    quota = Quota((TeamQuota("a", 4), TeamQuota("b", 4)))
    jobs = [of_team("a", 0, max_gpus=8), *(of_team("b", n, max_gpus=8) for n in range(others))]
    assert granted(quota, *jobs, gpus=8, policy=name) == {"a": 4, "b": 4}


def test_a_job_with_a_range_takes_what_is_lent_though_it_is_less_than_it_could_take() -> None:
    quota = Quota((TeamQuota("a", 3), TeamQuota("b")))
    jobs = [of_team("a", 0, min_gpus=3), of_team("b", 0, max_gpus=8)]
    assert granted(quota, *jobs, gpus=8, policy="elastic-fifo") == {"a": 3, "b": 5}


def test_a_team_that_has_jobs_alone_is_not_held_to_a_part_of_the_pool() -> None:
    quota = Quota((TeamQuota("a"), TeamQuota("b", 2)))
    jobs = [of_team("a", 0, min_gpus=2, service_gpu_s=9e5), of_team("a", 1, min_gpus=3)]
    assert granted(quota, *jobs, gpus=4, policy="2d-las") == {"a": 3}


def test_a_job_with_a_range_takes_fewer_gpus_rather_than_none() -> None:
    quota = Quota((TeamQuota("a", 3), TeamQuota("b", 3)))
    jobs = [of_team("a", 0, max_gpus=8), *(of_team("b", n, max_gpus=8) for n in range(2))]
    plan = plan_of(quota, *jobs, gpus=6, policy="elastic-fifo")
    assert {grant.job: len(grant.gpus) for grant in plan.grants} == {"a/0": 3, "b/0": 2, "b/1": 1}


SIZING = ("elastic-fifo", "elastic-2d-las", "doubling", "throughput", "afs", "saxena", "slaq-sized")


def widened(name: str, gpus: Sequence[int], submitted_s: float = 0.0) -> Job:
    """Return a job of 1 to 4 GPUs that has trained on these for 90 seconds; PENDING on none."""
    facts: dict[str, Any] = {"max_gpus": 4, "total_steps": 100, "submitted_s": submitted_s}
    if gpus:
        facts |= {"gpus_held": tuple(gpus), "started_s": 10.0, "curve": curve(3.0, 2.0, 1.5)}
    phase = Phase.RUNNING if gpus else Phase.PENDING
    return job(name, phase, virtual_cluster=name.partition("/")[0], **facts)


def stopped(snapshot: Snapshot, plan: Plan) -> list[str]:
    return [action.job for action in diff(snapshot, plan) if isinstance(action, Stop)]


@pytest.mark.parametrize("held", [[(0, 1, 2, 3)], [(0, 1, 2), (3,)], [(0, 1), (2, 3)]])
@pytest.mark.parametrize("policy", SIZING)
def test_borrowers_of_several_sizes_shrink_to_their_share_and_are_not_stopped(
    policy: str, held: list[tuple[int, ...]]
) -> None:
    borrowers = [widened(f"a/{number}", gpus) for number, gpus in enumerate(held)]
    snapshot = world(*borrowers, widened("b/0", (), submitted_s=90.0), gpus=4)
    plan, _ = within(AB, policy).decide(snapshot, within(AB, policy).initial())
    assert not stopped(snapshot, plan)
    assert granted(AB, *snapshot.jobs, policy=policy)["a"] <= 2
    assert plan.gpus_of(JobId("b/0"))


def test_a_borrower_of_several_sizes_keeps_its_gpus_until_its_notice_is_over() -> None:
    """A smaller size would take GPUs from it at once."""
    quota = replace(AB, reclaim_notice_s=30.0)
    borrower = widened("a/0", (0, 1, 2, 3))
    snapshot = world(borrower, widened("b/0", (), submitted_s=90.0), gpus=4)
    plan, _ = within(quota, "afs").decide(snapshot, within(quota, "afs").initial())
    assert plan.gpus_of(borrower.id) == (0, 1, 2, 3)
    assert plan.notices == ((borrower.id, 130.0),)


@given(sizes=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 4)), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_no_running_job_is_stopped_while_each_has_a_gpu_in_its_teams_guarantee(
    sizes: list[tuple[str, int]],
) -> None:
    """Jobs of 1 to 4 GPUs each, in a pool that has a GPU for each; only AFS would stop some."""
    teams = Counter(team for team, _ in sizes)
    quota = Quota(tuple(TeamQuota(team, number) for team, number in teams.items()))
    free, jobs = list(range(len(sizes))), list[Job]()
    for number, (team, size) in enumerate(sizes):
        gpus, free = free[:size], free[size:]
        jobs.append(widened(f"{team}/{number}", gpus, submitted_s=float(number)))
    snapshot = world(*jobs, gpus=len(sizes))
    for policy in set(SIZING) - {"afs"}:
        plan, _ = within(quota, policy).decide(snapshot, within(quota, policy).initial())
        check(snapshot, plan)
        assert not stopped(snapshot, plan), policy

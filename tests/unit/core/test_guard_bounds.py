"""The two bounds on waiting and on switching, over simulated runs of any policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.guards import AntiThrash, guarded
from hermes_ops.core.model import Job, JobId, Phase, Policy, SweepId
from hermes_ops.policies import POLICIES, make_policy
from hermes_ops.policies.hermes import Hermes
from tests.unit.core.contrary import Contrary, Deaf, Partial, Restless
from tests.unit.core.virtual_cluster import (
    LOOK_EACH_S,
    SWITCH_S,
    Trial,
    VirtualCluster,
    Wait,
    play,
)

pytestmark = pytest.mark.law

K, QUANTA = 3.0, 2


@st.composite
def clusters(draw: st.DrawFn, largest: int = 1, *, ranges: bool = False) -> VirtualCluster:
    """A pool and its jobs of up to `largest` GPUs, which may take from 1 on with `ranges`."""
    gpus = draw(st.integers(max(1, largest), max(3, largest)))
    trials = []
    for number in range(draw(st.integers(1, 9))):
        size = draw(st.integers(1, largest))
        least = draw(st.integers(1, size)) if ranges else size
        name = JobId(f"s/{number}")
        job = Job(name, SweepId("s"), 0.0, Phase.PENDING, min_gpus=least, max_gpus=size)
        step_s = draw(st.sampled_from([1.0, 2.0, 4.0]))
        fall = draw(st.sampled_from([0.01, 0.1, 1.0]))
        trials.append(Trial(job, step_s, draw(st.integers(3, 60)), fall))
    return VirtualCluster(trials, gpus)


QUANTUM_S = (K + 1) * SWITCH_S
ROUND_S = QUANTUM_S + 2 * LOOK_EACH_S  # the cluster looks once for the stop, once for the start
WILD: list[Policy[Any]] = [Hermes(), Hermes(4), Contrary(), Deaf(), Partial()]
GUARDS: dict[str, Any] = {"k": K, "quanta": QUANTA, "default_switch_s": SWITCH_S}
GUARDED = guarded(Hermes(3), **GUARDS)


def waited(cluster: VirtualCluster) -> list[Wait]:
    """Each wait that has ended, and those that last."""
    done = [wait for trial in cluster.trials.values() for wait in trial.waits]
    still = [t for t in cluster.trials.values() if t.job.phase is Phase.WAITING]
    for trial in still:
        since_s = trial.job.waiting_since_s or 0.0
        done.append(Wait(cluster.now_s - since_s, trial.longest_line, trial.widest_line))
    return done


def patience_s(wait: Wait, gpus: int) -> float:
    """No slice is longer than the quantum, so that the quantum is each trial's round."""
    return QUANTA * QUANTUM_S * max(1.0, wait.gpus / gpus)


def limit_s(wait: Wait, gpus: int, gangs: bool = False) -> float:
    rounds = wait.trials if gangs else ceil(wait.trials / gpus)
    return patience_s(wait, gpus) + rounds * ROUND_S + LOOK_EACH_S


@pytest.mark.parametrize("policy", WILD, ids=lambda p: type(p).__name__)
@given(cluster=clusters())
@settings(max_examples=15, deadline=None)
def test_waiting_and_switching_stay_within_their_bounds(
    policy: Policy[Any], cluster: VirtualCluster
) -> None:
    play(guarded(policy, **GUARDS), cluster)
    for wait in waited(cluster):
        assert wait.seconds <= limit_s(wait, cluster.gpus)
    assert cluster.lost_s <= cluster.occupied_s / (K + 1) + 1e-9


@pytest.mark.parametrize("policy", WILD, ids=lambda p: type(p).__name__)
@given(cluster=clusters(largest=2))
@settings(max_examples=15, deadline=None)
def test_waiting_and_switching_stay_within_their_bounds_with_gangs(
    policy: Policy[Any], cluster: VirtualCluster
) -> None:
    play(guarded(policy, **GUARDS), cluster)
    for wait in waited(cluster):
        assert wait.seconds <= limit_s(wait, cluster.gpus, gangs=True)
    assert cluster.lost_s <= cluster.occupied_s / (K + 1) + 1e-9


@dataclass(frozen=True)
class Future:
    """The cluster's future, for the policies that need to know it."""

    cluster: VirtualCluster

    def remaining_s(self, job: Job, now_s: float) -> float:
        trial = self.cluster.trials[job.id]
        return max(0.0, trial.steps * trial.step_s - trial.trained_s)

    def remaining_work(self, job: Job, now_s: float) -> float:
        return self.remaining_s(job, now_s)

    def remaining_steps(self, job: Job, now_s: float) -> float:
        return self.remaining_s(job, now_s) / self.cluster.trials[job.id].step_s

    def rate(self, job: Job, placement: tuple[int, ...], batch: int | None = None) -> float:
        return float(job.takes(sum(placement)))

    def step_s(self, job: Job, placement: tuple[int, ...]) -> float:
        return self.cluster.trials[job.id].step_s if job.takes(sum(placement)) else inf

    def final_loss(self, job: Job) -> float:
        trial = self.cluster.trials[job.id]
        return 1 / (1 + trial.fall * trial.steps)


def preempting() -> list[str]:
    """The policies that stop jobs; the others promise nothing and are left alone."""
    return [name for name, policy in POLICIES.items() if getattr(policy, "preempts", True)]


@pytest.mark.parametrize("name", preempting())
@given(data=st.data(), largest=st.sampled_from([1, 1, 2]))
@settings(max_examples=8, deadline=None)
def test_both_bounds_hold_for_each_policy_that_preempts(
    name: str, data: st.DataObject, largest: int
) -> None:
    cluster = data.draw(clusters(largest))
    policy = make_policy(name, {}, {"oracle": Future(cluster)})
    play(guarded(policy, **GUARDS), cluster)
    for wait in waited(cluster):
        assert wait.seconds <= limit_s(wait, cluster.gpus, gangs=largest > 1)
    assert cluster.lost_s <= cluster.occupied_s / (K + 1) + 1e-9


def sizing() -> list[str]:
    """The policies that size jobs."""
    return [name for name in preempting() if getattr(POLICIES[name], "sizes", False)]


@pytest.mark.parametrize("name", sizing())
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_resizes_and_stops_together_cost_at_most_one_part_in_k_plus_1(
    name: str, data: st.DataObject
) -> None:
    cluster = data.draw(clusters(4, ranges=True))
    policy = make_policy(name, {}, {"oracle": Future(cluster)})
    play(guarded(policy, **GUARDS), cluster)
    assert cluster.lost_s <= cluster.occupied_s / (K + 1) + 1e-9


@given(cluster=clusters(4, ranges=True))
@settings(max_examples=30, deadline=None)
def test_a_policy_that_changes_every_size_each_time_loses_no_more_either(
    cluster: VirtualCluster,
) -> None:
    play(guarded(Restless(), **GUARDS), cluster)
    for wait in waited(cluster):
        assert wait.seconds <= limit_s(wait, cluster.gpus, gangs=True)
    assert cluster.lost_s <= cluster.occupied_s / (K + 1) + 1e-9


def test_without_the_guard_a_policy_that_changes_every_size_loses_more_than_that() -> None:
    job = Job(JobId("s/0"), SweepId("s"), 0.0, Phase.PENDING, min_gpus=1, max_gpus=2)
    cluster = VirtualCluster([Trial(job, 1.0, 900, 0.05)], gpus=2)
    play(Restless(), cluster)
    assert cluster.lost_s > cluster.occupied_s / (K + 1)


@given(cluster=clusters(largest=2), k=st.sampled_from([0.0, 1.0, 5.0]))
@settings(max_examples=15, deadline=None)
def test_switching_costs_at_most_one_part_in_k_plus_1(cluster: VirtualCluster, k: float) -> None:
    play(guarded(Deaf(), **(GUARDS | {"k": k})), cluster)
    assert cluster.lost_s <= cluster.occupied_s / (k + 1) + 1e-9


def three_trials() -> VirtualCluster:
    job = Job(JobId("s/0"), SweepId("s"), 0.0, Phase.PENDING)
    falls = {0: 0.05, 1: 0.0, 2: 0.0}
    return VirtualCluster(
        [Trial(replace(job, id=JobId(f"s/{n}")), 1.0, 900, fall) for n, fall in falls.items()], 1
    )


def longest_wait(policy: Policy[Any]) -> Wait:
    cluster = three_trials()
    play(policy, cluster)
    return max(waited(cluster), key=lambda wait: wait.seconds)


def test_without_aging_a_trial_that_does_not_converge_waits_to_the_end() -> None:
    bare, aged = longest_wait(AntiThrash(Hermes(3), K, SWITCH_S)), longest_wait(GUARDED)
    assert bare.seconds > 1.5 * limit_s(bare, gpus=1)
    assert patience_s(Wait(0.0, 1, 1), gpus=1) <= aged.seconds <= limit_s(aged, gpus=1)


def test_without_the_guard_the_contrary_policy_loses_more_than_that() -> None:
    cluster = three_trials()
    play(Contrary(), cluster)
    assert cluster.lost_s > cluster.occupied_s / (K + 1)


@pytest.mark.parametrize("waiting", [1, 5, 14])
@pytest.mark.parametrize("quanta", [2, 8])
def test_a_policy_keeps_its_choice_for_most_of_the_time_however_many_wait(
    waiting: int, quanta: int
) -> None:
    job = Job(JobId("s/00"), SweepId("s"), 0.0, Phase.WAITING, waiting_since_s=0.0)
    names = [JobId(f"s/{number:02}") for number in range(waiting + 1)]
    cluster = VirtualCluster([Trial(replace(job, id=n), 10.0, 9_999, 0.1) for n in names], gpus=1)
    patience_s = quanta * waiting * QUANTUM_S
    play(guarded(Partial(), **(GUARDS | {"quanta": quanta})), cluster, until_s=5.0 * patience_s)
    chosen, *others = cluster.trials.values()
    assert all(trial.trained_s > 0 for trial in others)
    assert sum(wait.seconds for wait in chosen.waits) <= cluster.now_s / quanta

"""The two bounds on waiting and on switching, over simulated runs of any policy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.guards import AntiThrash, guarded
from hermes_ops.core.model import (
    Gpu,
    Job,
    JobId,
    Phase,
    Plan,
    Point,
    Policy,
    Resize,
    Snapshot,
    Start,
    SweepId,
)
from hermes_ops.core.plan import check, diff
from hermes_ops.policies import POLICIES, make_policy
from hermes_ops.policies.hermes import Hermes
from tests.unit.core.contrary import Contrary, Deaf

K, QUANTA = 3.0, 2
START_S, RESTORE_S, CHECKPOINT_S = 2.0, 1.0, 1.5
SWITCH_S = START_S + RESTORE_S + CHECKPOINT_S
LOOK_EACH_S = 0.5


@dataclass(slots=True)
class Trial:
    """A job of the virtual cluster; it trains one step each `step_s`."""

    job: Job
    step_s: float
    steps: int
    fall: float
    trained_s: float = 0.0
    released_s: float | None = None  # STOPPING: when its checkpoint is written
    waits: list[tuple[float, float, int]] = field(default_factory=list)
    worst_line: int = 0


class VirtualCluster:
    """Single steps of virtual time; a started job begins when its GPUs have been released."""

    def __init__(self, trials: list[Trial], gpus: int) -> None:
        self.now_s = 0.0
        self.gpus = gpus
        self.trials = {trial.job.id: trial for trial in trials}
        self.lost_s = 0.0
        self.occupied_s = 0.0

    def observe(self) -> Snapshot:
        jobs = tuple(trial.job for trial in self.trials.values())
        return Snapshot(self.now_s, tuple(Gpu(i) for i in range(self.gpus)), jobs)

    def apply(self, snapshot: Snapshot, plan: Plan) -> None:
        for action in diff(snapshot, plan):
            trial = self.trials[action.job]
            if isinstance(action, Start):
                self._start(trial, action.gpus)
                trial.job = replace(trial.job, share_held=action.share)
            elif isinstance(action, Resize) and action.gpus == trial.job.gpus_held:
                trial.job = replace(trial.job, share_held=action.share)  # nothing is stopped
            else:
                self._stop(trial)

    def advance(self) -> None:
        self.now_s += LOOK_EACH_S
        for trial in self.trials.values():
            if trial.job.phase is Phase.STOPPING and trial.released_s == self.now_s:
                waiting = Phase.WAITING
                trial.job = replace(trial.job, phase=waiting, waiting_since_s=self.now_s)
            elif trial.job.phase in (Phase.STARTING, Phase.RUNNING):
                self._train(trial)

    def _start(self, trial: Trial, gpus: tuple[int, ...]) -> None:
        since = trial.job.waiting_since_s
        if trial.job.phase is Phase.WAITING and since is not None:
            trial.waits.append((since, self.now_s, trial.worst_line))
        trial.worst_line = 0
        trial.job = replace(
            trial.job,
            phase=Phase.STARTING,
            gpus_held=gpus,
            started_s=self.now_s + CHECKPOINT_S,  # whoever was there may have to write first
            waiting_since_s=None,
            steps_at_start=trial.job.last_step,
            startup_s=START_S,
            restore_s=RESTORE_S,
            checkpoint_s=CHECKPOINT_S,
        )

    def _stop(self, trial: Trial) -> None:
        assert trial.job.started_s is not None
        self.lost_s += SWITCH_S
        self.occupied_s += self.now_s + CHECKPOINT_S - trial.job.started_s
        trial.released_s = self.now_s + CHECKPOINT_S
        count = trial.job.preemptions + 1
        trial.job = replace(
            trial.job, phase=Phase.STOPPING, gpus_held=(), started_s=None, preemptions=count
        )

    def _train(self, trial: Trial) -> None:
        assert trial.job.started_s is not None
        if self.now_s <= trial.job.started_s + START_S + RESTORE_S:
            return
        trial.trained_s += LOOK_EACH_S
        curve = trial.job.curve
        while (len(curve) + 1) * trial.step_s <= trial.trained_s:
            step = len(curve) + 1
            curve = (*curve, Point(step, 1 / (1 + trial.fall * step), step * trial.step_s))
        ended = len(curve) >= trial.steps
        trial.job = replace(
            trial.job,
            phase=Phase.ENDED if ended else Phase.RUNNING,
            gpus_held=() if ended else trial.job.gpus_held,
            curve=curve,
        )


@st.composite
def clusters(draw: st.DrawFn, largest: int = 1) -> VirtualCluster:
    gpus = draw(st.integers(max(1, largest), 3))
    trials = []
    for number in range(draw(st.integers(1, 9))):
        size = draw(st.integers(1, largest))
        job = Job(
            JobId(f"s/{number}"), SweepId("s"), 0.0, Phase.PENDING, min_gpus=size, max_gpus=size
        )
        step_s = draw(st.sampled_from([1.0, 2.0, 4.0]))
        fall = draw(st.sampled_from([0.01, 0.1, 1.0]))
        trials.append(Trial(job, step_s, draw(st.integers(3, 60)), fall))
    return VirtualCluster(trials, gpus)


def play(policy: Policy[Any], cluster: VirtualCluster, until_s: float = 300.0) -> None:
    """Ask when something happened, or when the plan said so: guards must ask to be asked."""
    memory, seen, review_s = policy.initial(), None, inf
    while cluster.now_s < until_s:
        snapshot = cluster.observe()
        _count_line(cluster)
        if snapshot.jobs != seen or snapshot.time_s >= review_s:
            plan, memory = policy.decide(snapshot, memory)
            check(snapshot, plan)
            cluster.apply(snapshot, plan)
            seen, review_s = snapshot.jobs, inf if plan.review_at_s is None else plan.review_at_s
        cluster.advance()


def _count_line(cluster: VirtualCluster) -> None:
    """The longest line that each waiting trial has been in once it was of age."""
    line = sum(t.job.phase is Phase.WAITING for t in cluster.trials.values())
    for trial in cluster.trials.values():
        since = trial.job.waiting_since_s
        due = since is not None and since + PATIENCE_S <= cluster.now_s
        if trial.job.phase is Phase.WAITING and due and trial.worst_line == 0:
            trial.worst_line = line


QUANTUM_S = (K + 1) * SWITCH_S
PATIENCE_S = QUANTA * QUANTUM_S
ROUND_S = QUANTUM_S + 2 * LOOK_EACH_S  # the cluster looks once for the stop, once for the start
WILD: list[Policy[Any]] = [Hermes(), Hermes(4), Contrary(), Deaf()]
GUARDS: dict[str, Any] = {"k": K, "quanta": QUANTA, "default_switch_s": SWITCH_S}


def waited(cluster: VirtualCluster) -> list[tuple[float, int]]:
    """Each wait in seconds, with the length of the line when the trial came of age."""
    done = [(end - begin, line) for t in cluster.trials.values() for begin, end, line in t.waits]
    still = [t for t in cluster.trials.values() if t.job.phase is Phase.WAITING]
    return done + [(cluster.now_s - (t.job.waiting_since_s or 0), t.worst_line) for t in still]


@pytest.mark.parametrize("policy", WILD, ids=lambda p: type(p).__name__)
@given(cluster=clusters())
@settings(max_examples=15, deadline=None)
def test_waiting_and_switching_stay_within_their_bounds(
    policy: Policy[Any], cluster: VirtualCluster
) -> None:
    play(guarded(policy, **GUARDS), cluster)
    for waited_s, line in waited(cluster):
        assert waited_s <= PATIENCE_S + ceil(line / cluster.gpus) * ROUND_S + LOOK_EACH_S
    assert cluster.lost_s <= cluster.occupied_s / (K + 1) + 1e-9


@pytest.mark.parametrize("policy", WILD, ids=lambda p: type(p).__name__)
@given(cluster=clusters(largest=2))
@settings(max_examples=15, deadline=None)
def test_waiting_and_switching_stay_within_their_bounds_with_gangs(
    policy: Policy[Any], cluster: VirtualCluster
) -> None:
    play(guarded(policy, **GUARDS), cluster)
    for waited_s, line in waited(cluster):
        assert waited_s <= PATIENCE_S + line * ROUND_S + LOOK_EACH_S
    assert cluster.lost_s <= cluster.occupied_s / (K + 1) + 1e-9


@dataclass(frozen=True)
class Future:
    """The cluster's future, for the policies that need to know it."""

    cluster: VirtualCluster

    def remaining_s(self, job: Job, now_s: float) -> float:
        trial = self.cluster.trials[job.id]
        return max(0.0, trial.steps * trial.step_s - trial.trained_s)

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
    for waited_s, line in waited(cluster):
        rounds = ceil(line / cluster.gpus) if largest == 1 else line
        assert waited_s <= PATIENCE_S + rounds * ROUND_S + LOOK_EACH_S
    assert cluster.lost_s <= cluster.occupied_s / (K + 1) + 1e-9


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


def longest_wait(policy: Policy[Any]) -> float:
    cluster = three_trials()
    play(policy, cluster)
    return max(waited_s for waited_s, _ in waited(cluster))


def test_without_aging_a_trial_that_does_not_converge_waits_to_the_end() -> None:
    limit_s = PATIENCE_S + 2 * ROUND_S + LOOK_EACH_S
    assert longest_wait(AntiThrash(Hermes(3), K, SWITCH_S)) > 2 * limit_s
    assert PATIENCE_S <= longest_wait(guarded(Hermes(3), **GUARDS)) <= limit_s


def test_without_the_guard_the_contrary_policy_loses_more_than_that() -> None:
    cluster = three_trials()
    play(Contrary(), cluster)
    assert cluster.lost_s > cluster.occupied_s / (K + 1)

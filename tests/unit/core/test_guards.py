"""The two bounds, over simulated runs of any policy, and the repairs in tiny worlds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.guards import Aging, AntiThrash, guarded
from hermes_ops.core.model import (
    Gpu,
    Grant,
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
from hermes_ops.policies.fifo import Fifo
from hermes_ops.policies.hermes import Hermes

K, QUANTA = 3.0, 2
START_S, RESTORE_S, CHECKPOINT_S = 2.0, 1.0, 1.5
SWITCH_S = START_S + RESTORE_S + CHECKPOINT_S
LOOK_EACH_S = 0.5


@dataclass(frozen=True, slots=True)
class Contrary:
    """The worst policy: every round it gives all GPUs to whoever has not got them."""

    name: ClassVar[str] = "contrary"
    preempts: ClassVar[bool] = True

    def initial(self) -> None:
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """It respects nobody: not those that must not be stopped by its own choice of victims."""
        stay = [j for j in snapshot.jobs if j.holds_gpus and not j.preemptible]
        line = [j for j in snapshot.jobs if j.phase in (Phase.PENDING, Phase.WAITING)]
        line += [j for j in snapshot.jobs if j.holds_gpus and j.preemptible]
        free = {g.index for g in snapshot.gpus} - {g for j in stay for g in j.gpus_held}
        grants = [Grant(j.id, j.gpus_held) for j in stay]
        for job in sorted(line, key=lambda j: (j.holds_gpus, j.id)):
            if job.min_gpus <= len(free):
                gpus = tuple(sorted(free)[: job.min_gpus])
                free -= set(gpus)
                grants.append(Grant(job.id, gpus))
        return Plan(tuple(grants)), memory


@dataclass(frozen=True, slots=True)
class Deaf(Contrary):
    """Contrary, and blind to what must not be stopped."""

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        blind = tuple(replace(j, preemptible=True) for j in snapshot.jobs)
        return Contrary().decide(replace(snapshot, jobs=blind), memory)


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


def job(number: int, phase: Phase, **facts: Any) -> Job:
    return Job(JobId(f"s/{number}"), SweepId("s"), 0.0, phase, **facts)


def runs(number: int, gpu: int, started_s: float, **facts: Any) -> Job:
    curve = (Point(1, 1.0, 1.0), Point(2, 0.99, 2.0))
    facts = {"curve": curve, "startup_s": 2.0, "checkpoint_s": 1.0} | facts
    return job(number, Phase.RUNNING, gpus_held=(gpu,), started_s=started_s, **facts)


def world(*jobs: Job, gpus: int = 1, now_s: float = 100.0) -> Snapshot:
    return Snapshot(now_s, tuple(Gpu(i) for i in range(gpus)), jobs)


def granted(policy: Policy[Any], snapshot: Snapshot) -> dict[str, tuple[int, ...]]:
    plan, _ = policy.decide(snapshot, policy.initial())
    check(snapshot, plan)
    return {str(grant.job): grant.gpus for grant in plan.grants}


def test_a_job_is_kept_until_its_start_up_and_k_switches_are_over() -> None:
    snapshot = world(runs(0, 0, started_s=90.0), job(1, Phase.PENDING))
    plan, _ = AntiThrash(Hermes()).decide(snapshot, Hermes().initial())
    assert [grant.job for grant in plan.grants] == ["s/0"]
    assert plan.review_at_s == 101.0  # 90 + 3 x 3 s of training + 2 s of start-up
    assert plan.reasons[JobId("s/0")].text == "kept: 1.0 s of its quantum left"
    assert plan.reasons[JobId("s/0")].runner_up == "s/1"
    assert "s/0 has 1.0 s" in plan.reasons[JobId("s/1")].text
    assert granted(AntiThrash(Hermes()), replace(snapshot, time_s=101.0)) == {"s/1": (0,)}


def test_an_unmeasured_job_takes_the_largest_switch_cost_of_its_sweep() -> None:
    measured = job(5, Phase.ENDED, startup_s=7.0)
    newest = runs(0, 0, started_s=73.0, startup_s=None, checkpoint_s=None)
    snapshot = world(newest, measured, job(1, Phase.PENDING))
    assert granted(AntiThrash(Hermes(), default_switch_s=0.1), snapshot) == {"s/0": (0,)}
    later = replace(snapshot, time_s=101.0)  # 73 + (3 + 1) x 7
    assert granted(AntiThrash(Hermes(), default_switch_s=0.1), later) == {"s/1": (0,)}


def test_who_left_for_a_beneficiary_that_has_to_wait_stays() -> None:
    gang = job(2, Phase.PENDING, min_gpus=2, max_gpus=2)
    snapshot = world(runs(0, 0, started_s=99.0), runs(1, 1, started_s=0.0), gang, gpus=2)
    for policy in (Hermes(), Deaf()):
        assert granted(AntiThrash(policy), snapshot) == {"s/0": (0,), "s/1": (1,)}


def test_another_job_that_fits_takes_the_gpu_that_the_quantum_leaves() -> None:
    gang = job(2, Phase.PENDING, min_gpus=2, max_gpus=2)
    snapshot = world(runs(0, 0, started_s=99.0), gang, job(3, Phase.PENDING), gpus=2)
    assert granted(AntiThrash(Hermes()), snapshot) == {"s/0": (0,), "s/3": (1,)}


def waits(number: int, since_s: float, **facts: Any) -> Job:
    curve = (Point(1, 1.0, 1.0), Point(2, 1.0, 2.0))
    facts = {"startup_s": 2.0, "checkpoint_s": 1.0, "curve": curve} | facts
    return job(number, Phase.WAITING, waiting_since_s=since_s, **facts)


def test_the_job_that_waited_too_long_replaces_the_oldest_segment() -> None:
    fast = runs(0, 0, started_s=10.0), runs(1, 1, started_s=5.0)
    snapshot = world(*fast, waits(2, 4.0), gpus=2)  # 8 quanta of 4 x 3 s = 96 s
    plan, _ = Aging(Hermes()).decide(snapshot, Hermes().initial())
    assert plan.gpus_of(JobId("s/2")) == (1,)
    assert plan.gpus_of(JobId("s/0")) == (0,)
    assert "gives way to s/2" in plan.reasons[JobId("s/1")].text


def test_a_job_that_is_not_due_makes_the_policy_be_asked_again_when_it_is() -> None:
    snapshot = world(runs(0, 0, started_s=10.0), waits(1, 5.0))
    plan, _ = Aging(Hermes()).decide(snapshot, Hermes().initial())
    assert plan.gpus_of(JobId("s/0")) == (0,)
    assert plan.review_at_s == 101.0


def test_the_longest_waiting_is_served_first() -> None:
    snapshot = world(runs(0, 0, started_s=10.0), waits(1, 2.0), waits(2, 1.0))
    assert granted(Aging(Hermes()), snapshot) == {"s/2": (0,)}


def test_aging_leaves_a_job_that_has_not_finished_a_slice() -> None:
    snapshot = world(runs(0, 0, started_s=10.0, steps_at_start=2), waits(1, 1.0))
    assert granted(Aging(Hermes()), snapshot) == {"s/0": (0,)}


def test_an_overdue_gang_reserves_a_gpu_until_the_other_may_be_taken() -> None:
    gang = waits(2, 1.0, min_gpus=2, max_gpus=2)
    snapshot = world(runs(0, 0, started_s=95.0), gang, job(3, Phase.PENDING), gpus=2)
    plan, _ = guarded(Hermes()).decide(snapshot, Hermes().initial())
    assert [grant.job for grant in plan.grants] == ["s/0"]
    assert plan.review_at_s == 106.0
    assert granted(guarded(Hermes()), replace(snapshot, time_s=106.0)) == {"s/2": (0, 1)}


def test_a_gang_that_can_never_fit_beside_a_fixed_job_reserves_nothing() -> None:
    gang = waits(2, 1.0, min_gpus=2, max_gpus=2)
    fixed = runs(0, 0, started_s=0.0, preemptible=False)
    snapshot = world(fixed, gang, job(3, Phase.PENDING), gpus=2)
    assert granted(guarded(Hermes()), snapshot) == {"s/0": (0,), "s/3": (1,)}


def test_a_policy_that_does_not_preempt_is_left_alone() -> None:
    snapshot = world(runs(0, 0, started_s=0.0), waits(1, 1.0))
    plan, _ = guarded(Fifo()).decide(snapshot, None)
    assert [grant.job for grant in plan.grants] == ["s/0"]
    assert plan.review_at_s is None


@pytest.mark.parametrize("k", [-1.0, inf, float("nan")])
def test_a_quantum_that_is_no_time_is_refused(k: float) -> None:
    with pytest.raises(ValueError, match="not negative"):
        guarded(Hermes(), k=k)

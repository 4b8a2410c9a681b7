"""What the guards repair in a plan, in tiny worlds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar

import pytest

from hermes_ops.core.guards import Aging, AntiThrash, Quantum, guarded
from hermes_ops.core.model import Grant, Job, JobId, Phase, Plan, Point, Policy, Snapshot
from hermes_ops.core.plan import check
from hermes_ops.core.sizes import BatchRange
from hermes_ops.policies.fifo import Fifo
from hermes_ops.policies.hermes import Hermes
from tests.builders import job, world
from tests.unit.core.contrary import Deaf


def runs(number: int, gpu: int, started_s: float, **facts: Any) -> Job:
    curve = (Point(1, 1.0, 1.0), Point(2, 0.99, 2.0))
    facts = {"curve": curve, "startup_s": 2.0, "checkpoint_s": 1.0} | facts
    return job(number, Phase.RUNNING, gpus_held=(gpu,), started_s=started_s, **facts)


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


@pytest.mark.parametrize(("back_s", "is_kept"), [(5.0, True), (3_600.0, False)])
def test_a_clock_that_is_set_back_protects_no_job_for_longer_than_another_quantum(
    back_s: float, *, is_kept: bool
) -> None:
    """Its quantum takes 11 s; the clock was set back when it had just begun."""
    started = runs(0, 0, started_s=100.0)
    now = replace(world(started, job(1, Phase.PENDING)), time_s=100.0 - back_s)
    assert granted(AntiThrash(Hermes()), now) == ({"s/0": (0,)} if is_kept else {"s/1": (0,)})
    later = replace(now, time_s=now.time_s + 2 * 11.0)
    assert granted(AntiThrash(Hermes()), later) == {"s/1": (0,)}


def test_an_unmeasured_job_takes_the_largest_switch_cost_of_its_sweep() -> None:
    measured = job(5, Phase.ENDED, startup_s=7.0)
    newest = runs(0, 0, started_s=73.0, startup_s=None, checkpoint_s=None)
    snapshot = world(newest, measured, job(1, Phase.PENDING))
    assert granted(AntiThrash(Hermes(), default_switch_s=0.1), snapshot) == {"s/0": (0,)}
    later = replace(snapshot, time_s=101.0)  # 73 + (3 + 1) x 7
    assert granted(AntiThrash(Hermes(), default_switch_s=0.1), later) == {"s/1": (0,)}


@pytest.mark.parametrize(
    ("measured_s", "quantum_s"), [((), 20.0), ((2.0,), 20.0), ((30.0, 3.0, 40.0), 120.0)]
)
def test_the_first_trials_of_a_sweep_are_protected_as_long_as_those_of_other_sweeps(
    measured_s: tuple[float, ...], quantum_s: float
) -> None:
    """Their median counts: one slow script keeps no other from being stopped."""
    others = [job(f"other{n}/0", Phase.WAITING, startup_s=s) for n, s in enumerate(measured_s)]
    first = job("new/0", Phase.STARTING, gpus_held=(0,), started_s=100.0)
    assert Quantum().ends_s(world(first, *others)) == {first.id: 100.0 + quantum_s}


@pytest.mark.parametrize(
    ("k", "repeat_s", "quantum_s"),
    [(3.0, 0.5, 4 * 5.0 - 1.0), (3.0, 30.0, 4 * 33.0 - 1.0), (0.0, 0.5, 5.0 - 1.0)],
)
def test_a_script_without_the_hook_is_kept_for_what_it_repeats_and_the_default_at_least(
    k: float, repeat_s: float, quantum_s: float
) -> None:
    """Its start-up takes 2 s and its checkpoint 1 s, which comes at the end."""
    snapshot = world(runs(0, 0, started_s=97.0, repeat_s=repeat_s), job(1, Phase.PENDING))
    guarded = AntiThrash(Hermes(), k, default_switch_s=5.0)
    plan, _ = guarded.decide(snapshot, guarded.initial())
    assert plan.review_at_s == 97.0 + quantum_s


def test_a_stop_costs_the_training_that_it_is_expected_to_repeat_once() -> None:
    again = runs(0, 0, started_s=97.0, restore_s=400.0, repeat_s=30.0)
    assert again.switch_s == 33.0
    assert replace(again, repeat_s=None).switch_s == 403.0


@dataclass(frozen=True, slots=True)
class OtherBatch:
    """Gives the running job 64 samples a step, whether it may be restarted or not."""

    name: ClassVar[str] = "other-batch"
    preempts: ClassVar[bool] = True

    def initial(self) -> None:
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        held = snapshot.holding[0]
        return Plan((Grant(held.id, held.gpus_held, batch=64),)), memory


def test_a_job_keeps_its_batch_until_its_quantum_is_over() -> None:
    held = runs(0, 0, started_s=90.0, batch_held=32, batch_range=BatchRange(32, 64))
    policy, snapshot = AntiThrash(OtherBatch()), world(held)
    plan, _ = policy.decide(snapshot, None)
    assert [grant.batch for grant in plan.grants] == [32]
    later, _ = policy.decide(replace(snapshot, time_s=101.0), None)
    assert [grant.batch for grant in later.grants] == [64]


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
    plan, _ = Aging(Hermes(), quanta=8).decide(snapshot, Hermes().initial())
    assert plan.gpus_of(JobId("s/2")) == (1,)
    assert plan.gpus_of(JobId("s/0")) == (0,)
    assert "gives way to s/2" in plan.reasons[JobId("s/1")].text


def test_a_job_that_is_not_due_makes_the_policy_be_asked_again_when_it_is() -> None:
    snapshot = world(runs(0, 0, started_s=10.0), waits(1, 5.0))
    plan, _ = Aging(Hermes(), quanta=8).decide(snapshot, Hermes().initial())
    assert plan.gpus_of(JobId("s/0")) == (0,)
    assert plan.review_at_s == 101.0


def test_the_longest_waiting_is_served_first() -> None:
    snapshot = world(runs(0, 0, started_s=10.0), waits(1, 2.0), waits(2, 1.0))
    assert granted(Aging(Hermes(), quanta=4), snapshot) == {"s/2": (0,)}  # 4 x 2 x 12 s = 96 s


def due_s(*waiting: Job, gpus: int = 1) -> float:
    """When the first of them is of age: 8 rounds of the longest, or of all through the GPUs."""
    running = (runs(n, n, started_s=10.0, preemptible=False) for n in range(gpus - 1))
    last = runs(gpus - 1, gpus - 1, started_s=10.0)
    snapshot = world(*running, last, *waiting, gpus=gpus, now_s=12.0)
    plan, _ = Aging(Hermes(), quanta=8).decide(snapshot, Hermes().initial())
    assert plan.review_at_s is not None
    return plan.review_at_s


def test_who_waits_is_of_age_later_the_more_wait_with_it() -> None:
    assert due_s(waits(8, 5.0)) == 5.0 + 8 * 12.0
    assert due_s(waits(8, 5.0), waits(9, 5.0)) == 5.0 + 8 * 2 * 12.0


def test_who_is_stopping_counts_among_those_who_wait() -> None:
    leaving = job(9, Phase.STOPPING)
    assert due_s(waits(8, 5.0), leaving) == due_s(waits(8, 5.0), waits(9, 5.0))


def test_who_is_stopping_to_end_counts_not_among_those_who_wait() -> None:
    ends = job(9, Phase.STOPPING, resumes=False)
    assert due_s(waits(8, 5.0), ends) == due_s(waits(8, 5.0))


def test_gpus_that_fixed_jobs_hold_serve_nobody_who_waits() -> None:
    assert due_s(waits(8, 5.0), waits(9, 5.0), gpus=3) == 5.0 + 8 * 2 * 12.0


def test_a_slice_that_is_longer_than_the_quantum_is_the_round() -> None:
    long = (Point(1, 1.0, 50.0), Point(2, 1.0, 100.0))
    assert due_s(waits(8, 5.0, curve=long)) == 5.0 + 8 * (3.0 + 50.0)
    both = (waits(8, 5.0), waits(9, 5.0, curve=long))
    assert due_s(*both) == 5.0 + 8 * (12.0 + 53.0)


def test_aging_leaves_a_job_that_has_not_finished_a_slice() -> None:
    snapshot = world(runs(0, 0, started_s=10.0, steps_at_start=2), waits(1, 1.0))
    assert granted(Aging(Hermes(), quanta=8), snapshot) == {"s/0": (0,)}
    sliced = world(runs(0, 0, started_s=10.0, steps_at_start=1), waits(1, 1.0))
    assert granted(Aging(Hermes(), quanta=8), sliced) == {"s/1": (0,)}


def test_an_overdue_gang_reserves_a_gpu_until_the_other_may_be_taken() -> None:
    gang = waits(2, 1.0, min_gpus=2, max_gpus=2)
    snapshot = world(runs(0, 0, started_s=95.0), gang, job(3, Phase.PENDING), gpus=2)
    plan, _ = guarded(Hermes(), quanta=4).decide(snapshot, Hermes().initial())
    assert [grant.job for grant in plan.grants] == ["s/0"]
    assert plan.review_at_s == 106.0
    assert granted(guarded(Hermes(), quanta=4), replace(snapshot, time_s=106.0)) == {"s/2": (0, 1)}


def test_a_gang_that_can_never_fit_beside_a_fixed_job_reserves_nothing() -> None:
    gang = waits(2, 1.0, min_gpus=2, max_gpus=2)
    fixed = runs(0, 0, started_s=0.0, preemptible=False)
    snapshot = world(fixed, gang, job(3, Phase.PENDING), gpus=2)
    assert granted(guarded(Hermes(), quanta=4), snapshot) == {"s/0": (0,), "s/3": (1,)}


def test_a_policy_that_does_not_preempt_is_left_alone() -> None:
    snapshot = world(runs(0, 0, started_s=0.0), waits(1, 1.0))
    plan, _ = guarded(Fifo()).decide(snapshot, None)
    assert [grant.job for grant in plan.grants] == ["s/0"]
    assert plan.review_at_s is None


@pytest.mark.parametrize("k", [-1.0, inf, float("nan")])
def test_a_quantum_that_is_no_time_is_refused(k: float) -> None:
    with pytest.raises(ValueError, match="not negative"):
        guarded(Hermes(), k=k)

"""Hermes in tiny worlds, and what holds in all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.model import Grant, Job, JobId, Phase, Plan, Snapshot
from hermes_ops.core.plan import diff
from hermes_ops.policies.hermes import Hermes
from hermes_ops.policies.hermes.placement import GpuQueues
from tests.builders import job, world


def runs(name: str, *losses: float, gpus: tuple[int, ...] = (0,), **facts: Any) -> Job:
    return job(name, Phase.RUNNING, *losses, gpus_held=gpus, started_s=0.0, **facts)


def waits(name: str, *losses: float, **facts: Any) -> Job:
    return job(name, Phase.WAITING, *losses, **facts)


def decide(snapshot: Snapshot, threshold: int = 2, **queues: tuple[int, ...]) -> Plan:
    memory = GpuQueues(tuple((JobId(j.replace("_", "/")), gpus) for j, gpus in queues.items()))
    plan, _ = Hermes(threshold).decide(snapshot, memory)
    return plan


def granted(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {str(grant.job): grant.gpus for grant in plan.grants}


FAST, MIDDLE, SLOW = (1.0, 0.2), (1.0, 0.6), (1.0, 0.9)


@pytest.mark.parametrize(
    ("what", "jobs", "winner"),
    [
        ("the first is not stopped before its first slice", [runs("s/0", 1.0), job("s/1")], "s/0"),
        ("an unseen one preempts one that was seen", [runs("s/0", *FAST), job("s/1")], "s/1"),
        ("the fastest of three takes over", [runs("s/0", *SLOW), waits("s/1", *FAST)], "s/1"),
        ("a slower one waits", [runs("s/0", *FAST), waits("s/1", *SLOW)], "s/0"),
        ("equal ones do not swap", [runs("s/0", *FAST), waits("s/1", *FAST)], "s/0"),
        (
            "a resumed one keeps the GPU until its next step",
            [runs("s/0", *SLOW, steps_at_start=2), waits("s/1", *FAST)],
            "s/0",
        ),
        (
            "one that cannot checkpoint is never stopped",
            [runs("s/0", *SLOW, preemptible=False), waits("s/1", *FAST)],
            "s/0",
        ),
        (
            "weight multiplies convergence",
            [runs("s/0", *MIDDLE), waits("t/1", *MIDDLE, weight=2.0)],
            "t/1",
        ),
        ("a NaN loss converges at 0", [runs("s/0", 1.0, float("nan")), waits("s/1", *SLOW)], "s/1"),
    ],
)
def test_one_gpu(what: str, jobs: list[Job], winner: str) -> None:
    assert granted(decide(world(*jobs))) == {winner: (0,)}, what


def test_after_each_of_three_was_seen_the_slot_goes_to_the_one_whose_loss_falls_fastest() -> None:
    losses = {"s/0": SLOW, "s/1": FAST, "s/2": MIDDLE}
    order = []
    snapshot = world(*(job(name) for name in losses))
    policy, memory = Hermes(threshold=3), GpuQueues()
    for _ in range(6):
        plan, memory = policy.decide(snapshot, memory)
        (grant,) = plan.grants
        order.append(str(grant.job))
        snapshot = world(*(_after(j, grant, losses[str(j.id)]) for j in snapshot.jobs))
    assert order == ["s/0", "s/1", "s/2", "s/1", "s/1", "s/1"]


def _after(this: Job, grant: Grant, losses: tuple[float, ...]) -> Job:
    """The job after the granted one has run for two steps."""
    if this.id == grant.job:
        return runs(str(this.id), *losses)
    return this if this.phase is Phase.PENDING else waits(str(this.id), *losses)


def test_a_stop_and_a_start_swap_two_trials() -> None:
    snapshot = world(runs("s/0", *SLOW), waits("s/1", *FAST))
    actions = diff(snapshot, decide(snapshot))
    assert [(type(a).__name__, a.job) for a in actions] == [("Stop", "s/0"), ("Start", "s/1")]
    assert "s/1" in actions[0].reason.text


def test_pending_trials_join_the_shortest_queues() -> None:
    plan = decide(world(*(job(f"s/{n}") for n in range(5)), gpus=2))
    assert granted(plan) == {"s/0": (0,), "s/1": (1,)}
    assert plan.ranking[:2] == ("s/2", "s/3")
    assert "queue of each GPU is full" in plan.reasons[JobId("s/4")].text


def test_a_full_pool_opens_nobody() -> None:
    plan = decide(world(runs("s/0", *SLOW), waits("s/1", *SLOW), job("s/2")))
    assert granted(plan) == {"s/0": (0,)}


def test_a_queue_over_the_threshold_counts_against_the_room_in_another() -> None:
    snapshot = world(runs("s/0", *SLOW), job("s/1", Phase.STOPPING, *SLOW), job("s/2"), gpus=2)
    assert granted(decide(snapshot, threshold=1, s_1=(0,))) == {"s/0": (0,)}


def test_a_trial_that_is_stopping_still_counts_as_open() -> None:
    plan = decide(world(job("s/0", Phase.STOPPING, *SLOW), job("s/1"), gpus=1), threshold=1)
    assert granted(plan) == {}


def test_trials_whose_node_has_left_the_pool_keep_no_others_from_being_opened() -> None:
    away = [waits(f"s/{n}", *SLOW, nodes=("elsewhere",)) for n in range(4)]
    plan = decide(world(*away, job("s/7"), job("s/8"), gpus=2))
    assert granted(plan) == {"s/7": (0,), "s/8": (1,)}
    plan = decide(world(*away, job("s/8", min_gpus=2), job("s/9"), gpus=2), threshold=1)
    assert len(granted(plan)) == 1


def test_the_sweep_with_the_smallest_weighted_share_is_next() -> None:
    sweeps = [job(f"s/{n}", weight=1.0) for n in range(6)]
    sweeps += [job(f"t/{n}", weight=2.0) for n in range(6)]
    plan = decide(world(*sweeps, gpus=6), threshold=1)
    assert sorted(granted(plan)) == ["s/0", "s/1", "t/0", "t/1", "t/2", "t/3"]


def test_a_waiting_job_changes_its_queue_rather_than_let_a_gpu_idle() -> None:
    snapshot = world(runs("s/0", *FAST), waits("s/1", *SLOW), gpus=2)
    plan, memory = Hermes().decide(snapshot, GpuQueues(((JobId("s/1"), (0,)),)))
    assert granted(plan) == {"s/0": (0,), "s/1": (1,)}
    assert (JobId("s/1"), (1,)) in memory.places


def test_an_idle_gpu_elsewhere_spares_a_preemption() -> None:
    plan = decide(world(runs("s/0", *SLOW), waits("s/1", *FAST), gpus=2), s_1=(0,))
    assert granted(plan) == {"s/0": (0,), "s/1": (1,)}


def test_each_gpu_serves_its_own_queue() -> None:
    jobs = [runs("s/0", *SLOW), waits("s/1", *FAST), waits("s/2", *MIDDLE)]
    plan = decide(world(*jobs, gpus=2), s_1=(0,), s_2=(1,))
    assert granted(plan) == {"s/1": (0,), "s/2": (1,)}


def gang(name: str, *losses: float) -> Job:
    return waits(name, *losses, min_gpus=2, max_gpus=2)


def test_a_gang_starts_only_when_it_wins_all_its_gpus() -> None:
    faster = runs("s/1", *FAST, gpus=(1,))
    half = world(runs("s/0", *SLOW), faster, gang("s/2", *MIDDLE), gpus=2)
    assert granted(decide(half, s_2=(0, 1))) == {"s/0": (0,), "s/1": (1,)}
    slower = runs("s/1", *SLOW, gpus=(1,))
    whole = world(runs("s/0", *SLOW), slower, gang("s/2", *MIDDLE), gpus=2)
    assert granted(decide(whole, s_2=(0, 1))) == {"s/2": (0, 1)}


def test_two_gangs_that_cross_do_not_block_each_other() -> None:
    snapshot = world(gang("s/0", *SLOW), gang("s/1", *FAST), gpus=3)
    assert granted(decide(snapshot, s_0=(0, 1), s_1=(1, 2))) == {"s/1": (1, 2)}


def test_what_a_preempted_gang_leaves_is_used() -> None:
    running = replace(runs("s/0", *SLOW, gpus=(0, 1)), min_gpus=2, max_gpus=2)
    snapshot = world(running, waits("s/1", *FAST), waits("s/2", *SLOW), gpus=2)
    plan = decide(snapshot, s_1=(0,), s_2=(0,))
    assert granted(plan) == {"s/1": (0,), "s/2": (1,)}


def test_a_gpu_that_left_the_pool_is_forgotten() -> None:
    plan = decide(world(waits("s/1", *FAST), gpus=1), s_1=(7,))
    assert granted(plan) == {"s/1": (0,)}


def test_the_reason_names_numbers_runner_up_and_what_would_change_it() -> None:
    plan = decide(world(runs("s/0", *FAST), waits("s/1", *SLOW)))
    kept, waiting = plan.reasons[JobId("s/0")], plan.reasons[JobId("s/1")]
    assert kept.runner_up == "s/1"
    assert "convergence falling below" in kept.would_change
    assert {t.name for t in kept.terms} >= {"convergence_per_s", "queue_length", "ran_s"}
    assert waiting.runner_up == "s/0"
    assert "s/0" in waiting.would_change


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Snapshot, GpuQueues]:
    """Consistent pools: every GPU held once, gangs among the jobs, any memory."""
    gpus = draw(st.integers(1, 5))
    free = list(range(gpus))
    jobs: list[Job] = []
    places: list[tuple[JobId, tuple[int, ...]]] = []
    for number in range(draw(st.integers(0, 14))):
        size = draw(st.sampled_from([1, 1, 1, 2, 3]))
        phase = draw(st.sampled_from([p for p in Phase if p is not Phase.RUNNING]))
        if len(free) >= size and draw(st.booleans()):
            phase = draw(st.sampled_from([Phase.RUNNING, Phase.RUNNING, Phase.STARTING]))
        holds = phase in (Phase.RUNNING, Phase.STARTING)
        held = tuple(free.pop() for _ in range(size)) if holds and len(free) >= size else ()
        phase = Phase.WAITING if holds and not held else phase
        seen = () if phase is Phase.PENDING else draw(st.lists(st.floats(0, 4), max_size=4))
        this = job(f"s/{number}", phase, *seen, gpus_held=held, min_gpus=size, max_gpus=size)
        jobs.append(replace(this, preemptible=draw(st.booleans())))
        spot = st.lists(st.integers(0, 5), min_size=size, max_size=size, unique=True)
        places.append((this.id, tuple(draw(spot))))
    memory = GpuQueues(tuple(places)) if draw(st.booleans()) else GpuQueues()
    return world(*jobs, gpus=gpus), memory


@given(situation=worlds(), threshold=st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_at_most_t_trials_for_each_gpu_are_open(
    situation: tuple[Snapshot, GpuQueues], threshold: int
) -> None:
    snapshot, memory = situation
    plan, _ = Hermes(threshold).decide(snapshot, memory)
    before = {j.id for j in snapshot.jobs if j.is_open}
    after = before | {grant.job for grant in plan.grants}
    assert len(after) <= max(len(before), threshold * len(snapshot.gpus))


@given(situation=worlds(), threshold=st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_no_gpu_idles_while_a_job_that_fits_waits(
    situation: tuple[Snapshot, GpuQueues], threshold: int
) -> None:
    snapshot, memory = situation
    plan, _ = Hermes(threshold).decide(snapshot, memory)
    idle = len(snapshot.gpus) - sum(len(grant.gpus) for grant in plan.grants)
    granted_ids = {grant.job for grant in plan.grants}
    opened = {j.id for j in snapshot.jobs if j.is_open} | granted_ids
    full = len(opened) >= threshold * len(snapshot.gpus)
    for this in snapshot.jobs:
        may_run = this.phase is Phase.WAITING or (this.phase is Phase.PENDING and not full)
        assert not (may_run and this.id not in granted_ids and this.min_gpus <= idle), this


@given(situation=worlds())
@settings(max_examples=100, deadline=None)
def test_a_decision_that_was_applied_is_changed_by_asking_again_for_new_trials_alone(
    situation: tuple[Snapshot, GpuQueues],
) -> None:
    """A pending trial is placed anew each time: once others have begun, a queue may be shorter."""
    snapshot, memory = situation
    plan, memory = Hermes().decide(snapshot, memory)
    gpus = {grant.job: grant.gpus for grant in plan.grants}
    applied = tuple(_applied(this, gpus.get(this.id, ())) for this in snapshot.jobs)
    again, _ = Hermes().decide(replace(snapshot, jobs=applied), memory)
    now = {grant.job: grant.gpus for grant in again.grants}
    pending = {this.id for this in applied if this.phase is Phase.PENDING}
    taken = {gpu for job_id in pending & now.keys() for gpu in now[job_id]}
    assert all(taken.intersection(held) for _, held in gpus.items() - now.items())


def _applied(this: Job, gpus: tuple[int, ...]) -> Job:
    if gpus and not this.holds_gpus:
        return replace(this, phase=Phase.STARTING, gpus_held=gpus)
    if this.holds_gpus and not gpus:
        return this.as_stopping()
    return this

"""Gandiva in tiny worlds."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_ops.core.guards import AntiThrash
from hermes_ops.core.model import Gpu, Grant, Job, JobId, Phase, Point, Snapshot
from hermes_ops.core.plan import check
from hermes_ops.core.sizes import StepTime
from hermes_ops.policies.gandiva import FEWEST_STEPS, Gandiva, PackedPair, Slices, interfering
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.workload import Work, Workload
from tests.builders import arriving as job

NOW_S = 600.0


def running(number: int, *gpus: int, **facts: Any) -> Job:
    facts = {"gpus_held": gpus, "min_gpus": len(gpus), "started_s": NOW_S} | facts
    return job(number, Phase.RUNNING, **facts)


def decide(*jobs: Job, gpus: str = "2", memory: Slices | None = None) -> tuple[set[Grant], Slices]:
    policy = Gandiva()
    snapshot = Snapshot(NOW_S + 1, layout(gpus), jobs)
    plan, after = policy.decide(snapshot, policy.initial() if memory is None else memory)
    return set(plan.grants), after


def whole(number: int, *gpus: int) -> Grant:
    return Grant(JobId(f"s/{number}"), gpus)


def half(number: int, gpu: int) -> Grant:
    return Grant(JobId(f"s/{number}"), (gpu,), share=0.5)


def test_a_job_of_one_gpu_joins_another_when_there_are_too_many() -> None:
    grants, memory = decide(running(0, 0), job(1), gpus="1")
    assert grants == {half(0, 0), half(1, 0)}
    assert [(pair.first, pair.second) for pair in memory.pairs] == [("s/0", "s/1")]


def test_nobody_shares_while_there_is_room() -> None:
    assert decide(running(0, 0), job(1))[0] == {whole(0, 0), whole(1, 1)}


def test_a_job_of_several_gpus_shares_with_nobody() -> None:
    assert decide(running(0, 0, 1), job(1))[0] == {whole(0, 0, 1)}


def test_no_third_job_joins_a_pair() -> None:
    pair = (running(0, 0, share_held=0.5), running(1, 0, share_held=0.5))
    assert decide(*pair, job(2), gpus="1")[0] == {half(0, 0), half(1, 0)}


def test_whoever_is_left_of_a_pair_has_the_gpu_to_himself() -> None:
    assert decide(running(0, 0, share_held=0.5), gpus="1")[0] == {whole(0, 0)}


def test_one_of_a_pair_moves_to_a_gpu_that_became_free() -> None:
    pair = (running(0, 0, share_held=0.5), running(1, 0, share_held=0.5))
    assert decide(*pair)[0] == {whole(0, 0), whole(1, 1)}


@pytest.mark.parametrize(
    ("may_move", "moved"), [((True, False), "s/0"), ((False, True), "s/1"), ((False, False), None)]
)
def test_a_job_that_must_not_be_stopped_does_not_move_from_its_pair(
    may_move: tuple[bool, bool], moved: str | None
) -> None:
    pair = [
        running(number, 0, share_held=0.5, preemptible=may) for number, may in enumerate(may_move)
    ]
    grants, _ = decide(*pair)
    assert {grant.job for grant in grants if grant.gpus == (1,)} == ({moved} if moved else set())


def test_a_pair_of_which_none_may_be_stopped_is_not_parted_although_it_interferes() -> None:
    pair = [running(number, 0, share_held=0.5, preemptible=False) for number in (0, 1)]
    memory = Slices(apart=((JobId("s/0"), JobId("s/1")),))
    assert decide(*pair, gpus="1", memory=memory)[0] == {half(0, 0), half(1, 0)}


def test_a_pair_within_its_quantum_goes_on_with_half_a_gpu_each() -> None:
    pair = (running(0, 0, share_held=0.5), running(1, 0, share_held=0.5))
    snapshot = Snapshot(NOW_S + 1, layout("2"), pair)
    plan, _ = AntiThrash(Gandiva()).decide(snapshot, Slices())
    check(snapshot, plan)
    assert set(plan.grants) == {half(0, 0), half(1, 0)}


def test_a_job_on_two_nodes_moves_to_one_that_became_free() -> None:
    grants, _ = decide(running(0, 0, 2), running(1, 1), gpus="3x2")
    assert grants == {whole(0, 4, 5), whole(1, 1)}


def test_a_job_on_as_few_nodes_as_it_can_be_stays() -> None:
    assert decide(running(0, 0, 1), gpus="2x2")[0] == {whole(0, 0, 1)}


def curve(steps: int) -> tuple[Point, ...]:
    return tuple(Point(n, 1.0, 10.0 * n) for n in range(1, steps + 1))


def together(steps: int, **facts: Any) -> tuple[Job, Job]:
    known: dict[str, Any] = {
        "share_held": 0.5,
        "curve": curve(steps),
        "step_times": (StepTime(1, 10.0),),
    }
    return running(0, 0, **(known | facts)), running(1, 0, **(known | facts))


@pytest.mark.parametrize(("seconds", "expected"), [(100.0, 0), (101.0, 1)])
def test_a_pair_interferes_when_both_make_fewer_steps_than_one_alone(
    seconds: float, expected: int
) -> None:
    """Each has made 4 steps, with one more under way, of 10 s each alone."""
    pair = PackedPair(JobId("s/0"), JobId("s/1"), NOW_S - seconds, (0, 0))
    snapshot = Snapshot(NOW_S, (Gpu(0),), together(4))
    assert len(interfering(snapshot, [pair])) == expected


def test_a_pair_of_which_little_is_known_is_kept() -> None:
    pair = PackedPair(JobId("s/0"), JobId("s/1"), 0.0, (0, 0))
    few = Snapshot(NOW_S, (Gpu(0),), together(FEWEST_STEPS - 1))
    assert interfering(few, [pair]) == []
    unmeasured = Snapshot(NOW_S, (Gpu(0),), together(9, step_times=()))
    assert interfering(unmeasured, [pair]) == []


def test_an_interfering_pair_is_parted_and_never_joined_again() -> None:
    memory = Slices(pairs=(PackedPair(JobId("s/0"), JobId("s/1"), 0.0, (0, 0)),))
    grants, memory = decide(*together(4), gpus="1", memory=memory)
    assert grants == {whole(0, 0)}
    assert memory.apart == ((JobId("s/0"), JobId("s/1")),)
    waits = job(1, phase=Phase.WAITING, curve=curve(4))
    assert decide(running(0, 0), waits, gpus="1", memory=memory)[0] == {whole(0, 0)}


def test_more_jobs_than_two_a_gpu_take_turns() -> None:
    works = tuple(Work(JobId(f"s/{n}"), 0.0, 300.0) for n in range(4))
    run = simulate(Workload("w", works), layout("1"), Gandiva(slice_s=60.0))
    assert all(outcome.state == "finished" for outcome in run.outcomes)
    begins = {outcome.work.id: outcome.first_start_s for outcome in run.outcomes}
    assert begins == {"s/0": 0.0, "s/1": 0.0, "s/2": 60.0, "s/3": 60.0}
    assert max(outcome.ended_s or 0.0 for outcome in run.outcomes) == pytest.approx(1_200.0)

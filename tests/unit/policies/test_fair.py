"""Fair time-sharing in tiny worlds."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_ops.core.model import JobId, Phase, Point
from hermes_ops.policies.fair import Fair
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.workload import Costs, SimulationRun, Work, Workload
from tests import builders


def work(number: int, seconds: float, gpus: int = 1, **facts: Any) -> Work:
    known: dict[str, Any] = {"submitted_s": 0.0} | facts
    return Work(JobId(f"s/{number}"), seconds=seconds, gpus=gpus, **known)


def run(*works: Work, gpus: str = "1", **parameters: Any) -> SimulationRun:
    return simulate(Workload("w", works), layout(gpus), Fair(**parameters))


def turns(of: SimulationRun) -> list[tuple[str, float]]:
    return [(segment.job, segment.begin_s) for segment in of.segments]


def test_two_jobs_take_turns_of_one_quantum() -> None:
    found = turns(run(work(0, 20.0), work(1, 20.0), quantum_s=10.0))
    assert found == [("s/0", 0.0), ("s/1", 10.0), ("s/0", 20.0), ("s/1", 30.0)]


def test_a_job_of_twice_the_weight_has_two_quanta_a_round() -> None:
    found = turns(run(work(0, 60.0), work(1, 60.0, weight=2.0), quantum_s=10.0))
    assert found[:4] == [("s/0", 0.0), ("s/1", 10.0), ("s/0", 30.0), ("s/1", 40.0)]


def test_a_late_job_joins_the_present_round() -> None:
    found = turns(
        run(work(0, 100.0), work(1, 100.0), work(2, 30.0, submitted_s=40.0), quantum_s=10.0)
    )
    late = [begin for job, begin in found if job == "s/2"]
    assert late == [60.0, 90.0, 120.0]


def test_a_job_of_several_gpus_gets_its_turn_among_small_ones() -> None:
    small = [work(n, 100.0) for n in range(1, 5)]
    found = run(work(0, 20.0, gpus=2), *small, gpus="2", quantum_s=10.0)
    wide = [segment.begin_s for segment in found.segments if segment.job == "s/0"]
    assert wide == [0.0, 30.0]


def test_a_small_switch_cost_does_not_change_whose_turn_it_is() -> None:
    costs = Costs(startup_s=0.4, checkpoint_s=0.3)
    jobs = [work(n, 30.0, costs=costs) for n in range(3)]
    order = [job for job, _ in turns(run(*jobs, quantum_s=10.0))]
    assert order[:6] == ["s/0", "s/1", "s/2"] * 2


def test_nobody_is_stopped_while_all_fit() -> None:
    found = run(work(0, 100.0), work(1, 100.0), gpus="2", quantum_s=10.0)
    assert len(found.segments) == 2
    assert found.decisions < 6


def curve(steps: int, step_s: float) -> tuple[Point, ...]:
    return tuple(Point(n, 1.0 / n, n * step_s) for n in range(1, steps + 1))


def test_slices_of_one_step_are_round_robin_by_epoch_whatever_an_epoch_takes() -> None:
    slow = work(0, 30.0, curve=curve(3, 10.0))
    fast = work(1, 6.0, curve=curve(3, 2.0))
    found = turns(run(slow, fast, quantum_steps=1))
    assert found == [
        ("s/0", 0.0),
        ("s/1", 10.0),
        ("s/0", 12.0),
        ("s/1", 22.0),
        ("s/0", 24.0),
        ("s/1", 34.0),
    ]


def test_with_slices_of_steps_small_jobs_do_not_overtake_a_wide_one_for_ever() -> None:
    small = [work(n, 40.0, curve=curve(10, 4.0 + n)) for n in range(1, 5)]
    wide = work(5, 20.0, gpus=2, curve=curve(2, 10.0), submitted_s=1.0)
    found = run(*small, wide, gpus="2", quantum_steps=1)
    assert min(begin for job, begin in turns(found) if job == "s/5") < 20.0


def test_jobs_that_find_no_room_on_their_node_hold_no_gpus_back() -> None:
    bound = [builders.job(n, Phase.WAITING, 1.0, nodes=("elsewhere",)) for n in (0, 1)]
    others = [builders.job(n, Phase.WAITING, 1.0, 0.9) for n in (2, 3, 4)]
    snapshot = builders.world(*bound, *others, gpus=3)
    policy = Fair(quantum_steps=1)
    plan, _ = policy.decide(snapshot, policy.initial())
    assert builders.granted(plan) == ["s/2", "s/3", "s/4"]


@pytest.mark.parametrize(
    "parameters", [{"quantum_s": 0.0}, {"quantum_s": "1"}, {"quantum_steps": 0}]
)
def test_impossible_quanta_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="quantum"):
        Fair(**parameters)

"""What jobs have measured, shared by kind; the work that is left."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_ops.core.model import Gpu, Job, Phase, Point, Snapshot
from hermes_ops.core.sizes import StepTime
from hermes_ops.policies.toolbox.job_speeds import MeasuredSpeeds, packed, steps_to_convergence
from hermes_ops.policies.toolbox.planned_sizes import widened
from tests import builders


def job(name: str, **facts: Any) -> Job:
    return builders.job(name, Phase.WAITING, **({"max_gpus": 8} | facts))


def snapshot(*jobs: Job, gpus: int = 8, each: int = 4) -> Snapshot:
    return Snapshot(0.0, tuple(Gpu(n, f"node-{n // each}") for n in range(gpus)), jobs)


def curve(steps: int, bottom: float = 0.5) -> tuple[Point, ...]:
    return tuple(Point(k, 1 / (0.5 * k + 1) + bottom, float(k)) for k in range(1, steps + 1))


def test_jobs_of_a_model_share_their_measured_speeds() -> None:
    seen = job("s/1", model_name="vgg", step_times=(StepTime(1, 2.0), StepTime(2, 1.0)))
    other, alien = job("s/2", model_name="vgg"), job("s/3", model_name="bert")
    speeds = MeasuredSpeeds(snapshot(seen, other, alien))
    assert speeds.speed(other, 4) == pytest.approx(2.0)
    assert speeds.speed(alien, 4) == 4.0


def test_a_larger_batch_on_more_gpus_is_more_work_a_step() -> None:
    times = (StepTime(1, 1.0, local_batch=32), StepTime(4, 1.0, local_batch=32))
    speeds = MeasuredSpeeds(snapshot(seen := job("s/1", step_times=times)))
    assert speeds.speed(seen, 4) == pytest.approx(4 * speeds.speed(seen, 1))


def test_what_is_left_are_the_steps_to_the_end() -> None:
    speeds = MeasuredSpeeds(snapshot(one := job("s/1", total_steps=10, curve=curve(4))))
    assert speeds.left(one) == 6.0


def test_a_job_without_an_end_has_as_much_left_as_it_has_done() -> None:
    speeds = MeasuredSpeeds(snapshot(one := job("s/1", curve=curve(2))))
    assert speeds.left(one) == 2.0


def test_a_curve_converges_later_the_shorter_it_is() -> None:
    early, late = (steps_to_convergence(job("s/1", curve=curve(n))) for n in (6, 60))
    assert early is not None
    assert late is not None
    assert early > late == 0.0


def test_packed_gpus_are_on_as_few_nodes_as_possible() -> None:
    world = snapshot(gpus=12, each=4)
    assert [packed(world, gpus) for gpus in (3, 4, 6, 12)] == [(3,), (4,), (4, 2), (4, 4, 4)]


def test_who_gains_most_is_widened_until_nothing_fits() -> None:
    first, second = job("s/1"), job("s/2")
    gains = {first.id: 1.0, second.id: 2.0}
    sizes = widened((first, second), 8, lambda j, size, _: gains[j.id] / size**2)
    assert sizes == {first.id: 4, second.id: 4}
    assert widened((first, second), 7, lambda j, size, _: gains[j.id] / size**2) == {
        first.id: 2,
        second.id: 4,
    }
    assert widened((first, second), 1, lambda *_: 1.0) == {first.id: 1}


def test_who_gains_nothing_keeps_its_least_size() -> None:
    assert widened((one := job("s/1"),), 8, lambda *_: 0.0) == {one.id: 1}


def test_a_list_of_sizes_is_doubled_to_the_next_size_of_at_least_twice_as_many() -> None:
    one = job("s/1", min_gpus=2, max_gpus=7, sizes=(2, 3, 5, 7))
    assert widened((one,), 8, lambda *_: 1.0) == {one.id: 5}

"""Recorded sweeps whose trials may take several GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_ops.core.wrapper import OneSize
from hermes_ops.errors import ConfigError
from hermes_ops.policies import make_policy
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.metrics import time_to_best_s
from hermes_ops.simulator.sized_trials import SizedSweepSource, parse_sizes
from hermes_ops.simulator.workload_source import CurvesSource

EXAMPLES = Path(__file__).parents[3] / "examples"
SWEEPS = CurvesSource(EXAMPLES / "curves" / "lcbench_adult.npz", trials=4)
STEPS = EXAMPLES / "elastic"


def source(*sizes: int, batch: int | None = None) -> SizedSweepSource:
    return SizedSweepSource(SWEEPS, STEPS, sizes, batch)


def test_a_trial_is_faster_on_more_gpus_by_the_ratio_of_measured_steps() -> None:
    (one, *_), (two, *_) = SWEEPS.draw(3).workload.jobs, source(1, 2).draw(3).workload.jobs
    assert two.training is not None
    assert two.training.pace((1,), 0, None).rate == 1.0
    on_two = two.training.pace((2,), 0, None)
    assert on_two.rate == pytest.approx(0.10304 / 0.06547, rel=1e-3)
    assert two.curve == one.curve
    assert on_two.step is not None
    assert on_two.step.seconds == pytest.approx(one.seconds / 51 / on_two.rate)


def test_with_one_gpu_a_sweep_runs_as_without_sizes() -> None:
    plain, sized = SWEEPS.draw(0).workload, source(1).draw(0).workload
    policy = make_policy("frontrunner", {})
    found = [time_to_best_s(simulate(w, layout("2"), policy)) for w in (plain, sized)]
    assert found[0] == pytest.approx(found[1])


def test_a_policy_of_one_size_gives_each_trial_the_smallest() -> None:
    workload = source(2, 4).draw(0).workload
    run = simulate(workload, layout("4"), OneSize(make_policy("fifo", {})))
    assert {len(segment.gpus) for segment in run.segments} == {2}


def test_a_larger_batch_scales_better() -> None:
    def rate(batch: int) -> float:
        training = source(1, 4, batch=batch).draw(0).workload.jobs[0].training
        assert training is not None
        return training.pace((4,), 0, None).rate

    assert rate(128) < 2 < 3 < rate(512)


@pytest.mark.parametrize(("sizes", "batch"), [((1, 64), None), ((1, 2), 100_000)])
def test_a_size_without_a_step_time_is_refused(sizes: tuple[int, ...], batch: int | None) -> None:
    with pytest.raises(ConfigError, match="no step time"):
        source(*sizes, batch=batch).draw(0)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("2", (2,)), ("1-4", (1, 2, 3, 4)), ("4,1,2", (1, 2, 4)), ("1-2,4", (1, 2, 4))],
)
def test_sizes_are_a_number_a_range_or_a_list(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "3-2", "-1", "x", "1-", "1,,2"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|is no range"):
        parse_sizes(text)

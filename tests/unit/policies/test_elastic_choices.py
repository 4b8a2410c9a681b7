"""The values that elastic-frontrunner gives to the sizes of jobs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, Job, JobId, Phase, Snapshot, SweepId
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.policies.elastic_frontrunner.choices import Choice, Choices, Valuation
from hermes_ops.policies.elastic_frontrunner.finish_guard import Paces
from hermes_ops.policies.elastic_frontrunner.kinds import Progress, learn_kinds
from hermes_ops.policies.toolbox.sized_grants import SizingProblem
from tests.builders import curve

pytestmark = pytest.mark.law

NOW_S = 1_000.0
RANGES = (None, BatchRange(32, 4096, 16, 256), BatchRange(64, 512))
MEASURED = (StepTime(1, 1.0, 1, 64, 0.9), StepTime(4, 1.4, 1, 64, 0.9), StepTime(8, 1.9, 2, 64))
UNSIZED = (StepTime(1, 1.0), StepTime(2, 0.6))


def valuation(*jobs: Job, weight: float = 0.35) -> Valuation:
    pool = tuple(Gpu(index, f"node-{index // 4}") for index in range(32))
    problem = SizingProblem.from_snapshot(Snapshot(NOW_S, pool, jobs))
    before = {job.id: Progress(30.0, 900.0, 0.5, 950.0) for job in jobs if job.curve}
    kinds = learn_kinds(problem.snapshot, {}, {})
    paces = Paces.from_snapshot(problem.snapshot)
    return Valuation(problem, kinds, before, paces.left_s, weight, 4.0, 30.0)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Job, ...]:
    """Draw jobs of few kinds, of which many differ in their service and noise alone."""
    made, free = [], 0
    for number in range(draw(st.integers(1, 8))):
        held = draw(st.sampled_from((0, 0, 1, 2)))
        begun = bool(held) or draw(st.booleans())
        least = draw(st.sampled_from((1, 1, 2))) if held != 1 else 1
        facts: dict[str, Any] = {
            "gpus_held": tuple(range(free, free + held)),
            "min_gpus": least,
            "max_gpus": draw(st.sampled_from((2, 8, 16))),
            "batch_range": draw(st.sampled_from(RANGES)),
            "model_name": draw(st.sampled_from(("net", "other"))),
            "total_steps": draw(st.sampled_from((None, 9))),
            "nodes": draw(st.sampled_from(((), (), ("node-0",)))) if not held else (),
        }
        if begun:
            facts["service_gpu_s"] = draw(st.floats(0.0, 9_000.0))
            facts["noise_scale"] = draw(st.sampled_from((None, 10.0, 400.0, 5_000.0)))
            facts["curve"] = curve(3.0, 2.0) if draw(st.booleans()) else ()
            facts["step_times"] = draw(st.sampled_from(((), MEASURED, UNSIZED)))
            facts["startup_s"] = draw(st.sampled_from((None, 5.0)))
        phase = Phase.RUNNING if held else Phase.WAITING if begun else Phase.PENDING
        made.append(Job(JobId(f"t/{number}"), SweepId("t"), float(number), phase, **facts))
        free += held
    return tuple(made)


def row(choices: Choices, choice: Choice) -> tuple[object, ...]:
    tables = choices.sizes, choices.values, choices.rates, choices.nodes, choices.batches
    return (
        choice.left_s,
        choice.alone_s,
        *(table[choice.row, : len(choice.sizes)].tolist() for table in tables),
    )


@given(jobs())
def test_jobs_valued_together_have_the_values_that_each_has_alone(some: tuple[Job, ...]) -> None:
    value = valuation(*some)
    together = value.choices(some)
    for job, choice in zip(some, together.of_jobs, strict=True):
        alone = value.choices([job])
        assert row(together, choice) == row(alone, alone.of_jobs[0])
        assert list(choice.sizes) == together.sizes[choice.row, : len(choice.sizes)].tolist()


def test_the_value_of_a_size_is_speed_up_times_a_power_of_the_hours_less_what_a_move_costs() -> (
    None
):
    times = (StepTime(1, 1.0), StepTime(2, 0.5))
    facts: dict[str, Any] = {"model_name": "net", "max_gpus": 2, "step_times": times}
    one = Job(JobId("a"), SweepId("t"), 0.0, Phase.RUNNING, (0,), service_gpu_s=7_200.0, **facts)
    choices = valuation(one, weight=0.5).choices([one])
    hours = 2.0
    moved = 3_600.0 / (3_600.0 + 4.0 * 30.0)
    expected = [0.0, hours**-0.5, 2.0 * hours**-0.5 * moved]
    assert choices.values[0].tolist() == pytest.approx(expected)


def test_no_jobs_have_no_choices() -> None:
    choices = valuation().choices([])
    assert choices.best(choices.of_jobs, 4) == {}

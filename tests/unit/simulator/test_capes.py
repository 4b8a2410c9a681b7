"""The workload of Capes et al., and its policies on it."""

from __future__ import annotations

from statistics import fmean

import pytest

from hermes_ops.simulator.capes_workload import CONTENTION, STEPS, CapesSource
from hermes_ops.simulator.comparison import Contender
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.published_workloads import published_workload
from hermes_ops.simulator.workload import SimulationRun


def run(policy: str, contention: str, seed: int, gpus: int = 8, **options: object) -> SimulationRun:
    draw = CapesSource(contention, gpus).draw(seed)
    contender = Contender(policy, tuple(options.items()))
    return simulate(draw.workload, layout("8x8"), contender.make(draw))


def hours(policy: str, contention: str, seed: int, gpus: int = 8, **options: object) -> float:
    outcomes = run(policy, contention, seed, gpus, **options).outcomes
    return fmean(o.completion_s or 0.0 for o in outcomes) / 3_600


@pytest.mark.parametrize("contention", CONTENTION)
def test_there_are_as_many_jobs_as_in_the_paper_at_its_mean_gap(contention: str) -> None:
    gap_s, number = CONTENTION[contention]
    draws = [CapesSource(contention).draw(seed).workload.jobs for seed in range(20)]
    assert {len(jobs) for jobs in draws} == {number}
    assert fmean(jobs[-1].submitted_s / number for jobs in draws) == pytest.approx(gap_s, rel=0.05)


def test_unequal_jobs_have_the_work_of_equal_ones_and_their_arrivals() -> None:
    equal = CapesSource("extreme").draw(3).workload.jobs
    unequal = CapesSource("extreme", unequal=True).draw(3).workload.jobs
    assert sum(work.seconds for work in unequal) == pytest.approx(len(equal))
    assert [work.submitted_s for work in unequal] == [work.submitted_s for work in equal]
    assert max(w.seconds for w in unequal) > 8 * min(w.seconds for w in unequal)


def test_a_curve_ends_with_its_job() -> None:
    for work in CapesSource("none", unequal=True).draw(0).workload.jobs:
        assert work.curve[-1].seconds == pytest.approx(work.seconds)
        assert work.curve[-1].step == work.total_steps
        assert work.total_steps == pytest.approx(STEPS * work.seconds, abs=1)


@pytest.mark.parametrize("name", ["capes-extreme", "capes-moderate-unequal", "capes-none-two"])
def test_a_workload_has_the_name_that_it_is_known_by(name: str, tmp_path: object) -> None:
    known = published_workload(name)
    assert known.layout == "8x8"
    assert known.make(tmp_path, 1.0).name == name  # type: ignore[arg-type]


@pytest.mark.parametrize(("gpus", "expected"), [(8, 1.40), (4, 2.21), (2, 3.78), (1, 6.37)])
def test_a_job_of_fixed_size_alone_takes_the_hours_of_the_paper(gpus: int, expected: float) -> None:
    outcomes = run("fifo", "none", 0, gpus).outcomes
    fastest_s = min(o.completion_s or 0.0 for o in outcomes)
    assert fastest_s / 3_600 == pytest.approx(expected, abs=1e-6)


def test_doubling_has_the_greatest_figure_of_an_independent_program_on_the_seed_of_it() -> None:
    assert hours("doubling", "none", 7) == pytest.approx(1.66, abs=0.005)


def test_a_job_that_explores_alone_takes_the_hours_of_the_paper() -> None:
    outcomes = run("doubling", "none", 0, explore=True).outcomes
    fastest_s = min(o.completion_s or 0.0 for o in outcomes)
    assert fastest_s / 3_600 == pytest.approx(1.474, abs=0.01)  # restarts cost 3 x 10 s


@pytest.mark.law
def test_throughput_ends_sooner_than_doubling() -> None:
    assert hours("throughput", "moderate", 31) < hours("doubling", "moderate", 31)

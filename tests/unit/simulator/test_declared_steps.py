"""Jobs of a trace whose batch may be chosen: their cell, their pace, and policies that choose."""

from __future__ import annotations

from math import inf
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.sizes import BatchRange
from hermes_ops.errors import ConfigError
from hermes_ops.simulator.comparison import Contender
from hermes_ops.simulator.declared_steps import DeclaredStep, DeclaredSteps, parse_steps
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.metrics import measure
from hermes_ops.simulator.traces import read_trace
from hermes_ops.simulator.workload import SimulationRun, Work, Workload
from hermes_ops.simulator.workload_source import DrawnWorkload

HEADER = "job_id,submit_time_s,num_gpus,duration_s,model,batch_size,step_times,noise_scale"
STEPS = "1x32:0.1 1x256:0.4 2x32:0.08 2x256:0.25"


def written(folder: Path, *rows: str, header: str = HEADER) -> Path:
    path = folder / "mine.csv"
    path.write_text("\n".join((header, *rows, "")))
    return path


def only_job(folder: Path, row: str) -> Work:
    (work,) = read_trace(written(folder, row)).jobs
    return work


def refusal(folder: Path, row: str, header: str = HEADER) -> str:
    with pytest.raises(ConfigError) as caught:
        read_trace(written(folder, row, header=header))
    (problem,) = caught.value.problems
    return str(problem)


def model_of(work: Work) -> DeclaredSteps:
    assert isinstance(work.training, DeclaredSteps)
    return work.training


@st.composite
def tables(draw: st.DrawFn) -> tuple[DeclaredStep, ...]:
    """Draw the steps of some sizes: on each the same two ends, and some batches between them."""
    sizes = draw(st.sets(st.integers(1, 16), min_size=1, max_size=4))
    least = draw(st.integers(max(sizes), 64))
    most = draw(st.integers(least, 4096))
    steps = []
    for gpus in sizes:
        between = draw(st.sets(st.integers(least, most), max_size=3))
        for batch in {least, most} | between:
            seconds = draw(st.floats(1e-6, 1e6, allow_nan=False))
            steps.append(DeclaredStep(gpus, batch, seconds))
    return tuple(sorted(steps))


@st.composite
def models(draw: st.DrawFn) -> DeclaredSteps:
    """Draw a model; its request is one of the declared steps."""
    steps = draw(tables())
    request = draw(st.sampled_from(steps))
    noise = draw(st.none() | st.floats(0, 1e9))
    return DeclaredSteps(steps, request.gpus, request.batch, noise)


@given(steps=tables(), order=st.randoms())
def test_a_cell_is_read_as_the_steps_that_it_was_written_from_in_any_order(
    steps: tuple[DeclaredStep, ...], order: Random
) -> None:
    entries = [f"{step.place}:{step.seconds!r}" for step in steps]
    order.shuffle(entries)
    assert parse_steps("  ".join(entries)) == steps


@given(model=models())
def test_a_job_trains_as_declared_at_each_declared_step_and_at_pace_1_as_requested(
    model: DeclaredSteps,
) -> None:
    assert model.pace((model.gpus,), 0, model.batch).rate == 1.0
    for gpus, batch, seconds in model.steps:
        pace = model.pace((gpus,), 0, batch)
        assert (pace.batch, pace.step_s) == (batch, seconds)
        assert model.batch_range.allows(batch, gpus)


@given(model=models(), data=st.data())
def test_a_step_between_two_declared_batches_takes_seconds_between_theirs(
    model: DeclaredSteps, data: st.DataObject
) -> None:
    gpus = data.draw(st.sampled_from(model.sizes))
    batch = data.draw(st.integers(model.batch_range.initial, model.batch_range.most))
    own = [step for step in model.steps if step.gpus == gpus]
    below = max((s for s in own if s.batch <= batch), key=lambda s: s.batch)
    above = min((s for s in own if s.batch >= batch), key=lambda s: s.batch)
    low, high = sorted((below.seconds, above.seconds))
    assert low * (1 - 1e-9) <= model.seconds(gpus, batch) <= high * (1 + 1e-9)


@given(model=models(), data=st.data())
def test_a_job_that_may_choose_is_never_slower_than_with_another_declared_batch(
    model: DeclaredSteps, data: st.DataObject
) -> None:
    gpus = data.draw(st.sampled_from(model.sizes))
    own = model.pace((gpus,), 0, None)
    if model.noise is None:
        assert own == model.pace((gpus,), 0, model.batch)
    else:
        rates = [model.pace((gpus,), 0, s.batch).rate for s in model.steps if s.gpus == gpus]
        assert own.rate == max(rates)


@given(model=models(), noise=st.floats(0, 1e9), more=st.floats(0, 1e9))
def test_a_larger_batch_gains_the_more_the_noisier_the_gradients_and_at_most_its_samples(
    model: DeclaredSteps, noise: float, more: float
) -> None:
    least, most = model.batch_range.initial, model.batch_range.most

    def gain(scale: float | None) -> float:
        own = DeclaredSteps(model.steps, model.gpus, least, scale)
        seconds = own.seconds(model.gpus, most) / own.seconds(model.gpus, least)
        return own.pace((model.gpus,), 0, most).rate * seconds

    assert gain(0.0) == pytest.approx(1.0)
    assert gain(noise) <= gain(noise + more) * (1 + 1e-9)
    assert gain(noise + more) <= gain(None) * (1 + 1e-9)
    assert gain(None) == pytest.approx(most / least)


def test_a_row_gives_sizes_batches_steps_noise_and_its_request(tmp_path: Path) -> None:
    work = only_job(tmp_path, f"a,0,2,100,net,64,{STEPS},500")
    model = model_of(work)
    assert (work.gpus, work.batch, work.alone_s) == (2, 64, 100.0)
    assert (model.sizes, model.batch_range) == ((1, 2), BatchRange(32, 256))
    assert (model.noise_scale(0), work.configuration) == (500.0, ())
    assert [(t.gpus, t.local_batch) for t in work.step_times] == [
        (1, 32), (1, 256), (2, 16), (2, 128),
    ]  # fmt: skip
    assert model_of(only_job(tmp_path, f"a,0,2,100,net,64,{STEPS},")).noise_scale(0) is None


@pytest.mark.parametrize(
    ("cell", "found", "fix"),
    [
        ("32:0.1", "'32:0.1'", "correct the entry"),
        ("1x32:fast", "'1x32:fast'", "correct the entry"),
        ("1x32:1.2.3", "'1x32:1.2.3'", "correct the entry"),
        ("0x32:1", "'0x32:1'", "correct the entry"),
        ("1x32:0", "'1x32:0'", "correct the seconds"),
        ("1x32:-1", "'1x32:-1'", "correct the seconds"),
        ("1x32:1e999", "'1x32:1e999'", "correct the seconds"),
        ("1x32:1 1x32:2", "1x32 twice", "remove one of them"),
        ("1x32:1 1x64:2 2x32:1", "no 2x64", "add what lacks"),
        ("1x32:1 2x64:2 2x48:1", "no 1x64", "add what lacks"),
        ("1x32:1 2x48:1 1x64:1", "no 2x32 and no 2x64", "add what lacks"),
        ("1x2:1 4x2:1", "a batch of 2 on 4 GPUs", "raise the least batch"),
        ("2x32:1", "no entry of 1 GPUs", "add its entries, or correct num_gpus"),
    ],
)
def test_a_cell_of_steps_that_no_job_can_have_is_refused_once_with_place_and_remedy(
    tmp_path: Path, cell: str, found: str, fix: str
) -> None:
    problem = refusal(tmp_path, f"a,0,1,100,net,32,{cell},")
    assert problem.startswith(f"line 2, step_times: found {found}; allowed: ")
    assert fix in problem


@pytest.mark.parametrize("batch", ["", "31", "257", "x", "1e2", "9" * 5000])
def test_a_requested_batch_outside_the_steps_is_refused_with_the_batches(
    tmp_path: Path, batch: str
) -> None:
    problem = refusal(tmp_path, f"a,0,1,100,net,{batch},{STEPS},")
    found = f"line 2, batch_size: found '{batch}'; allowed: a whole number from 32 to 256"
    assert problem.startswith(found)


@pytest.mark.parametrize("noise", ["x", "-1", "inf", "nan"])
def test_a_noise_scale_below_0_or_without_end_is_refused(tmp_path: Path, noise: str) -> None:
    problem = refusal(tmp_path, f"a,0,1,100,net,32,{STEPS},{noise}")
    assert problem.startswith(f"line 2, noise_scale: found '{noise}'; allowed: a number of at")


@pytest.mark.parametrize("noise", ["500", "x"])
def test_a_noise_scale_without_steps_is_refused(tmp_path: Path, noise: str) -> None:
    problem = refusal(tmp_path, f"a,0,1,100,net,32,,{noise}")
    assert problem.startswith(f"line 2, noise_scale: found '{noise}'; allowed: nothing without")


def test_steps_and_speed_ups_of_one_job_are_refused(tmp_path: Path) -> None:
    problem = refusal(tmp_path, f"a,0,1,100,net,32,{STEPS},,1:1 2:2", f"{HEADER},speed_ups")
    assert problem.startswith("line 2, speed_ups: found a cell beside step_times")


def run(workload: Workload, gpus: str, policy: str, **options: object) -> SimulationRun:
    contender, drawn = Contender(policy, tuple(options.items())), DrawnWorkload(workload)
    return simulate(workload, layout(gpus), contender.make(drawn))


def trained_s(workload: Workload, gpus: str, policy: str, **options: object) -> list[float]:
    """Return the seconds from the first start of each job to its end."""
    outcomes = run(workload, gpus, policy, **options).outcomes
    return [(o.ended_s or 0.0) - (o.first_start_s or 0.0) for o in outcomes]


@pytest.mark.parametrize("policy", ["saxena", "elastic-frontrunner"])
def test_a_policy_that_chooses_the_batch_beats_the_requested_one_on_the_same_gpu(
    tmp_path: Path, policy: str
) -> None:
    """A GPU does 256 samples in 0.4 s and 32 in 0.1 s: twice as many a second."""
    rows = (f"{n},{n},1,100,net,32,1x32:0.1 1x256:0.4," for n in range(2))
    workload = read_trace(written(tmp_path, *rows))
    assert trained_s(workload, "2", policy) == pytest.approx([50.0, 50.0])
    assert trained_s(workload, "2", "fifo") == [100.0, 100.0]
    assert trained_s(workload, "2", "saxena", batch="least") == [100.0, 100.0]


@pytest.mark.parametrize("policy", ["pollux", "ones", "elastic-frontrunner"])
def test_a_job_that_knows_its_noise_takes_the_batch_of_the_greatest_progress(
    tmp_path: Path, policy: str
) -> None:
    """At a noise scale of 224 a sample of 256 makes (224 + 32) / (224 + 256) of the progress."""
    row = "a,0,1,160,net,32,1x32:0.1 1x256:0.4,224"
    workload = read_trace(written(tmp_path, row))
    assert trained_s(workload, "1", policy) == pytest.approx([160 / (2 * 256 / 480)])
    assert trained_s(workload, "1", "fifo") == [160.0]


def test_without_noise_a_larger_batch_is_a_loss_that_saxena_does_not_see(tmp_path: Path) -> None:
    workload = read_trace(written(tmp_path, "a,0,1,100,net,32,1x32:0.1 1x256:0.4,0"))
    assert trained_s(workload, "1", "saxena") == pytest.approx([400.0])
    assert trained_s(workload, "1", "pollux") == [100.0]


def test_ones_lets_the_batch_grow_with_the_gpus(tmp_path: Path) -> None:
    """On two GPUs 32 samples take 0.8 of the time, 64 more but not twice as much."""
    workload = read_trace(written(tmp_path, f"a,0,1,4000,net,32,{STEPS},"))
    (seconds,) = trained_s(workload, "2", "ones")
    assert seconds < 4000 * 0.8


@pytest.mark.parametrize("policy", ["saxena", "pollux", "elastic-frontrunner"])
def test_jobs_of_the_example_complete_sooner_under_a_policy_that_chooses(policy: str) -> None:
    folder = Path(__file__).parents[3] / "examples" / "traces"
    workload = read_trace(folder / "batches.csv")
    chosen, requested = (measure(run(workload, "8", name)) for name in (policy, "fifo"))
    assert chosen.finished == requested.finished == len(workload.jobs)
    assert (chosen.mean_completion_seconds or inf) < 0.9 * (requested.mean_completion_seconds or 0)

"""Pollux' published workloads: files, speeds, and completion times to the second."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from hermes_ops.core.wrapper import OneSize
from hermes_ops.errors import ConfigError
from hermes_ops.policies import make_policy
from hermes_ops.simulator.comparison import Contender, simulate_seed
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.pollux_data import read_pollux
from hermes_ops.simulator.pollux_workload import PolluxSource, isolated, workload_numbers
from hermes_ops.simulator.published_workloads import WORKLOADS

DATA = Path(__file__).parents[3] / "examples" / "elastic"


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "row", rows("pollux_isolated_jct.csv"), ids=lambda row: "-".join(row.values())
)
def test_a_job_alone_ends_at_the_second_that_was_computed_independently(
    row: dict[str, str],
) -> None:
    workload = isolated(row["application"], int(row["gpus"]), int(row["batch"]), DATA)
    (outcome,) = simulate(workload, layout("16x4"), OneSize(make_policy("fifo", {}))).outcomes
    assert outcome.completion_s == float(row["jct_s"])


def test_the_public_data_have_the_workloads_1_to_4_at_each_load() -> None:
    assert [workload_numbers(DATA, load) for load in (0.5, 1.0, 1.5, 2.0)] == [(1, 2, 3, 4)] * 4
    jobs = [len(PolluxSource(DATA, load).draw(1).workload.jobs) for load in (0.5, 1.0, 1.5, 2.0)]
    assert jobs == [80, 160, 240, 320]


def test_a_number_that_the_folder_does_not_have_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(ConfigError, match=r"number: found 9; allowed: 1, 2, 3, 4\."):
        PolluxSource(DATA, 1.0).draw(9)


def test_a_placement_counts_as_its_smallest_rotation() -> None:
    (job,) = isolated("cifar10", 6, 2048, DATA).jobs
    assert job.training is not None
    assert job.training.pace((4, 2), 0, 512) == job.training.pace((2, 4), 0, 512)


def test_a_job_chooses_the_batch_with_the_greatest_pace() -> None:
    (job,) = isolated("cifar10", 4, 512, DATA).jobs
    assert job.training is not None
    own = job.training.pace((4,), 99, None)
    assert own.batch is not None
    assert own.batch > 128
    fixed = [job.training.pace((4,), 99, batch).rate for batch in (128, 512, 1024, 4096)]
    assert own.rate >= 0.99 * max(fixed)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("pollux_step_times.csv", "0.455323547", "0", r"line 2: found step_s '0'; allowed: a num"),
        ("pollux_step_times.csv", "bert,1,1,1,4,", "bart,1,1,1,4,", "line 2: found application 'b"),
        ("pollux_step_times.csv", "bert,1,1,1,4,", "bert,1,1,2,4,", "line 2: found placement '1'"),
        ("pollux_training.csv", "bert,12,1,", "bert,12,7,", "bert, batch 12: found no epoch 1"),
        ("pollux_workloads.csv", ",deepspeech2,6,", ",deepspeech2,0,", "found gpus '0'"),
        ("pollux_applications.csv", "bert,12,384", "bert,12,8", "line 2: found most 8; allowed"),
        ("pollux_applications.csv", "bert,12,384,4", "bert,12,384,400", "most_local 12; allowed: "),
        ("pollux_applications.csv", "384,4,12", "384,400,500", "no number of GPUs allows it"),
        ("pollux_step_times.csv", "0.455323547", "-1", "line 2: found step_s '-1'; allowed: a nu"),
        ("pollux_workloads.csv", ",deepspeech2,6,320", ",deepspeech2,65,640", "'65'; allowed: at "),
        ("pollux_workloads.csv", ",deepspeech2,6,320", ",deepspeech2,6,999", "found batch '999'; "),
        ("pollux_workloads.csv", ",deepspeech2,6,320", ",deepspeech2,6,1", "allowed: 20 to 640 wi"),
        ("pollux_workloads.csv", ",deepspeech2,6,320", ",deepspeech2,60,320", "10 samples a GPU w"),
    ],
)  # fmt: skip
def test_a_hole_or_a_wrong_value_is_refused_with_file_and_line(
    tmp_path: Path, name: str, old: str, new: str, message: str
) -> None:
    for file in DATA.glob("pollux_*.csv"):
        shutil.copyfile(file, tmp_path / file.name)
    text = (DATA / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message) as error:
        read_pollux(tmp_path)
    assert name in str(error.value)


def test_a_hole_that_a_simulation_meets_is_refused_with_the_file_and_what_is_missing(
    tmp_path: Path,
) -> None:
    for file in DATA.glob("pollux_*.csv"):
        lines = file.read_text().splitlines(keepends=True)
        hole = file.name == "pollux_step_times.csv"
        (tmp_path / file.name).write_text(
            "".join(line for line in lines if not (hole and line.startswith("cifar10,1,")))
        )
    with pytest.raises(ConfigError, match=r"cifar10 on 1 GPUs: found no step time") as error:
        isolated("cifar10", 1, 128, tmp_path)
    assert error.value.source == "pollux_step_times.csv"


def test_a_folder_without_the_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pollux_applications\.csv"):
        read_pollux(tmp_path)


def test_a_batch_that_was_not_measured_is_refused_with_what_to_do() -> None:
    (job,) = isolated("yolov3", 16, 128, DATA).jobs
    assert job.training is not None
    with pytest.raises(ConfigError, match="no step time with 1 samples a GPU"):
        job.training.pace((4, 4, 4, 4), 0, 16)


PUBLISHED = {"2d-las": "tiresias", "optimus": "optimus"}


@pytest.mark.law
def test_tiresias_gives_every_job_the_published_completion_time() -> None:
    for load, number in ((0.5, 2), (1.5, 4)):  # in the second, jobs of one second compete
        assert completions("2d-las", load, number) == published("2d-las", load, number)


def completions(
    policy: str, load: float, number: int, **parameters: object
) -> dict[str, float | None]:
    """Return every job's completion time, to the thousandth of a second."""
    used = {**WORKLOADS["pollux"].parameters.get(policy, {}), **parameters}
    contender = Contender(policy, tuple(used.items()))
    result = simulate_seed(PolluxSource(DATA, load), layout("16x4"), contender, number)
    return {str(job): None if s is None else round(s, 3) for job, s in result.jobs}


def published(policy: str, load: float, number: int) -> dict[str, float]:
    run = f"{PUBLISHED[policy]}-{load}"
    return {
        row["job"]: float(row["jct_s"])
        for row in rows("pollux_published_jct.csv")
        if row["run"] == run and row["workload"] == str(number)
    }


def test_optimus_gives_every_job_the_published_completion_time() -> None:
    assert completions("optimus", 0.5, 3) == published("optimus", 0.5, 3)


def mean_s(times: dict[str, float | None]) -> float:
    """Return the mean of 160 completion times."""
    known = [seconds for seconds in times.values() if seconds is not None]
    assert len(known) == 160
    return sum(known) / 160


@pytest.mark.law
def test_pollux_by_knapsack_has_the_mean_completion_that_was_computed_independently() -> None:
    assert mean_s(completions("pollux", 1.0, 3)) == pytest.approx(2339.4, rel=0.005)


@pytest.mark.law
def test_pollux_that_spreads_jobs_completes_them_sooner_than_published() -> None:
    spread = completions("pollux", 1.0, 1, placement="spread", noise="known")
    assert mean_s(spread) < 2088.8


def test_a_job_expects_the_noise_that_it_measured_last() -> None:
    (job,) = isolated("cifar10", 4, 512, DATA).jobs
    assert job.expects is not None
    begin, later = job.expects((4, 4), 0, None), job.expects((4, 4), 60, 1024)
    assert begin < job.expects((4, 4), 60, None) < later  # noise grows with the epoch and the batch

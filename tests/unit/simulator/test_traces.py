"""Traces: what is read, what is refused, and what is drawn."""

from __future__ import annotations

import gzip
from pathlib import Path
from statistics import fmean

import pytest

from hermes_ops.core.model import JobId
from hermes_ops.errors import ConfigError
from hermes_ops.policies import make_policy
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.traces import poisson, read_trace
from hermes_ops.simulator.workload import Costs, Work, Workload

HEADER = "job_id,submit_time_s,num_gpus,duration_s"
EXAMPLES = Path(__file__).parents[3] / "examples" / "traces"


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.csv"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_trace(written(folder, text))
    return [str(problem) for problem in caught.value.problems]


def test_the_four_columns_are_enough_in_any_order(tmp_path: Path) -> None:
    path = written(tmp_path, "num_gpus,duration_s,job_id,submit_time_s\n4,60.5, a ,10\n\n1,1,b,0\n")
    trace = read_trace(path)
    assert trace.name == "mine"
    assert trace.jobs == (Work(JobId("a"), 10.0, 60.5, 4), Work(JobId("b"), 0.0, 1.0, 1))


def test_optional_columns_reach_the_job_and_may_be_empty(tmp_path: Path) -> None:
    columns = "model,vc,user,weight,deadline_s,iterations,startup_s,checkpoint_s,batch_size"
    path = written(
        tmp_path,
        f"{HEADER},{columns}\na,0,1,9,VGG16,v1,ann,2.5,30,100,4,1,128\nb,0,1,9,,,,,,,,,\n",
    )
    full, bare = read_trace(path).jobs
    assert full == Work(
        JobId("a"), 0.0, 9.0, 1, user="ann", virtual_cluster="v1", model_name="VGG16",
        tensor_skew=0.744, weight=2.5, deadline_s=30.0, total_steps=100,
        configuration=(("batch_size", 128.0),), costs=Costs(4.0, 0.0, 1.0),
    )  # fmt: skip
    assert bare == Work(JobId("b"), 0.0, 9.0)


def test_a_compressed_file_reads_the_same(tmp_path: Path) -> None:
    text = f"{HEADER}\na,0,1,9\n"
    packed = tmp_path / "mine.csv.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_trace(packed) == read_trace(written(tmp_path, text))


def test_a_file_of_a_spreadsheet_reads_the_same(tmp_path: Path) -> None:
    """It begins with a byte-order mark."""
    text = f"{HEADER}\na,0,1,9\n"
    marked = tmp_path / "marked.csv"
    marked.write_text(text, encoding="utf-8-sig")
    assert read_trace(marked).jobs == read_trace(written(tmp_path, text)).jobs


def test_a_compressed_file_that_is_damaged_is_refused(tmp_path: Path) -> None:
    rows = "".join(f"{n},{n * 7 % 1000},1,{n * 13 % 997 + 1}\n" for n in range(300))
    data = bytearray(gzip.compress(f"{HEADER}\n{rows}".encode()))
    for place in (200, 201):
        data[place] ^= 0xFF
    damaged = tmp_path / "trace.csv.gz"
    damaged.write_bytes(data)
    with pytest.raises(ConfigError, match="a readable CSV file"):
        read_trace(damaged)


def test_unknown_doubled_and_missing_columns_are_named(tmp_path: Path) -> None:
    problems = refusal(tmp_path, "job_id,submit_time,num_gpus,num_gpus\na,0,1,1\n")
    assert "line 1, column 2: found 'submit_time'; allowed: job_id, submit_time_s" in problems[0]
    assert "line 1, column 4: found num_gpus again" in problems[1]
    assert "no column submit_time_s, duration_s" in problems[2]


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ("a,0,1", "row: found 3 cells; allowed: 4"),
        ("a,0,1,9,9", "row: found 5 cells"),
        (",0,1,9", "job_id: found nothing"),
        ("a,-1,1,9", "submit_time_s: found '-1'; allowed: a number of at least 0"),
        ("a,soon,1,9", "submit_time_s: found 'soon'"),
        ("a,inf,1,9", "submit_time_s: found 'inf'"),
        ("a,0,1,nan", "duration_s: found 'nan'"),
        ("a,0,1,", "duration_s: found ''"),
        ("a,0,0,9", "num_gpus: found '0'; allowed: a whole number of at least 1"),
        ("a,0,1.5,9", "num_gpus: found '1.5'"),
        ("a,0,,9", "num_gpus: found ''"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, row: str, where: str) -> None:
    problems = refusal(tmp_path, f"{HEADER}\nok,0,1,1\n{row}\n")
    assert len(problems) == 1
    assert problems[0].startswith(f"line 3, {where}")


def test_a_weight_of_nothing_is_refused(tmp_path: Path) -> None:
    assert (
        "weight: found '0'; allowed: a number above 0"
        in refusal(tmp_path, f"{HEADER},weight\na,0,1,9,0\n")[0]
    )


def test_an_id_that_comes_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    problems = refusal(tmp_path, f"{HEADER}\na,0,1,9\nb,0,1,9\na,0,1,9\n")
    assert problems == [
        "line 4, job_id: found the id of line 2; allowed: each id once. Fix: correct the line"
    ]


def test_all_problems_are_told_up_to_twenty(tmp_path: Path) -> None:
    rows = "".join(f"j{n},x,0,9\n" for n in range(50))
    problems = refusal(tmp_path, f"{HEADER}\n{rows}")
    assert len(problems) == 20
    assert problems[-1].startswith("line 11, num_gpus")


def test_a_file_without_jobs_or_that_is_none_is_refused(tmp_path: Path) -> None:
    assert "no job" in refusal(tmp_path, f"{HEADER}\n")[0]
    assert len(refusal(tmp_path, "")) == 1
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(ConfigError, match="a readable CSV file"):
            read_trace(path)
    torn = tmp_path / "torn.csv.gz"
    torn.write_bytes(gzip.compress(f"{HEADER}\na,0,1,9\n".encode())[:-9])
    with pytest.raises(ConfigError, match="a readable CSV file"):
        read_trace(torn)


@pytest.mark.law
def test_the_examples_are_read_whole() -> None:
    jobs = {
        "tiresias_60_job.csv": 60,
        "philly_480.csv": 480,
        "philly_82k.csv.gz": 82_247,
        "muri_philly_trace3.csv": 992,
    }
    assert {name: len(read_trace(EXAMPLES / name).jobs) for name in jobs} == jobs


def test_poisson_arrivals_come_at_the_rate_and_in_the_sizes_that_were_asked_for() -> None:
    jobs = poisson(
        4_000, mean_gap_s=30.0, seed=1, gpus=((1, 3.0), (8, 1.0)), median_s=100.0, spread=0.5
    ).jobs
    assert jobs[0].submitted_s == 0.0
    assert jobs[-1].submitted_s / 3_999 == pytest.approx(30.0, rel=0.05)
    assert {job.gpus for job in jobs} == {1, 8}
    assert fmean(job.gpus == 1 for job in jobs) == pytest.approx(0.75, abs=0.03)
    assert sorted(job.seconds for job in jobs)[2_000] == pytest.approx(100.0, rel=0.05)


def test_poisson_arrivals_are_the_same_for_the_same_seed_only() -> None:
    assert poisson(20, mean_gap_s=1.0, seed=3) == poisson(20, mean_gap_s=1.0, seed=3)
    assert poisson(20, mean_gap_s=1.0, seed=3).jobs != poisson(20, mean_gap_s=1.0, seed=4).jobs


def test_a_job_with_speed_ups_may_take_these_sizes_and_trains_at_their_speed(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, f"{HEADER},speed_ups\na,0,2,100,4:3 1:1 2:1.5\nb,0,1,9,\n")
    wide, narrow = read_trace(path).jobs
    assert narrow == Work(JobId("b"), 0.0, 9.0)
    assert wide.training is not None
    assert wide.training.sizes == (1, 2, 4)
    assert [wide.training.pace((n,), 0, None).rate for n in (1, 2, 4)] == pytest.approx(
        [2 / 3, 1, 2]
    )
    assert (wide.alone_s, [time.gpus for time in wide.step_times]) == (100.0, [1, 2, 4])
    result = simulate(Workload("w", (wide,)), layout("4"), make_policy("elastic-fifo", {}))
    (outcome,) = result.outcomes
    assert outcome.ended_s == pytest.approx(50.0)


@pytest.mark.parametrize("cell", ["x", "1", "1:0 2:1", "2:inf", "0:1 2:2", "2:1 2:2", "2:nan"])
def test_speed_ups_that_no_job_can_have_are_refused_with_their_line(
    tmp_path: Path, cell: str
) -> None:
    (problem,) = refusal(tmp_path, f"{HEADER},speed_ups\na,0,2,100,{cell}\n")
    assert problem.startswith(f"line 2, speed_ups: found '{cell}'; allowed: numbers of GPUs")


def test_speed_ups_without_the_requested_number_are_refused(tmp_path: Path) -> None:
    (problem,) = refusal(tmp_path, f"{HEADER},speed_ups\na,0,2,100,1:1 4:2\n")
    assert "one of num_gpus, 2, too" in problem

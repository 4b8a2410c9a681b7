from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from hermes_ops import cli
from hermes_ops.simulator.event_log import replay

EXAMPLES = Path(__file__).parents[3] / "examples"
METRICS = {
    "mean_completion_seconds", "makespan_seconds", "time_to_best_seconds", "time_to_good_seconds",
    "preemptions", "lost_gpu_seconds", "decision_ms",
}  # fmt: skip


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two jobs in jobs.csv and twelve configurations in curves.npz, in the working folder."""
    monkeypatch.chdir(tmp_path)
    lines = ["job_id,submit_time_s,num_gpus,duration_s", "a,0,2,10", "b,0,1,5"]
    Path("jobs.csv").write_text("\n".join(lines) + "\n")
    row = np.arange(12.0)[:, None]
    epoch = np.arange(1.0, 4.0)
    np.savez("curves.npz", hyperparameter_names=np.array(["rate"]), configs=row,
             val_loss=(row * 5) % 12 + 1 + 1 / epoch, val_accuracy=np.zeros((12, 3)),
             elapsed_s=(row + 1) * epoch)  # fmt: skip
    return tmp_path


class Said:
    """What `hermes ARGUMENTS` printed and how it ended (0: it returned)."""

    def __init__(self, capsys: pytest.CaptureFixture[str], command: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["hermes", *command.split()])
            with pytest.raises(SystemExit) as ended:
                cli.main()
        self.code = ended.value.code
        self.out, self.err = capsys.readouterr()


def test_the_document_of_a_comparison_has_exactly_its_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = Said(capsys, "compare --curves curves.npz --gpus 2 --policies fifo,hermes,oracle-best "
                        "--seeds 2 --trials 6 --jobs 1 --json")  # fmt: skip
    assert (said.code, said.err) == (0, "")
    found = json.loads(said.out, parse_constant=lambda name: pytest.fail(f"{name} in the JSON"))
    assert list(found) == ["policies", "workload", "gpus", "seeds"]
    assert (found["workload"], found["gpus"], found["seeds"]) == ("curves", 2, 2)
    assert list(found["policies"]) == ["fifo", "hermes", "oracle-best"]
    for metrics in found["policies"].values():
        assert set(metrics) >= METRICS
        for name in METRICS:
            assert list(metrics[name]) == ["mean", "low", "high"]
            assert metrics[name]["low"] <= metrics[name]["mean"] <= metrics[name]["high"]


def test_a_trace_has_no_time_to_best_and_one_value(capsys: pytest.CaptureFixture[str]) -> None:
    said = Said(capsys, "compare --trace jobs.csv --gpus 2 --policies fifo --json")
    fifo = json.loads(said.out)["policies"]["fifo"]
    assert fifo["mean_completion_seconds"] == {"mean": 12.5, "low": 12.5, "high": 12.5}
    assert fifo["makespan_seconds"]["mean"] == 15.0
    assert fifo["time_to_best_seconds"] == {"mean": None, "low": None, "high": None}


def test_a_comparison_prints_a_row_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    said = Said(capsys, "compare --curves curves.npz --gpus 2 --policies fifo,hermes --trials 6 "
                        "--seeds 2 --jobs 1")  # fmt: skip
    assert "curves on 2 GPUs, 2 seeds" in said.out
    assert [line.split()[1] for line in said.out.splitlines() if line.startswith("│ ")
            and line.split()[1] != "│"] == ["fifo", "hermes"]  # fmt: skip
    assert "95 % bootstrap intervals" in said.out


def test_seeds_begin_where_they_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    base = "compare --curves curves.npz --gpus 1 --policies fifo --trials 3 --jobs 1 --json"
    later = json.loads(Said(capsys, f"{base} --first-seed 5").out)
    assert later["seeds"] == 1
    first = json.loads(Said(capsys, base).out)
    assert (
        later["policies"]["fifo"]["makespan_seconds"]
        != first["policies"]["fifo"]["makespan_seconds"]
    )


def test_start_up_seconds_are_lost_on_every_segment(capsys: pytest.CaptureFixture[str]) -> None:
    said = Said(
        capsys, "simulate --trace jobs.csv --gpus 2 --policy fifo --switch-seconds 3 --json"
    )
    metrics = json.loads(said.out)["metrics"]
    assert metrics["lost_gpu_seconds"] == 9.0
    assert metrics["makespan_seconds"] == 21.0


def test_a_simulation_writes_its_tables_log_and_pictures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = Said(
        capsys, "simulate --curves curves.npz --trials 5 --gpus 2 --policy hermes --out o/p"
    )
    assert said.code == 0
    assert "curves-0 on 2 GPUs under hermes" in said.out
    folder = Path("o/p")
    assert {f.name for f in folder.iterdir()} == {
        "jobs.csv", "events.jsonl", "metrics.json", "completion.png", "gpus.png", "regret.png"
    }  # fmt: skip
    rows = list(csv.DictReader((folder / "jobs.csv").read_text().splitlines()))
    assert [row["job"] for row in rows] == [f"curves-0/{n}" for n in range(5)]
    outcomes = replay((folder / "events.jsonl").read_text().splitlines())
    assert [o.completion_s for o in outcomes] == [float(row["completion_s"]) for row in rows]
    facts = json.loads((folder / "metrics.json").read_text())
    mean = sum(float(row["completion_s"]) for row in rows) / 5
    assert facts["metrics"]["mean_completion_seconds"] == pytest.approx(mean)
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in folder.glob("*.png"))


def test_a_comparison_writes_its_document_and_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    said = Said(capsys, "compare --curves curves.npz --trials 4 --gpus 2 --policies fifo --jobs 1 "
                        "--out made --json")  # fmt: skip
    assert json.loads(said.out) == json.loads(Path("made/comparison.json").read_text())
    assert {f.name for f in Path("made").iterdir()} == {
        "comparison.json", "completion.png", "completions.csv", "regret.png"
    }  # fmt: skip


def test_random_jobs_need_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    said = Said(capsys, "simulate --poisson 9 --gap-seconds 5 --job-seconds 20 --nodes 2x8 "
                        "--policy fifo --seed 4 --json")  # fmt: skip
    found = json.loads(said.out)
    assert (found["gpus"], found["metrics"]["jobs"], found["policy"]) == (16, 9, "fifo")


TRACE = "--trace jobs.csv --gpus 2"
CURVES = "--curves curves.npz --gpus 2"


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("simulate --gpus 2", "the workload: found no workload"),
        (f"simulate {TRACE} --curves curves.npz", "found --trace and --curves"),
        (f"simulate {TRACE} --trials 4", "--trials: found with --trace; allowed: with --curves"),
        (f"simulate {CURVES} --gap-seconds 4", "--gap-seconds: found with --curves"),
        (f"simulate {CURVES} --trials 0", "--trials: found 0"),
        (f"simulate {CURVES} --trials 13", "trials: found 13; allowed: 1 to 12"),
        (f"simulate {CURVES} --trials 5 --prior-sweeps 2", "5 trials and 2 earlier sweeps"),
        (f"simulate {TRACE} --switch-seconds -1", "--switch-seconds: found -1.0"),
        (f"simulate {TRACE} --switch-seconds nan", "--switch-seconds: found nan"),
        ("simulate --poisson 3 --gpus 64 --job-seconds 0", "--job-seconds: found 0.0"),
        ("simulate --trace jobs.csv", "--gpus: found nothing"),
        ("simulate --trace jobs.csv --gpus 0", "the number of GPUs is not valid"),
        ("simulate --trace jobs.csv --gpus 4 --nodes 3x2", "--nodes 3x2 with 6"),
        ("simulate --trace jobs.csv --nodes big", "'big'"),
        ("simulate --trace jobs.csv --gpus 1", "1 job of up to 2 GPUs"),
        ("simulate --trace gone.csv --gpus 1", "gone.csv"),
        ("simulate --curves gone.npz --gpus 1", "gone.npz"),
        ("simulate --curves jobs.csv --gpus 1", "jobs.csv is not valid"),
        (f"simulate {TRACE} --policy fastest", "'fastest'"),
        (f"simulate {TRACE} --policy hermes --policy-option colour=1", "colour"),
        (f"simulate {TRACE} --policy hermes --policy-option threshold", "NAME=VALUE"),
        (f"simulate {TRACE} --out jobs.csv", "jobs.csv cannot be a folder"),
        (f"compare {TRACE} --policies ,", "--policies: found ','"),
        (f"compare {TRACE} --policies fifo,fastest", "'fastest'"),
        (f"compare {TRACE} --policies fifo --policy-option eta=4", "POLICY.NAME=VALUE"),
        (f"compare {TRACE} --policies fifo --policy-option asha.eta=4", "one of fifo"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_words(
    capsys: pytest.CaptureFixture[str], command: str, named: str
) -> None:
    said = Said(capsys, command)
    assert said.code == 1
    assert said.out == ""
    assert said.err.startswith("hermes: ")
    assert named in said.err
    assert len(said.err.splitlines()) <= 2


def test_a_bad_row_of_a_trace_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Path("jobs.csv").open("a") as file:
        file.write("c,0,1,-5\n")
    assert "line 4" in Said(capsys, f"simulate {TRACE}").err


def test_an_option_of_one_policy_reaches_it_alone(capsys: pytest.CaptureFixture[str]) -> None:
    said = Said(capsys, f"compare {CURVES} --trials 4 --policies fifo,hermes --json --jobs 1 "
                        "--policy-option hermes.threshold=1")  # fmt: skip
    assert said.code == 0
    wrong = Said(
        capsys,
        f"compare {CURVES} --trials 4 --policies fifo,hermes --policy-option fifo.threshold=1",
    )
    assert "policy.fifo.threshold" in wrong.err


def test_random_jobs_are_those_of_the_users_of_the_teams(
    capsys: pytest.CaptureFixture[str],
) -> None:
    teams = EXAMPLES / "teams.yaml"
    said = Said(capsys, f"compare --poisson 40 --gpus 8 --teams {teams} --jobs 1 --json "
                        "--policies fifo,fifo+quota")  # fmt: skip
    found = json.loads(said.out)
    assert found["policies"]["fifo+quota"]["finished"]["mean"] == 40
    jobs = {name: facts["jobs"] for name, facts in found["teams"]["fifo+quota"]["by_team"].items()}
    assert set(jobs) == {"vision", "speech"}
    assert sum(jobs.values()) == 40


def figures(text: str) -> dict[str, str]:
    """Return the figures of a printed table but the measured times of decisions."""
    rows = [re.split(r" *│ *", line) for line in text.splitlines() if line.startswith("│")]
    return {row[1]: row[2] for row in rows if not row[1].startswith("decision ms")}


def test_the_figures_of_a_simulation_on_its_page_are_those_that_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (EXAMPLES.parent / "docs" / "simulate.md").read_text("utf-8")
    (printed,) = re.findall(r"^```text\ntiresias_60_job on 8 GPUs.*?^```", page, re.DOTALL | re.M)
    command = f"simulate --trace {EXAMPLES}/traces/tiresias_60_job.csv --nodes 2x4 --policy 2d-las"
    assert figures(printed) == figures(Said(capsys, command).out)


def test_random_jobs_are_named_by_their_number_in_both_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs = "--poisson 3 --gpus 8 --json"
    alone = Said(capsys, f"simulate {jobs} --policy fifo --seed 5")
    compared = Said(capsys, f"compare {jobs} --policies fifo --jobs 1")
    assert [json.loads(said.out)["workload"] for said in (alone, compared)] == ["poisson-3"] * 2


def test_a_file_of_curves_that_is_not_there_is_a_matter_of_the_path(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "Fix: correct the path" in Said(capsys, "simulate --curves none.npz --gpus 2").err

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.trial import segment_records
from hermes_ops.trial.files import Folder, Follower
from tests.unit.trial.supervised import SupervisedTrial

Line = dict[str, Any]


class Clocks:
    """The time of day, which people and NTP set, and the machine's uptime."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.uptime_s, self.boot = 1_000.0, 50.0, "first"
        name = "hermes_ops.trial.segment_records"
        monkeypatch.setattr(f"{name}.time.time", lambda: self.now_s)
        monkeypatch.setattr(f"{name}.time.monotonic", lambda: self.uptime_s)
        monkeypatch.setattr(f"{name}.boot_id", lambda: self.boot)

    def go_on(self, seconds: float, set_by_s: float = 0.0) -> None:
        self.uptime_s += seconds
        self.now_s += seconds + set_by_s


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


DAY_S = 86_400.0


@pytest.mark.parametrize("set_by_s", [0.0, DAY_S, -DAY_S])
def test_a_segment_has_trained_as_long_as_it_ran_however_the_clock_was_set_meanwhile(
    tmp_path: Path, clocks: Clocks, set_by_s: float
) -> None:
    folder = Folder(tmp_path)
    segment_records.open_segment(folder, 1, ("0",), 0)
    clocks.go_on(60.0, set_by_s)
    segment_records.close_segment(folder, 1, 3, "preempted")
    lines = list(Follower(folder.segments).new())
    assert [line.get("end_s") for line in lines] == [None, 1_060.0]
    assert segment_records.trained_s(lines) == 60.0


@pytest.mark.parametrize(
    ("boot", "most_s"), [("first", 60.0), ("second", 60.0 + DAY_S), ("", 60.0 + DAY_S)]
)
def test_a_killed_segment_has_trained_no_longer_than_its_machine_has_been_up_since(
    tmp_path: Path, clocks: Clocks, boot: str, most_s: float
) -> None:
    folder = Folder(tmp_path)
    segment_records.open_segment(folder, 1, ("0",), 0)
    clocks.go_on(60.0, DAY_S)
    folder.status.write_text("{}")  # the last sign of its life
    os.utime(folder.status, (clocks.now_s,) * 2)
    clocks.boot = boot
    segment_records.close_lost_segment(folder, 3)
    assert segment_records.trained_s(Follower(folder.segments).new()) == most_s


def test_the_start_of_a_segment_by_an_earlier_version_is_closed_by_the_clock(
    tmp_path: Path, clocks: Clocks
) -> None:
    folder = Folder(tmp_path)
    folder.segments.write_text('{"epoch": 1, "start_s": 1000.0}\n')
    clocks.go_on(60.0)
    segment_records.close_segment(folder, 1, 3, "preempted")
    assert segment_records.trained_s(Follower(folder.segments).new()) == 60.0


def span(start_s: float, end_s: float | None = None, outcome: str = "preempted") -> list[Line]:
    """Return the lines of a segment; without an end it runs, or was killed."""
    end = {"end_s": end_s, "outcome": outcome}
    return [{"start_s": start_s}, *([] if end_s is None else [end])]


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        ([], 0.0),
        ([*span(10.0, 40.0), *span(100.0, 101.0)], 31.0),
        ([*span(10.0, 40.0, "failed"), *span(100.0, 101.0), *span(200.0, 202.0, "killed")], 3.0),
        ([*span(10.0, 40.0), *span(100.0, 101.0, "failed")], 0.0),
        ([*span(10.0, 40.0), *span(100.0)], 30.0),
        ([*span(10.0), *span(100.0, 101.0)], 1.0),
        ([*span(10.0, 9.0)], 0.0),
        ([{**span(10.0)[0], **span(10.0, 40.0)[1]}, *span(100.0, 101.0)], 31.0),  # as one line
    ],
)
def test_training_time_is_that_of_the_closed_segments_since_the_last_failure(
    lines: list[Line], seconds: float
) -> None:
    assert segment_records.trained_s(lines) == seconds


@pytest.mark.parametrize(("in_result", "reached"), [({"step": 7}, 7), ({"step": 2}, 3), ({}, 3)])
def test_a_killed_segment_is_closed_once_at_the_last_step_that_is_known(
    tmp_path: Path, clocks: Clocks, in_result: Line, reached: int
) -> None:
    folder = Folder(tmp_path)
    segment_records.open_segment(folder, 4, ("0",), 0)
    folder.result.write_text(json.dumps(in_result))
    for _ in range(2):
        segment_records.close_lost_segment(folder, 3)
    _, end = Follower(folder.segments).new()
    assert (end["epoch"], end["last_step"], end["outcome"]) == (4, reached, "killed")


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("last.ckpt", True),
        ("epoch-1/weights", True),
        (".hidden", False),
        ("last.ckpt.tmp", False),
        ("epoch-1/weights.part", False),
        ("epoch-1.tmp/weights", False),
        (".epoch-1/weights", False),
    ],
)
def test_a_file_that_is_still_being_written_is_no_checkpoint(
    tmp_path: Path, name: str, counts: bool
) -> None:
    """With one the trial could be stopped, and would begin from scratch."""
    folder = Folder(tmp_path)
    path = folder.checkpoints / name
    path.parent.mkdir(parents=True)
    path.write_text("w")
    os.utime(path, (500.0, 500.0))
    assert segment_records.newest_checkpoint_s(folder) == (500.0 if counts else None)


def test_a_link_to_a_folder_elsewhere_is_a_checkpoint_and_one_inside_is_none(
    tmp_path: Path,
) -> None:
    folder, elsewhere = Folder(tmp_path / "trial"), tmp_path / "scratch"
    folder.checkpoints.mkdir(parents=True)
    elsewhere.mkdir()
    os.utime(elsewhere, (500.0, 500.0))
    (folder.checkpoints / ".half").symlink_to(elsewhere)
    assert segment_records.newest_checkpoint_s(folder) is None
    (folder.checkpoints / "last").symlink_to(elsewhere)
    (folder.checkpoints / "empty").mkdir()
    (folder.checkpoints / "latest").symlink_to("empty")
    assert segment_records.newest_checkpoint_s(folder) == 500.0


@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl", "segments.jsonl", "epoch"])
def test_a_trial_goes_on_from_its_checkpoint_where_its_script_has_made_a_folder_of_our_file(
    name: str, tmp_path: Path
) -> None:
    script = """
import os, sys, pathlib
state = pathlib.Path(os.environ["HERMES_CHECKPOINT_DIR"], "state")
if state.exists():
    print("loss=1")
else:
    state.write_text("saved")
    ours = pathlib.Path(os.environ["HERMES_TRIAL_DIR"], sys.argv[1])
    ours.unlink(missing_ok=True)
    ours.mkdir()
    (ours / "kept").write_text("by the script")
    print("loss=2", flush=True)  # no value earlier: it makes metrics.jsonl a file
    sys.exit(75)
"""
    trial = SupervisedTrial(tmp_path)
    codes, outputs = [], []
    for trial.epoch in (1, 2):
        process = trial.supervise(["--objective", "loss"], [sys.executable, "-c", script, name])
        outputs.append(process.communicate()[0].decode())
        codes.append(process.returncode)
    assert codes[1] == 0, outputs
    assert trial.result["outcome"] == "finished"
    assert len(list(trial.folder.glob(f"{name}.aside.*/kept"))) == 1
    assert "".join(outputs).count(f"{name} was a folder where hermes-trial writes a file") == 1


def test_a_folder_that_a_link_names_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "result.json").symlink_to(tmp_path / "elsewhere")
    assert segment_records.set_folders_aside(Folder(tmp_path)) == []
    assert (tmp_path / "result.json").is_symlink()

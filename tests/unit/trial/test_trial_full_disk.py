"""A trial whose disk is full: /dev/full refuses every write as such a disk does."""

from __future__ import annotations

import builtins
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_ops.trial import segment_records
from hermes_ops.trial.disk_space import DiskSpace, disks_of, space_of, write_remedy
from hermes_ops.trial.files import Folder, replace_file, write_json
from hermes_ops.trial.metrics import Metric, MetricsFile
from hermes_ops.trial.outcome import SegmentEnding, SegmentFacts, SegmentOutcome, judge

ROOT = Path(__file__).parents[3]
FULL = Path("/dev/full")

# Reports five values; frees its disk after the third if it is told to.
SCRIPT = """
import os, sys, time
metrics = os.environ["HERMES_METRICS_FILE"]
for epoch in range(1, 6):
    print(f"epoch={epoch} loss={1 / epoch}", flush=True)
    if epoch == 3 and "frees" in sys.argv:
        time.sleep(0.5)
        os.unlink(metrics)
        time.sleep(0.5)
"""


def _trial(folder: Path, script: Path, epoch: int, *arguments: str) -> int:
    command = [sys.executable, "-m", "hermes_ops.trial", "--dir", str(folder)]
    command += ["--epoch", str(epoch), "--objective", "loss", "--lock-wait", "30", "--"]
    command += [sys.executable, str(script), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
    return done.returncode


def _lines(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["value"]) for line in map(json.loads, lines)]


@pytest.fixture
def trial(tmp_path: Path) -> tuple[Path, Path]:
    """Return the folder of a trial whose metrics file takes nothing, and its script."""
    if not FULL.exists():
        pytest.skip("this system has no /dev/full")
    folder, script = tmp_path / "trial", tmp_path / "train.py"
    folder.mkdir()
    (folder / "metrics.jsonl").symlink_to(FULL)
    script.write_text(SCRIPT)
    return folder, script


EXPECTED = [(epoch, 1 / epoch) for epoch in range(1, 6)]


def test_values_that_a_full_disk_does_not_take_are_written_once_it_has_space(
    trial: tuple[Path, Path],
) -> None:
    folder, script = trial
    assert _trial(folder, script, 1, "frees") == 0
    assert _lines(folder) == EXPECTED


def test_values_that_had_no_space_until_the_end_are_written_by_the_next_segment(
    trial: tuple[Path, Path],
) -> None:
    folder, script = trial
    assert _trial(folder, script, 1) not in (0, 70, 75)
    result = json.loads((folder / "result.json").read_text())
    assert (result["outcome"], result["cause"], result["retryable"]) == ("failed", "no_space", True)
    assert str(folder / "metrics.jsonl") in result["reason"]
    assert [line["step"] for line in result["unwritten"]] == [1, 2, 3, 4, 5]
    assert _trial(folder, script, 2) == 70  # the disk is full still: nothing is forgotten
    assert json.loads((folder / "result.json").read_text()) == result
    (folder / "metrics.jsonl").unlink()
    script.write_text("")  # a checkpoint of the last epoch was written: it repeats nothing
    assert _trial(folder, script, 3) == 0
    assert _lines(folder) == EXPECTED


def test_a_trial_that_waited_for_space_has_not_trained_meanwhile(trial: tuple[Path, Path]) -> None:
    """Its last values and the end of its segment had no room; two hours later there is some."""
    folder, script = trial
    _trial(folder, script, 1)
    (folder / "metrics.jsonl").unlink()
    segments = folder / "segments.jsonl"
    start, _end = map(json.loads, segments.read_text().splitlines())
    start["start_s"] -= 7_200
    segments.write_text(json.dumps(start) + "\n")
    for path in folder.iterdir():
        os.utime(path, (path.stat().st_mtime - 7_200,) * 2)
    script.write_text("")
    assert _trial(folder, script, 2) == 0
    lines = [json.loads(line) for line in segments.read_text().splitlines()]
    lost = lines[1]
    assert (lost["epoch"], lost["last_step"], lost["outcome"]) == (1, 5, "killed")
    assert 0 <= lost["end_s"] - start["start_s"] < 600
    assert segment_records.trained_s(lines) < 600
    assert _lines(folder) == EXPECTED


def _full(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write_result(folder: Folder, tail: list[str], unwritten: list[Metric]) -> None:
    ending = SegmentEnding(SegmentOutcome.FAILED, "no space", 1, "no_space")
    facts: dict[str, Any] = {"epoch": 3, "exit_code": 1, "step": 2, "checkpoint_step": 1}
    segment_records.write_result(folder, ending, tail=tail, unwritten=unwritten, **facts)


@pytest.fixture
def reserved(tmp_path: Path) -> Folder:
    """A trial's folder in which there is room for the result alone."""
    folder = Folder(tmp_path)
    segment_records.keep_reserve(folder.reserve)
    return folder


def test_a_result_is_written_in_reserved_space_that_nobody_else_can_take(
    reserved: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = [Metric("m" * 60, 1.0 / 3.0, step) for step in range(400)]
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", _full)  # no new file has room
        _write_result(reserved, ["x" * 100] * 50, metrics)
    segment_records.recover_values(reserved)
    assert MetricsFile(reserved.metrics).reached("m" * 60) == 399
    assert {path.name for path in reserved.root.iterdir()} == {"result.json", "metrics.jsonl"}


def test_a_result_that_fits_nowhere_is_an_error_and_no_half_result(
    reserved: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", _full)
        with pytest.raises(OSError, match="No space"):
            _write_result(reserved, [], [Metric("m" * 70_000, 1.0, 1)])
    assert not reserved.result.exists()


def test_long_last_lines_give_way_to_values_in_the_reserved_space(
    reserved: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", _full)
        _write_result(reserved, [f"{n} {'x' * 1990}" for n in range(50)], [Metric("loss", 0.5, 7)])
    result = json.loads(reserved.result.read_text())
    assert [line.split()[0] for line in result["tail"]] == [str(n) for n in range(18, 50)]
    segment_records.recover_values(reserved)
    assert MetricsFile(reserved.metrics).reached("loss") == 7


STEPS: dict[str, Callable[[pytest.MonkeyPatch, Any], None]] = {
    "open": lambda patch, fails: patch.setattr(builtins, "open", fails),
    "fsync": lambda patch, fails: patch.setattr(os, "fsync", fails),
    "replace": lambda patch, fails: patch.setattr(os, "replace", fails),
}


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    writes=st.lists(
        st.tuples(st.sampled_from(["none", *STEPS]), st.integers(0, 10**6)), min_size=1, max_size=8
    )
)
def test_whichever_write_fails_the_file_has_the_last_content_that_was_accepted(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("files") / "status.json"
    write_json(path, {"n": -1})
    accepted = -1
    for step, number in writes:
        with pytest.MonkeyPatch.context() as patch:
            if step == "none":
                accepted = number
                write_json(path, {"n": number}, durable=True)
                continue
            STEPS[step](patch, _full)
            with pytest.raises(OSError, match="No space"):
                write_json(path, {"n": number}, durable=True)
    assert json.loads(path.read_text()) == {"n": accepted}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_private_file_is_private_from_its_first_byte(tmp_path: Path) -> None:
    replace_file(tmp_path / "lease.json", b"{}", mode=0o600)
    assert (tmp_path / "lease.json").stat().st_mode & 0o777 == 0o600


def _facts(**changes: Any) -> SegmentFacts:
    known: dict[str, Any] = {
        "exit_code": 0,
        "asked_to_stop": False,
        "ended_at_max_epochs": False,
        "verdict": None,
        "has_checkpoint": True,
        "objective": "loss",
        "objective_reported": True,
        "trained_to_end": True,
        "tail": [],
    }
    return SegmentFacts(**{**known, **changes})


NO_SPACE_LINE = "OSError: [Errno 28] No space left on device: '/data/checkpoints/model.pt'"


@pytest.mark.parametrize(
    ("facts", "place"),
    [
        (_facts(exit_code=1, tail=["loss=1", NO_SPACE_LINE]), "/data/checkpoints/model.pt"),
        (_facts(exit_code=1, tail=["OSError: [Errno 122] Disk quota exceeded: 'a'"]), "'a'"),
        (_facts(exit_code=-15, asked_to_stop=True, tail=[NO_SPACE_LINE]), "/data/checkpoints"),
        (_facts(exit_code=0, unwritten="no space left on the device: /x/metrics.jsonl"), "/x/"),
        (_facts(ended_at_max_epochs=True, unwritten="no space left: /x/metrics.jsonl"), "/x/"),
    ],
)
def test_a_full_disk_is_a_cause_of_its_own_with_its_place(facts: SegmentFacts, place: str) -> None:
    ending = judge(facts)
    assert (ending.outcome, ending.cause, ending.retryable) == (
        SegmentOutcome.FAILED,
        "no_space",
        True,
    )
    assert place in ending.reason
    assert ending.code not in (0, 70, 75)


def test_a_value_that_is_not_finite_is_no_matter_of_the_disk() -> None:
    ending = judge(_facts(unwritten="no space", verdict="loss is NaN at step 2", diverged=True))
    assert (ending.cause, ending.retryable) == ("diverged", False)


def test_a_small_disk_is_full_by_its_share_and_one_without_files_left_is_full() -> None:
    gib = 1024**3
    assert DiskSpace(Path("/"), 10 * 1024**2, 100 * gib, None).is_full
    assert not DiskSpace(Path("/"), 10 * 1024**2, 24 * 1024**2, None).is_full
    assert DiskSpace(Path("/"), 0, 24 * 1024**2, None).is_full
    assert DiskSpace(Path("/"), 50 * gib, 100 * gib, 2).is_full
    assert not DiskSpace(Path("/"), 50 * gib, 100 * gib, 1000).is_full


def test_a_disk_is_shown_once_and_one_that_is_away_not_at_all(tmp_path: Path) -> None:
    assert space_of(tmp_path / "absent") is None
    assert len(disks_of([tmp_path, tmp_path / "absent", tmp_path])) == 1


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "raise its quota"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "check that disk"),
        (errno.EACCES, "owner and permissions"),
    ],
)
def test_the_remedy_fits_the_error_of_a_write(number: int, words: str) -> None:
    assert words in write_remedy(OSError(number, os.strerror(number)))

"""Checkpoints on a volume of their own: whose they are, and when they go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hermes_ops.trial import node_checkpoints
from hermes_ops.trial.files import Folder
from hermes_ops.trial.locks import RESTART_EPOCH_VARIABLE
from hermes_ops.trial.segment import run

SCRIPT = (
    "import os, pathlib; d = pathlib.Path(os.environ['HERMES_CHECKPOINT_DIR']); "
    "print('seen', sorted(p.name for p in d.iterdir())); (d / 'new').write_text('1'); "
    "print('epoch=1 loss=0.5', flush=True); raise SystemExit({code})"
)


def filled(path: Path) -> Folder:
    """A trial's folder with something that an earlier life has left among the checkpoints."""
    folder = Folder(path)
    (folder.checkpoints / "old").mkdir(parents=True)
    (folder.checkpoints / "old" / "weights").write_text("1")
    (folder.checkpoints / "link").symlink_to("/etc/hostname")
    return folder


def segment(
    folder: Folder, *options: str, epoch: int = 1, code: int = 0, anew: int | None = None
) -> str:
    """Run one segment of a script that writes a checkpoint and ends with that code."""
    command = [sys.executable, "-m", "hermes_ops.trial", "--dir", str(folder.root)]
    variables = {"PYTHONUNBUFFERED": "1"}
    variables |= {} if anew is None else {RESTART_EPOCH_VARIABLE: str(anew)}
    command += ["--epoch", str(epoch), "--objective", "loss", *options, "--", sys.executable]
    done = subprocess.run(
        [*command, "-c", SCRIPT.replace("{code}", str(code))],
        capture_output=True, text=True, check=False, env={**os.environ, **variables},
    )  # fmt: skip
    return done.stdout


def test_a_trial_that_begins_from_scratch_deletes_what_its_task_could_not_and_later_nothing(
    tmp_path: Path,
) -> None:
    folder = filled(tmp_path)
    folder.epoch.write_text("1")
    folder.result.write_text('{"epoch": 1, "outcome": "finished"}')
    (folder.model / "old").mkdir(parents=True)
    (tmp_path / "sent.json").write_text("{}")
    assert "seen []" in segment(folder, epoch=2, code=3, anew=2)
    assert not folder.model.exists()
    assert (tmp_path / "sent.json").exists()
    assert "seen ['new']" in segment(folder, epoch=3, code=3, anew=2)
    folder.epoch.unlink()  # as in a backup
    assert "seen ['new']" in segment(folder, epoch=4, anew=2)


def test_what_an_earlier_life_left_is_thrown_away_once(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    node_checkpoints.claim(folder, "node-a")
    assert list(folder.checkpoints.iterdir()) == []
    (folder.checkpoints / "own").touch()
    node_checkpoints.claim(folder, "node-a")
    assert [p.name for p in folder.checkpoints.iterdir()] == ["own"]


def test_a_trial_finds_its_own_checkpoints_and_leaves_none_when_it_has_finished(
    tmp_path: Path,
) -> None:
    folder = filled(tmp_path)
    assert "seen []" in segment(folder, "--checkpoints-on=node-a", code=3)
    assert [p.name for p in folder.checkpoints.iterdir()] == ["new"]
    assert (tmp_path / node_checkpoints.MARK).read_text() == "node-a"
    assert "seen ['new']" in segment(folder, "--checkpoints-on=node-a", epoch=2)
    assert list(folder.checkpoints.iterdir()) == []
    assert not (tmp_path / node_checkpoints.MARK).exists()


def test_hermes_trial_deletes_the_folders_that_it_is_given(tmp_path: Path) -> None:
    folder = filled(tmp_path / "3")
    other = filled(tmp_path / "4")
    gone = [str(folder.checkpoints), str(tmp_path / "absent")]
    assert run(["--empty", *gone]) == 0
    assert not folder.checkpoints.exists()
    assert (other.checkpoints / "old" / "weights").exists()
    assert run(["--empty", str(other.checkpoints / "link")]) == 1  # a file: nothing to empty


def test_without_a_volume_of_their_own_checkpoints_stay(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    assert "seen ['link', 'old']" in segment(folder)
    assert {p.name for p in folder.checkpoints.iterdir()} == {"link", "old", "new"}

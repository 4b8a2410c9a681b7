from __future__ import annotations

import os
from pathlib import Path

import pytest

from hermes_ops.trial import segment_records
from hermes_ops.trial.files import Folder, Follower


@pytest.mark.parametrize(("closed_s", "end_s"), [(1_060.0, 1_060.0), (400.0, 1_000.0)])
def test_a_segment_ends_no_sooner_than_it_began_though_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed_s: float, end_s: float
) -> None:
    folder = Folder(tmp_path)
    monkeypatch.setattr("hermes_ops.trial.segment_records.time.time", lambda: 1_000.0)
    segment_records.open_segment(folder, 1, ("0",), 0)
    segment_records.close_segment(folder, 1, closed_s, 3, "preempted")
    assert [line.get("end_s") for line in Follower(folder.segments).new()] == [None, end_s]


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

from __future__ import annotations

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

"""Checkpoints of scripts without the hook: found once their values are read, however often."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hermes_ops.trial.files import Folder
from hermes_ops.trial.supervisor.checkpoint_scan import OUTPUT_LAG_S, PERIOD_S, CheckpointScan

BEGAN_S = 1_000.0


class Script:
    """A script that saves, and the scan that looks for it, under a clock that is set by hand."""

    def __init__(self, root: Path) -> None:
        self.folder = Folder(root)
        self.folder.checkpoints.mkdir(parents=True)
        self.now_s, self.unread_lines = BEGAN_S, False
        self.clock_is_off_s = 0.0
        self.scan = CheckpointScan(
            self.folder,
            lambda received_s: self.unread_lines,
            clock=lambda: self.now_s + self.clock_is_off_s,
            timer=lambda: self.now_s,
        )
        self.known_s: float | None = None

    def saves(self, name: str = "state") -> float:
        file = self.folder.checkpoints / name
        file.write_text("weights")
        os.utime(file, (self.now_s + self.clock_is_off_s,) * 2)
        return file.stat().st_mtime

    def look(self, after_s: float = 0.0, *, final: bool = False) -> float | None:
        self.now_s += after_s
        found_s = self.scan.find(self.known_s, final=final)
        self.known_s = self.known_s if found_s is None else found_s
        return found_s


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_a_checkpoint_is_found_once_its_lines_have_been_read(script: Script) -> None:
    assert script.look() is None
    script.now_s += PERIOD_S
    saved_s = script.saves()
    assert script.look() is None
    script.unread_lines = True
    assert script.look(OUTPUT_LAG_S) is None
    script.unread_lines = False
    assert script.look(OUTPUT_LAG_S) == saved_s
    assert script.look(PERIOD_S) is None


def test_a_script_that_never_rests_between_its_checkpoints_has_one(script: Script) -> None:
    first_s, found = script.saves(), []
    for _ in range(40):
        found.append(script.look(0.05))
        script.saves()
    times_s = [time_s for time_s in found if time_s is not None]
    assert times_s[0] <= first_s + 2 * OUTPUT_LAG_S
    assert times_s == sorted(times_s)
    assert len(times_s) >= 2


def test_at_the_end_the_newest_checkpoint_counts_at_once(script: Script) -> None:
    script.saves()
    assert script.look() is None
    script.now_s += 0.05
    assert script.look(final=True) == BEGAN_S
    script.now_s += 0.05
    newest_s = script.saves()
    assert script.look(final=True) == newest_s


def test_a_checkpoint_that_was_deleted_before_it_was_found_is_none(script: Script) -> None:
    older_s = script.saves("older")
    script.now_s += 0.1
    script.saves("newer")
    assert script.look() is None
    (script.folder.checkpoints / "newer").unlink()
    assert script.look(OUTPUT_LAG_S) == older_s
    (script.folder.checkpoints / "older").unlink()
    assert script.look(PERIOD_S) is None


def test_new_values_hasten_the_next_look(script: Script) -> None:
    assert script.look() is None
    saved_s = script.saves()
    assert script.look(OUTPUT_LAG_S) is None  # not due
    script.scan.hasten()
    assert script.look() == saved_s


def test_a_clock_that_is_set_back_delays_no_look(script: Script) -> None:
    assert script.look() is None
    script.clock_is_off_s = -600.0
    saved_s = script.saves()
    assert script.look(PERIOD_S) == saved_s


def test_a_checkpoint_whose_time_is_ahead_of_the_clock_is_found_as_soon(script: Script) -> None:
    saved_s = script.saves()
    os.utime(script.folder.checkpoints / "state", (saved_s + 3_600.0,) * 2)
    assert script.look() is None
    assert script.look(OUTPUT_LAG_S) == saved_s + 3_600.0

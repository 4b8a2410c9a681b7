"""Paths that sweeps have recorded, read where a restore has put the folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_ops.moved_paths import FILE, MovedPaths

MOVED = MovedPaths((("/data/ann/work", "/srv/work"), ("/data/ann/work/data", "/data")))


@pytest.mark.parametrize(
    ("recorded", "now"),
    [
        ("/data/ann/work", "/srv/work"),
        ("/data/ann/work/train.py", "/srv/work/train.py"),
        ("--config=/data/ann/work/a.yaml", "--config=/srv/work/a.yaml"),
        ("/data/ann/work/lib:/opt/lib:/data/ann/work", "/srv/work/lib:/opt/lib:/srv/work"),
        ("/data/ann/work/data/x", "/data/x"),
        ("/data/ann/workshop", "/data/ann/workshop"),
        ("/mnt/data/ann/work", "/mnt/data/ann/work"),
        ('{"A": "/data/ann/work"}', '{"A": "/srv/work"}'),
        ('{"A": "/data/ann/work/{env:U}"}', '{"A": "/srv/work/{env:U}"}'),
        ("work", "work"),
        ("", ""),
    ],
)
def test_a_path_is_read_where_its_folder_is_now(recorded: str, now: str) -> None:
    assert MOVED.apply(recorded) == now


def test_a_second_move_leads_from_the_first_place_to_the_last() -> None:
    twice = MovedPaths((("/a", "/b"),)).then([("/b", "/c")])
    assert twice.apply("/a/x") == "/c/x"
    assert twice.apply("/b/x") == "/c/x"


def test_a_folder_that_is_back_has_not_moved() -> None:
    back = MovedPaths((("/a", "/b"),)).then([("/b", "/a")])
    assert back.apply("/a/x") == "/a/x"
    assert back.apply("/b/x") == "/a/x"


def test_the_file_says_what_was_written(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(MOVED.text())
    assert MovedPaths.load(tmp_path) == MOVED
    (tmp_path / FILE).write_text("[")
    assert MovedPaths.load(tmp_path) == MovedPaths()

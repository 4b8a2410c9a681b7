"""The logs of the workers other than the first: bounded, masked, in no way of the training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.trial.output.rank_log import BoundedFile, RankLog
from hermes_ops.trial.output.relay import Relay
from hermes_ops.trial.redaction import Mask


@given(st.integers(1, 40), st.lists(st.binary(max_size=60), max_size=12))
def test_a_bounded_file_holds_the_end_of_what_was_written_and_at_least_half_its_limit(
    limit_bytes: int, pieces: list[bytes]
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "rank-1.log")
        file, written = BoundedFile(path, limit_bytes), b""
        for piece in pieces:
            file.append(piece)
            written += piece
            kept = path.read_bytes()
            assert written.endswith(kept)
            assert min(len(written), limit_bytes // 2) <= len(kept) <= limit_bytes


@pytest.mark.parametrize("kind", ["folder", "link", "missing parent"])
def test_a_log_that_cannot_be_written_is_done_without(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "rank-1.log", tmp_path / "other"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(other)
    else:
        path = tmp_path / "no" / "rank-1.log"
    BoundedFile(path).append(b"x")
    assert not other.exists()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(writer)


def test_a_secret_that_comes_in_two_pieces_is_in_neither_the_file_nor_the_tail(
    tmp_path: Path, pipe: tuple[int, int]
) -> None:
    reader, writer = pipe
    log = RankLog(reader, tmp_path / "rank-1.log", Mask(["swordfish"]))
    log.say("a segment begins")
    for piece in (b"say sword", b"fish\nand ", b"more"):
        os.write(writer, piece)
        log.drain()
    assert (tmp_path / "rank-1.log").read_bytes() == (
        b"hermes-trial: a segment begins\nsay ***\nand more"
    )
    assert log.tail == ["say ***"]


def test_the_relay_reads_the_other_workers_and_passes_only_the_first_on(tmp_path: Path) -> None:
    (first, script), (second, other) = os.pipe(), os.pipe()
    reader, target = os.pipe()
    listened = bytearray()
    log = RankLog(second, tmp_path / "rank-1.log")
    relay = Relay(first, listened.extend, target, logs=[log])
    os.write(script, b"loss=1\n")
    os.write(other, b"loss=9\n")
    os.close(other)
    os.close(script)
    relay.drain(10.0)
    assert (bytes(listened), os.read(reader, 100)) == (b"loss=1\n", b"loss=1\n")
    assert (tmp_path / "rank-1.log").read_bytes() == b"loss=9\n"
    assert (log.tail, log.source) == (["loss=9"], None)
    for handle in (first, reader, target):
        os.close(handle)

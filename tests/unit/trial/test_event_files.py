"""Scalars in TensorBoard's event files."""

from __future__ import annotations

import base64
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.trial.event_files import MOST_RECORD_BYTES, EventFile, Restart, Scalar, masked_crc

# Written by the event file writer of tensorboard 2.21: a simple value beside a text, a scalar
# tensor of five types, one as raw content, a vector, the start of a session at step 5.
WRITTEN = base64.b64decode(
    "SAAAAAAAAAD+kkidCes4VYiHwNpBGg1icmFpbi5FdmVudDoyUi4KLHRlbnNvcmJvYXJkLnN1bW1hcnkud3JpdGVyLmV2"
    "ZW50X2ZpbGVfd3JpdGVyCKxdnzAAAAAAAAAAlfXQXwkAAAAAAECPQColCg8KCHZhbF9sb3NzFQAAQD8KEgoEbm90ZUIK"
    "CAcSAEIEdGV4dJE+hd8zAAAAAAAAAAynIFYJAAAAAABIj0AQASomCiQKCXQvZmxvYXQzMkIKCAESACoEAAAAwEoLCgkK"
    "B3NjYWxhcnN7RmdzNwAAAAAAAADn6MpZCQAAAAAAUI9AEAIqKgooCgl0L2Zsb2F0NjRCDggCEgAyCAAAAAAAAADASgsK"
    "CQoHc2NhbGFycyWTRDsyAAAAAAAAACQZVuwJAAAAAABYj0AQAyolCiMKCXQvZmxvYXQxNkIJCBMSAGoDgIADSgsKCQoH"
    "c2NhbGFyc6qYP/c3AAAAAAAAAOfoylkJAAAAAABgj0AQBCoqCigKB3QvaW50MzJCEAgDEgA6Cv7//////////wFKCwoJ"
    "CgdzY2FsYXJzU9sisDcAAAAAAAAA5+jKWQkAAAAAAGiPQBAFKioKKAoHdC9pbnQ2NEIQCAkSAFIK/v//////////AUoL"
    "CgkKB3NjYWxhcnNvchlcJAAAAAAAAABCK4BNCQAAAAAAcI9AEAYqFwoVCgdjb250ZW50QgoIARIAIgQAAMA/gGoT3CsA"
    "AAAAAAAAhhvDSwkAAAAAAHSPQBAGKh4KHAoGdmVjdG9yQhIIARIEEgIIAiIIAACAPwAAAEAhq1WyDwAAAAAAAABtUysJ"
    "CQAAAAAAeI9AEAU6AggB+X1r6g=="
)
HELD = [
    Scalar("val_loss", 0.75, 0, 1000.0),
    Scalar("t/float32", -2.0, 1, 1001.0),
    Scalar("t/float64", -2.0, 2, 1002.0),
    Scalar("t/float16", -2.0, 3, 1003.0),
    Scalar("t/int32", -2.0, 4, 1004.0),
    Scalar("t/int64", -2.0, 5, 1005.0),
    Scalar("content", 1.5, 6, 1006.0),
    Restart(5, 1007.0),
]


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    sums = [struct.pack("<I", masked_crc(part)) for part in (length, data)]
    return length + sums[0] + data + sums[1]


def test_scalars_are_read_as_tensorboard_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(WRITTEN)
    assert list(EventFile(path).new()) == HELD


@settings(deadline=None, max_examples=30)
@given(cuts=st.lists(st.integers(0, len(WRITTEN)), max_size=5))
def test_a_growing_file_gives_each_scalar_once(
    cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("growing") / "events"
    file, found = EventFile(path), []
    for end in (*sorted(cuts), len(WRITTEN)):
        path.write_bytes(WRITTEN[:end])
        found += file.new()
    assert found == HELD


@settings(deadline=None, max_examples=60)
@given(place=st.integers(0, len(WRITTEN) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_makes_no_scalar_that_was_not_there(
    place: int, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "events"
    damaged = bytearray(WRITTEN)
    damaged[place] ^= 1 << bit
    path.write_bytes(damaged)
    found = list(EventFile(path).new())
    assert [entry for entry in HELD if entry in found] == found


def test_a_damaged_record_is_left_out_and_the_next_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(WRITTEN.replace(b"val_loss", b"val_lost"))
    assert list(EventFile(path).new()) == HELD[1:]


def test_pictures_are_passed_over_and_rubbish_is_no_event(tmp_path: Path) -> None:
    path = tmp_path / "events"
    length = struct.pack("<Q", MOST_RECORD_BYTES + 1)
    picture = length + struct.pack("<I", masked_crc(length)) + b"x" * (MOST_RECORD_BYTES + 5)
    path.write_bytes(record(b"*" * 1000) + picture + WRITTEN)
    assert list(EventFile(path).new()) == HELD
    assert list(EventFile(tmp_path / "absent").new()) == []
    path.write_bytes(b"epoch=1 loss=0.5\n" * 100)
    assert list(EventFile(path).new()) == []


def test_a_part_of_a_great_file_is_read_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(WRITTEN * 3)
    file = EventFile(path)
    assert list(file.new(most_bytes=1)) == []
    assert list(file.new(most_bytes=1)) == HELD[:1]
    assert list(file.new()) == [*HELD[1:], *HELD, *HELD]

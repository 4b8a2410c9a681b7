"""What a script writes for TensorBoard becomes its trial's metrics."""

from __future__ import annotations

import base64
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.trial.metrics import Metric
from hermes_ops.trial.tensorboard import (
    MOST_RECORD_BYTES,
    EventEntry,
    EventFile,
    EventRestart,
    Scalar,
    ScalarCurve,
    TensorBoardReader,
    masked_crc,
)

OURS = os.getpid()


class Writer:
    """Writes an event file as TensorFlow and PyTorch name it."""

    def __init__(self, folder: Path, pid: int = OURS, serial: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.1700000000.{socket.gethostname()}.{pid}.{serial}"
        self.path = folder / name
        self.time_s = 1.0 + serial * 1000

    def add(self, tag: str, value: float, step: int) -> None:
        text = tag.encode()
        summary = b"\x0a" + bytes([len(text)]) + text + b"\x15" + struct.pack("<f", value)
        self.write(step, b"\x2a" + bytes([len(summary) + 2, 0x0A, len(summary)]) + summary)

    def begin_again(self, step: int) -> None:
        self.write(step, b"\x3a\x02\x08\x01")

    def write(self, step: int, rest: bytes) -> None:
        self.time_s += 1.0
        data = b"\x09" + struct.pack("<d", self.time_s) + b"\x10" + bytes([step]) + rest
        length = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", masked_crc(part)) for part in (length, data)]
        with self.path.open("ab") as stream:
            stream.write(length + sums[0] + data + sums[1])


def board(root: Path, objective: str = "val_loss") -> TensorBoardReader:
    return TensorBoardReader(root / "runs", objective, root / "event_files.json")


def values(found: Iterable[Metric]) -> list[tuple[str, float, int]]:
    return [(m.name, m.value, m.step) for m in found]


def test_the_objective_counts_its_own_steps_and_takes_the_others_with_it(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "runs" / "Nov21_host")
    for epoch in range(2):
        for batch in range(3):
            writer.add("loss", 10.0 * epoch + batch, 50 * epoch + batch)
        writer.add("val_loss", 1.0 - 0.5 * epoch, 50 * epoch + 2)
        writer.add("lr", 0.25, 50 * epoch + 2)
    found = board(tmp_path).read_new(OURS)
    assert values(found) == [
        ("val_loss", 1.0, 1),
        ("loss", 2.0, 1),
        ("lr", 0.25, 1),
        ("val_loss", 0.5, 2),
        ("loss", 12.0, 2),
        ("lr", 0.25, 2),
    ]


def test_folders_of_keras_are_parts_of_the_names(tmp_path: Path) -> None:
    train, validation = (Writer(tmp_path / "runs" / "a" / n) for n in ("train", "validation"))
    for epoch in range(2):
        train.add("epoch_loss", 2.0, epoch)
        validation.add("epoch_loss", 1.0, epoch)
    found = values(board(tmp_path, "validation/epoch_loss").read_new(OURS))
    assert sorted(found) == [
        ("train/epoch_loss", 2.0, 1),
        ("train/epoch_loss", 2.0, 2),
        ("validation/epoch_loss", 1.0, 1),
        ("validation/epoch_loss", 1.0, 2),
    ]


def test_files_of_other_processes_and_older_ones_do_not_count(tmp_path: Path) -> None:
    other = Writer(tmp_path / "runs", pid=1)
    old = Writer(tmp_path / "runs", serial=7)
    for writer in (other, old):
        writer.add("val_loss", 1.0, 0)
    os.utime(old.path, (1.0, 1.0))
    assert board(tmp_path).read_new(OURS) == []


def test_a_file_without_a_process_in_its_name_counts_while_it_is_open(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "runs")
    writer.path = writer.path.with_name("events.out.tfevents.1700000000.elsewhere")
    writer.add("val_loss", 1.0, 0)
    assert board(tmp_path).read_new(OURS) == []
    with writer.path.open("ab"):
        assert values(board(tmp_path).read_new(OURS)) == [("val_loss", 1.0, 1)]


def test_a_resumed_script_goes_on_counting_where_its_checkpoint_was(tmp_path: Path) -> None:
    first = Writer(tmp_path / "runs" / "first")
    for epoch in range(3):
        first.add("val_loss", 3.0 - epoch, epoch)
    assert [m.step for m in board(tmp_path).read_new(OURS)] == [1, 2, 3]
    second = Writer(tmp_path / "runs" / "second", serial=1)
    second.begin_again(2)
    for epoch in range(2, 4):
        second.add("val_loss", 0.5, epoch)
    found = values(board(tmp_path).read_new(OURS))
    assert [step for _, _, step in found] == [1, 2, 3, 3, 4]
    assert {name for name, _, _ in found} == {"val_loss"}


def test_what_a_restart_makes_void_is_not_stored(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "runs")
    for value in (1.0, 2.0, 3.0):
        writer.add("val_loss", value, int(value))
    writer.begin_again(2)
    writer.add("val_loss", 9.0, 2)
    assert values(board(tmp_path).read_new(OURS)) == [("val_loss", 1.0, 1), ("val_loss", 9.0, 2)]


def test_it_looks_once_a_second_and_at_the_end(tmp_path: Path) -> None:
    writer, ours = Writer(tmp_path / "runs"), board(tmp_path)
    assert ours.read_new(OURS) == []
    writer.add("val_loss", 1.0, 1)
    assert ours.read_new(OURS) == []
    assert values(ours.read_new(OURS, final=True)) == [("val_loss", 1.0, 1)]
    assert ours.read_new(OURS, final=True) == []


def test_an_objective_in_two_folders_is_that_of_the_first(tmp_path: Path) -> None:
    curve = ScalarCurve("loss", {})
    assert values(curve.add("a/loss", Scalar("loss", 1.0, 0, 0.0))) == [("loss", 1.0, 1)]
    assert values(curve.add("b/loss", Scalar("loss", 2.0, 0, 0.0))) == [("b/loss", 2.0, 1)]


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
    EventRestart(5, 1007.0),
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
    file = EventFile(path)
    found: list[EventEntry] = []
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

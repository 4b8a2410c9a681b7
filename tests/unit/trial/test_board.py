"""What a script writes for TensorBoard becomes its trial's metrics."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from hermes_ops.trial.board import Board, Curve
from hermes_ops.trial.event_files import Scalar, masked_crc

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


def board(root: Path, objective: str = "val_loss") -> Board:
    return Board(root / "runs", objective, root / "event_files.json")


def values(found: list) -> list[tuple[str, float, int]]:
    return [(m.name, m.value, m.step) for m in found]


def test_the_objective_counts_its_own_steps_and_takes_the_others_with_it(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "runs" / "Nov21_host")
    for epoch in range(2):
        for batch in range(3):
            writer.add("loss", 10.0 * epoch + batch, 50 * epoch + batch)
        writer.add("val_loss", 1.0 - 0.5 * epoch, 50 * epoch + 2)
        writer.add("lr", 0.25, 50 * epoch + 2)
    found = board(tmp_path).look(OURS)
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
    found = values(board(tmp_path, "validation/epoch_loss").look(OURS))
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
    assert board(tmp_path).look(OURS) == []


def test_a_file_without_a_process_in_its_name_counts_while_it_is_open(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "runs")
    writer.path = writer.path.with_name("events.out.tfevents.1700000000.elsewhere")
    writer.add("val_loss", 1.0, 0)
    assert board(tmp_path).look(OURS) == []
    with writer.path.open("ab"):
        assert values(board(tmp_path).look(OURS)) == [("val_loss", 1.0, 1)]


def test_a_resumed_script_goes_on_counting_where_its_checkpoint_was(tmp_path: Path) -> None:
    first = Writer(tmp_path / "runs" / "first")
    for epoch in range(3):
        first.add("val_loss", 3.0 - epoch, epoch)
    assert [m.step for m in board(tmp_path).look(OURS)] == [1, 2, 3]
    second = Writer(tmp_path / "runs" / "second", serial=1)
    second.begin_again(2)
    for epoch in range(2, 4):
        second.add("val_loss", 0.5, epoch)
    found = values(board(tmp_path).look(OURS))
    assert [step for _, _, step in found] == [1, 2, 3, 3, 4]
    assert {name for name, _, _ in found} == {"val_loss"}


def test_what_a_restart_makes_void_is_not_stored(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "runs")
    for value in (1.0, 2.0, 3.0):
        writer.add("val_loss", value, int(value))
    writer.begin_again(2)
    writer.add("val_loss", 9.0, 2)
    assert values(board(tmp_path).look(OURS)) == [("val_loss", 1.0, 1), ("val_loss", 9.0, 2)]


def test_it_looks_once_a_second_and_at_the_end(tmp_path: Path) -> None:
    writer, ours = Writer(tmp_path / "runs"), board(tmp_path)
    assert ours.look(OURS) == []
    writer.add("val_loss", 1.0, 1)
    assert ours.look(OURS) == []
    assert values(ours.look(OURS, final=True)) == [("val_loss", 1.0, 1)]
    assert ours.look(OURS, final=True) == []


def test_an_objective_in_two_folders_is_that_of_the_first(tmp_path: Path) -> None:
    curve = Curve("loss", {})
    assert values(curve.take("a/loss", Scalar("loss", 1.0, 0, 0.0))) == [("loss", 1.0, 1)]
    assert values(curve.take("b/loss", Scalar("loss", 2.0, 0, 0.0))) == [("b/loss", 2.0, 1)]

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hermes_ops.trial.retention import KEEP_VARIABLE, CheckpointRetention, retention_of, surplus


def test_all_but_the_newest_and_the_best_are_surplus() -> None:
    names = ["a", "b", "c", "d", "e"]
    assert surplus(names, 2, "b") == ["a", "c"]
    assert surplus(names, 2, "e") == ["a", "b", "c"]
    assert surplus(names, 2, None) == ["a", "b", "c"]
    assert surplus(names, 5, None) == []
    assert surplus([], 1, "gone") == []


class World:
    """A trial's folder, and a script that reports a value and writes a checkpoint each second."""

    def __init__(self, root: Path, direction: str = "minimize", keep: int = 1) -> None:
        self.folder = root / "checkpoints"
        self.folder.mkdir(exist_ok=True)
        self.retention_of = CheckpointRetention(root, self.folder, keep, direction)

    def epoch(self, number: int, value: float, *, folder: bool = False) -> None:
        self.retention_of.value(value, float(number))
        path = self.folder / f"epoch-{number}"
        if folder:
            path.mkdir()
            (path / "weights").write_text("w")
        else:
            path.write_text("w")
        os.utime(path, (number + 0.01, number + 0.01))
        self.retention_of.checkpointed()

    def names(self) -> list[str]:
        return sorted(p.name for p in self.folder.iterdir())


@pytest.mark.parametrize("folder", [False, True])
def test_the_newest_and_the_best_checkpoint_stay(tmp_path: Path, folder: bool) -> None:
    world = World(tmp_path)
    for number, value in enumerate([0.9, 0.3, 0.5, 0.4], start=1):
        world.epoch(number, value, folder=folder)
    assert world.names() == ["epoch-2", "epoch-4"]


def test_the_best_is_known_to_the_segments_to_come(tmp_path: Path) -> None:
    first = World(tmp_path, "maximize", keep=2)
    for number, value in enumerate([0.1, 0.9, 0.2], start=1):
        first.epoch(number, value)
    later = World(tmp_path, "maximize", keep=2)
    later.epoch(4, 0.3)
    later.epoch(5, 0.4)
    assert later.names() == ["epoch-2", "epoch-4", "epoch-5"]
    later.epoch(6, 0.95)
    assert later.names() == ["epoch-5", "epoch-6"]


@pytest.mark.parametrize("folder", [False, True])
def test_a_link_to_the_newest_checkpoint_is_none_and_leads_to_it_for_ever(
    tmp_path: Path, folder: bool
) -> None:
    world = World(tmp_path)
    for number, value in enumerate([0.3, 0.9, 0.5, 0.4], start=1):
        (world.folder / "latest").unlink(missing_ok=True)
        (world.folder / "latest").symlink_to(f"epoch-{number}")
        world.epoch(number, value, folder=folder)
    assert world.names() == ["epoch-1", "epoch-4", "latest"]
    (world.folder / "chosen").symlink_to(world.folder / "epoch-4")
    world.epoch(5, 0.6, folder=folder)
    assert world.names() == ["chosen", "epoch-1", "epoch-4", "epoch-5", "latest"]


def test_links_to_checkpoints_elsewhere_count_as_checkpoints(tmp_path: Path) -> None:
    world = World(tmp_path)
    for number in range(1, 4):
        world.retention_of.value(float(number), float(number))
        elsewhere = tmp_path / f"real-{number}"
        elsewhere.write_text("w")
        os.utime(elsewhere, (number + 0.01, number + 0.01))
        (world.folder / f"epoch-{number}").symlink_to(elsewhere)
        world.retention_of.checkpointed()
    assert world.names() == ["epoch-1", "epoch-3"]


def test_unfinished_files_and_values_that_are_not_numbers_do_not_count(tmp_path: Path) -> None:
    world = World(tmp_path)
    for name in (".hidden", "epoch-0.tmp"):
        (world.folder / name).write_text("w")
    world.epoch(1, 0.5)
    world.epoch(2, float("nan"))
    world.epoch(3, 0.9)
    assert world.names() == [".hidden", "epoch-0.tmp", "epoch-1", "epoch-3"]


@pytest.mark.parametrize(
    ("said", "keeps"), [("3", True), ("1", True), ("", False), ("0", False), ("x", False)]
)
def test_checkpoints_are_deleted_only_when_the_sweep_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, keeps: bool
) -> None:
    monkeypatch.setenv(KEEP_VARIABLE, said)
    assert (retention_of(tmp_path, tmp_path) is not None) == keeps
    monkeypatch.delenv(KEEP_VARIABLE)
    assert retention_of(tmp_path, tmp_path) is None

"""Checkpoints on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hermes_ops.trial.keras import checkpoint_files as module
from hermes_ops.trial.keras.checkpoint_files import Checkpoint, CheckpointFiles
from hermes_ops.trial.keras.python_state import is_plain


def write(store: CheckpointFiles, value: float, **header: object) -> int:
    array = np.full((2, 3), value, dtype="float32")
    return store.write(header, [("a", array), ("scalar", np.array(7))], b"objects")


def newest(store: CheckpointFiles) -> Checkpoint:
    checkpoint = store.newest()
    assert checkpoint is not None
    return checkpoint


def value(store: CheckpointFiles) -> float:
    arrays = newest(store).arrays(
        lambda data, kind, shape: np.frombuffer(data, kind).reshape(shape)
    )
    assert arrays["scalar"] == 7
    return float(arrays["a"][1, 2])


def test_the_newest_checkpoint_is_read_back(tmp_path: Path) -> None:
    store = CheckpointFiles(tmp_path)
    write(store, 1.0, step=1)
    write(store, 2.0, step=2)
    assert value(store) == 2.0
    assert newest(store).header == {"step": 2}
    assert newest(store).objects() == b"objects"


@pytest.mark.parametrize("name", ["arrays.bin", "objects.pickle", "manifest.json"])
def test_a_torn_checkpoint_is_skipped_for_the_one_before(tmp_path: Path, name: str) -> None:
    store = CheckpointFiles(tmp_path)
    write(store, 1.0)
    torn = tmp_path / f"keras-{write(store, 2.0):06d}" / name
    torn.write_bytes(torn.read_bytes()[:-3])
    assert value(store) == 1.0


def test_a_missing_file_and_a_foreign_folder_are_no_checkpoints(tmp_path: Path) -> None:
    store = CheckpointFiles(tmp_path)
    (tmp_path / f"keras-{write(store, 1.0):06d}" / "arrays.bin").unlink()
    (tmp_path / "keras-other").mkdir()
    assert store.newest() is None


def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointFiles(tmp_path)
    write(store, 1.0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write_file", full)
    with pytest.raises(OSError, match="No space"):
        write(store, 2.0)
    assert value(store) == 1.0
    assert [p.name for p in tmp_path.iterdir()] == ["keras-000001"]


def test_only_what_is_kept_stays_and_serials_go_on(tmp_path: Path) -> None:
    store = CheckpointFiles(tmp_path)
    for number in range(4):
        write(store, number)
    store.keep([2, 4])
    assert sorted(store.serials()) == [2, 4]
    assert write(store, 9.0) == 5


def test_an_unfinished_write_is_removed_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / ".keras-7").mkdir(parents=True)
    CheckpointFiles(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_plain_data_are_told_from_objects() -> None:
    assert is_plain({"best": np.float32(1.0), "weights": [np.zeros(3)], "n": (1, None, "x")})
    assert not is_plain(np.array([object()]))
    assert not is_plain([lambda: 1])
    assert not is_plain(object())

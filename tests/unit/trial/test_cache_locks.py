"""Locks of caches in files, which a process leaves that is stopped while it writes one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.trial.keras.cache_locks import (
    cache_files,
    note_caches,
    release_locks,
    shared_caches,
)


class Part:
    """As a dataset of tf.data."""

    def __init__(self, *inputs: Any) -> None:
        self._inputs = lambda: inputs
        self._functions: Callable[[], list[Any]] = list


class CacheDataset(Part):
    def __init__(self, name: str, *inputs: Any) -> None:
        super().__init__(*inputs)
        self._filename = SimpleNamespace(numpy=name.encode)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lock(name: str) -> Path:
    path = Path(f"{name}_0.lockfile")
    path.write_text("Created at: 1")
    return path


def note(name: str = "cache") -> None:
    note_caches(Path(), {"x": Part(CacheDataset(name, Part())), "validation_data": None})


def test_only_caches_in_local_files_have_a_path() -> None:
    data = Part(CacheDataset("", CacheDataset("a", CacheDataset("gs://bucket/b"))))
    assert list(cache_files(data)) == [os.path.abspath("a")]
    assert list(cache_files([1, 2])) == []


def test_the_lock_of_an_earlier_process_of_the_trial_is_released() -> None:
    note()
    mine = lock("cache")
    release_locks(Path())
    assert not mine.exists()
    release_locks(Path())


def test_a_lock_that_another_trial_holds_stays() -> None:
    before = lock("cache")
    note()
    release_locks(Path())
    assert before.exists()
    before.unlink()
    note()
    later = lock("cache")
    made_s = later.stat().st_mtime
    os.utime(later, (made_s + 20, made_s + 20))
    Path("segments.jsonl").write_text(
        f'{{"start_s": {made_s - 10}}}\n{{"end_s": {made_s + 10}}}\n{{"start_s": {made_s + 30}}}\n'
    )
    release_locks(Path())
    assert later.exists()


def test_a_cache_that_is_complete_is_not_noted() -> None:
    Path("cache.index").touch()
    note()
    assert not Path("caches.jsonl").exists()


def said_of(name: str, *, shares_directory: bool = True) -> str:
    data = {"x": Part(CacheDataset(name, Part())), "validation_data": None}
    return shared_caches(data, Path(), shares_directory) or ""


def test_a_cache_in_a_working_directory_that_trials_share_is_named() -> None:
    assert "may share: cache;" in said_of("cache")
    assert said_of("cache", shares_directory=False) == ""
    assert said_of("") == said_of("gs://bucket/b") == ""


def test_a_complete_cache_is_named_unless_this_trial_has_written_it(tmp_path: Path) -> None:
    path = str(tmp_path / "cache")
    assert said_of(path) == ""
    note(path)
    Path(f"{path}.index").touch()
    assert said_of(path) == ""
    other = str(tmp_path / "other")
    Path(f"{other}.index").touch()
    assert f"may share: {other};" in said_of(other)

"""Lock files of `tf.data`'s `cache(filename)` that remain when a process ends in its first epoch.

TensorFlow refuses to write a cache while its lock file exists, so a stopped trial could not resume.
A journal in the trial's folder lists the caches that its processes have begun to write.
"""
# ruff: noqa: ANN401 - the objects of TensorFlow have no types here

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hermes_ops.trial.files import Folder, Follower, append_lines, now_ms
from hermes_ops.trial.keras.pipeline import is_pipeline, parts

_JOURNAL = "caches.jsonl"


def note_caches(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Note the files in which the data of a `fit` are about to be cached."""
    prefixes = {
        prefix
        for name in ("x", "validation_data")
        for prefix in cache_files(arguments.get(name))
        if not os.path.exists(f"{prefix}.index")  # else the cache is complete, and only read
    }
    lines = [
        {"prefix": prefix, "before": _locks(prefix), "begun_ms": now_ms()}
        for prefix in sorted(prefixes)
    ]
    with contextlib.suppress(OSError):  # a full disk: there is no cache either
        append_lines(folder / _JOURNAL, lines)


def cache_files(dataset: Any) -> Iterator[str]:
    """Yield the paths at which a pipeline caches into files."""
    for part in parts(dataset) if is_pipeline(dataset) else ():
        if type(part).__name__ == "CacheDataset":
            name = os.fsdecode(part._filename.numpy())
            if name and "://" not in name:
                yield os.path.abspath(name)


def release_locks(folder: Path) -> None:
    """Delete the locks of this trial's earlier processes, all of which have ended.

    Another trial may cache into the same file. A lock that existed before this trial began the
    cache, or that was made after its last segment ended, belongs to that trial and stays.
    """
    ends_s = (line.get("end_s", 0.0) for line in Follower(Folder(folder).segments).new())
    ended_ms = 1000 * max(ends_s, default=0.0)
    for line in Follower(folder / _JOURNAL).new():
        for lock in set(_locks(line["prefix"])) - set(line["before"]):
            made_ms = _changed_ms(lock)
            is_later = line["begun_ms"] <= ended_ms < made_ms
            if made_ms >= line["begun_ms"] - 1000 and not is_later:
                with contextlib.suppress(OSError):
                    os.unlink(lock)


def _locks(prefix: str) -> list[str]:
    return glob.glob(f"{glob.escape(prefix)}_*.lockfile")


def _changed_ms(path: str) -> float:
    try:
        return os.stat(path).st_mtime * 1000
    except OSError:
        return 0.0

"""Files of `tf.data`'s `cache(filename)`: lock files of processes that ended, shared caches.

TensorFlow refuses to write a cache while its lock file exists, so a stopped trial could not resume.
A journal in the trial's folder lists the caches that its processes have begun to write. A complete
cache is read as it is, whichever process has written it.
"""
# ruff: noqa: ANN401 - the objects of TensorFlow have no types here

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from hermes_ops.trial.files import Folder, Follower, append_lines, now_ms
from hermes_ops.trial.keras.pipeline import is_pipeline, parts

_JOURNAL = "caches.jsonl"
_DATA = ("x", "validation_data")  # the arguments of `fit` that may be pipelines


def note_caches(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Note the files in which the data of a `fit` are about to be cached."""
    prefixes = {
        prefix
        for name in _DATA
        for prefix in cache_files(arguments.get(name))
        if not _is_complete(prefix)  # else the cache is only read
    }
    lines = [
        {"prefix": prefix, "before": _locks(prefix), "begun_ms": now_ms()}
        for prefix in sorted(prefixes)
    ]
    with contextlib.suppress(OSError):  # a full disk: there is no cache either
        append_lines(folder / _JOURNAL, lines)


def cache_files(dataset: Any) -> Iterator[str]:
    """Yield the paths at which a pipeline caches into files."""
    return map(os.path.abspath, _cache_names(dataset))


def _cache_names(dataset: Any) -> Iterator[str]:
    for part in parts(dataset) if is_pipeline(dataset) else ():
        if type(part).__name__ == "CacheDataset":
            name = os.fsdecode(part._filename.numpy())
            if name and "://" not in name:
                yield name


def shared_caches(arguments: Mapping[str, Any], folder: Path, shares_directory: bool) -> str | None:
    """Return the line that names caches of other trials; before they are noted as this trial's.

    `shares_directory`: whether the working directory is not the trial's own.
    """
    own_prefixes = {line.get("prefix") for line in Follower(folder / _JOURNAL).new()}
    names = {
        name
        for argument in _DATA
        for name in _cache_names(arguments.get(argument))
        if _is_shared(name, own_prefixes, shares_directory)
    }
    if not names:
        return None
    return (
        f"its data are cached in files that other trials may share: {', '.join(sorted(names))}; "
        "one that finds them complete trains on them, also if they were made by another "
        "configuration, and of two that write them at the same time one fails. Put them into "
        "$HERMES_TRIAL_DIR or write trial.directory: copy"
    )


def _is_shared(name: str, own_prefixes: Collection[object], shares_directory: bool) -> bool:
    if not os.path.isabs(name):
        return shares_directory
    return _is_complete(name) and name not in own_prefixes


def _is_complete(prefix: str) -> bool:
    return os.path.exists(f"{prefix}.index")


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

"""Paths of callbacks that differ in each segment, such as folders that are named for the time.

The script looks for its files under the newest names, so files of earlier segments are continued
there.
"""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_FIELDS = re.compile(r"\{[^{}]*\}")  # of ModelCheckpoint: `{epoch:02d}-{val_loss:.2f}.keras`
_SECTION = re.compile(r"(\[|\]|\*|\?)")


def match_callbacks(callbacks: Iterable[Any], saved: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    """Yield pairs of a callback and its saved entry: the n-th of each type belong together.

    Rank 0 may have callbacks that others lack, anywhere in the list.
    """
    left: dict[str, list[Mapping[str, Any]]] = {}
    for entry in saved:
        left.setdefault(entry["type"], []).append(entry)
    for callback in callbacks:
        entries = left.get(type(callback).__name__)
        if entries:
            yield callback, entries.pop(0)


def path_attributes(callbacks: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the attributes of callbacks that may be paths, as the script has set them.

    TensorBoard is left out: its event files stay where each process has written them.
    """
    return [
        {"type": type(callback).__name__, "texts": dict(_texts(callback))}
        for callback in callbacks
        if type(callback).__name__ != "TensorBoard"
    ]


def _texts(callback: Any) -> Iterator[tuple[str, str]]:
    for name, value in vars(callback).items():
        if isinstance(value, (str, os.PathLike)):
            text = os.fspath(value)
            if isinstance(text, str) and text:
                yield name, text


def renamed_paths(
    callbacks: Iterable[Any], saved: Iterable[Mapping[str, Any]] | None
) -> dict[str, str]:
    """Return the new path by the old one, where they differ; `saved` is by `path_attributes`."""
    renamed: dict[str, str] = {}
    for callback, entry in match_callbacks(callbacks, saved or ()):
        for name, text in _texts(callback):
            before = entry["texts"].get(name, text)
            if before != text:
                renamed[before] = text
    return renamed


def renamed_file(path: str, renamed: Mapping[str, str]) -> str:
    """Return a file's new path, if its path or that of a folder above it was renamed."""
    for before, now in renamed.items():
        if path == before:
            return now
        if path.startswith(os.path.join(before, "")):
            return os.path.join(now, os.path.relpath(path, before))
    return path


def link_files(renamed: Mapping[str, str]) -> None:
    """Link each file whose own path was renamed to its new path, unless that exists."""
    for before, now in renamed.items():
        if not _FIELDS.search(before):
            link_file(before, now)
        elif os.path.dirname(before) != os.path.dirname(now):
            for path in glob.glob(_FIELDS.sub("*", _SECTION.sub(r"[\1]", before))):
                link_file(path, os.path.join(os.path.dirname(now), os.path.basename(path)))


def link_file(before: str, now: str) -> None:
    """Link or copy a file to a second path, unless something exists there."""
    if not os.path.isfile(before) or os.path.lexists(now):
        return
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(os.path.abspath(now)), exist_ok=True)
        try:
            os.link(before, now)
        except OSError:  # on another file system
            shutil.copy2(before, now)

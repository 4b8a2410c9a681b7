"""Paths that a script names anew at each start: files of callbacks go on under the new name.

A folder that is named for the time, or a temporary one, is another folder in each segment. The
script looks for its files in the newest.
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


def matched(callbacks: Iterable[Any], saved: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    """Yield each callback with its saved entry: the n-th of a type with the n-th of that type.

    Rank 0 may have callbacks that others lack, anywhere in the list.
    """
    left: dict[str, list[Mapping[str, Any]]] = {}
    for entry in saved:
        left.setdefault(entry["type"], []).append(entry)
    for callback in callbacks:
        entries = left.get(type(callback).__name__)
        if entries:
            yield callback, entries.pop(0)


def texts_of(callbacks: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the attributes of callbacks that may be paths, as the script has set them.

    Without TensorBoard: its event files stay where each process has written them.
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


def moved_paths(
    callbacks: Iterable[Any], saved: Iterable[Mapping[str, Any]] | None
) -> dict[str, str]:
    """Return what is named differently since `saved`, which `texts_of` returned: old to new."""
    moved: dict[str, str] = {}
    for callback, entry in matched(callbacks, saved or ()):
        for name, text in _texts(callback):
            before = entry["texts"].get(name, text)
            if before != text:
                moved[before] = text
    return moved


def moved_file(path: str, moved: Mapping[str, str]) -> str:
    """Return a file's path after the move: its own, or that of a folder above it, may be named."""
    for before, now in moved.items():
        if path == before:
            return now
        if path.startswith(os.path.join(before, "")):
            return os.path.join(now, os.path.relpath(path, before))
    return path


def link_files(moved: Mapping[str, str]) -> None:
    """Let files that are named one by one be there under their new names, unless they are."""
    for before, now in moved.items():
        if not _FIELDS.search(before):
            link_file(before, now)
        elif os.path.dirname(before) != os.path.dirname(now):
            for path in glob.glob(_FIELDS.sub("*", _SECTION.sub(r"[\1]", before))):
                link_file(path, os.path.join(os.path.dirname(now), os.path.basename(path)))


def link_file(before: str, now: str) -> None:
    """Let a file be there under a second name too, unless another one is."""
    if not os.path.isfile(before) or os.path.lexists(now):
        return
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(os.path.abspath(now)), exist_ok=True)
        try:
            os.link(before, now)
        except OSError:  # on another file system
            shutil.copy2(before, now)

"""Callbacks of Keras whose files trials share: backups are left out, the others are named."""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

_NAME = "BackupAndRestore"
_PACKAGES = ("keras", "tf_keras", "tensorflow")
_FILES = ("filepath", "filename")  # of ModelCheckpoint and CSVLogger


def take_out_backups(arguments: MutableMapping[str, Any]) -> str | None:
    """Remove each `BackupAndRestore` from the callbacks of a `fit`; return the line that says so.

    Its folder is usually relative, so that a trial would begin at the epoch of another one.
    """
    callbacks: Any = arguments.get("callbacks")
    found = [member for member in _members(callbacks) if _is_backup(member)]
    if not found:
        return None
    if hasattr(callbacks, "callbacks"):  # a CallbackList that the script has made
        callbacks.callbacks[:] = [c for c in callbacks.callbacks if not _is_backup(c)]
    else:
        arguments["callbacks"] = [c for c in _members(callbacks) if not _is_backup(c)]
    folders = ", ".join(sorted({str(getattr(c, "backup_dir", "its folder")) for c in found}))
    return (
        f"{_NAME} is left out: Hermes resumes this fit itself, and another trial "
        f"might have left its epoch in {folders}"
    )


def shared_files(arguments: Mapping[str, Any], trial_folder: Path) -> str | None:
    """Return the line that names files which callbacks write where other trials write theirs."""
    try:
        if Path.cwd().is_relative_to(trial_folder):
            return None
    except OSError:  # it is there no more
        return None
    found = {
        f"{type(callback).__name__} ({name})"
        for callback in _members(arguments.get("callbacks"))
        for name in (str(getattr(callback, key, "") or "") for key in _FILES)
        if name and "://" not in name and not os.path.isabs(name)
    }
    if not found:
        return None
    return (
        f"files in the working directory, which all trials of the sweep share: "
        f"{', '.join(sorted(found))}; unless their names differ from trial to trial, put them into "
        "$HERMES_TRIAL_DIR or write trial.directory: copy"
    )


def _members(callbacks: Any) -> Iterator[Any]:
    if callbacks is None:
        return
    members = getattr(callbacks, "callbacks", callbacks)
    for member in members if isinstance(members, (list, tuple)) else [members]:
        if isinstance(member, (list, tuple)):
            yield from _members(member)  # Keras flattens its callbacks
        else:
            yield member


def _is_backup(callback: Any) -> bool:
    return any(
        kind.__name__ == _NAME and kind.__module__.split(".")[0] in _PACKAGES
        for kind in type(callback).__mro__
    )

"""Files that callbacks write: after a stop they are as they were at the checkpoint.

A killed process leaves rows of an epoch that is trained again, and a callback that starts again may
empty its file. So a checkpoint records each file that a callback has written: the content of a
small one, the length of a large one. Paths may differ in each segment, such as
folders that are named for the time: files of earlier segments are continued under the newest names.
"""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

import builtins
import contextlib
import glob
import io
import json
import os
import re
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from hermes_ops.trial.files import append_lines

_MOST_BYTES = 4 << 20
_MOST_MODEL_BYTES = 32 << 20
_JOURNAL = "event-files.jsonl"
_COUNTERS = (
    "_global_train_batch", "_global_test_batch", "_previous_epoch_iterations",
    "_train_accumulated_time", "_should_write_train_graph",
)  # fmt: skip
"""The counters of TensorBoard's callback; its writers and traces belong to the process."""


class CallbackFiles:
    """The files of one fit's callbacks; `writes` counts openings over all fits of the process.

    Complete fits are not run again: each puts back the files as it left them, and `later` keeps
    what the files held before, at the time of the stop. A reader, which is a rank that does not own
    the trial, puts nothing back.
    """

    def __init__(
        self,
        callbacks: Iterable[Any],
        saved: Mapping[str, Any],
        folder: Path,
        fit: int,
        writes: dict[str, int],
        *,
        later: dict[str, bytes],
        is_reader: bool = False,
    ) -> None:
        self._callbacks = list(callbacks)
        self._is_reader = is_reader
        self._saved = saved
        self._writes = writes
        self._later = later
        writes.update({path: entry["writes"] for path, entry in saved.items()})
        self._written = set(saved)
        self._appended = {path for path, entry in saved.items() if entry["appended"]}
        self._journal = folder / _JOURNAL
        self._fit = fit
        self._mark = f".{socket.gethostname()}.{os.getpid()}."
        self._events_before: set[str] = set()

    # -- before and after the callbacks begin ------------------------------------------------------

    def prepare(self) -> None:
        """Remove what was written after the checkpoint, before the callbacks begin."""
        self._begin_events()
        self.put_back()
        for callback in self._callbacks:
            if _name(callback) == "CSVLogger" and self._saved:
                callback.append = os.path.exists(str(callback.filename))
            if _name(callback) == "TensorBoard" and self._saved:
                callback.write_graph = False

    def follow(self, moved: Mapping[str, str]) -> None:
        """Continue files under new names, where the script has given its callbacks other paths."""
        if not moved or self._is_reader:
            return
        link_files(moved)
        moved = {_relative(before): _relative(now) for before, now in moved.items()}
        for path, entry in dict(self._saved).items():
            now = path if ".tfevents." in path else renamed_file(path, moved)
            if now != path:
                link_file(path, now)
                self._rename(path, now, entry)

    def _rename(self, path: str, now: str, entry: Mapping[str, Any]) -> None:
        self._saved = {now if key == path else key: e for key, e in self._saved.items()}
        self._writes[now] = entry["writes"]
        for paths in (self._written, self._appended):
            if path in paths:
                paths.remove(path)
                paths.add(now)

    def missing(self) -> list[str]:
        """Return the files that are gone, and too large for the checkpoint to hold them."""
        return [
            path
            for path, entry in self._saved.items()
            if entry["content"] is None and not os.path.exists(path)
        ]

    def put_back(self) -> None:
        """Make the files what they were; a callback that has begun may have emptied its own."""
        if self._is_reader:
            return
        for path, entry in self._saved.items():
            put_back(path, entry)

    def put_back_end(self) -> None:
        """Restore the files to the end of this complete fit; `put_forward` undoes that."""
        if self._is_reader:
            return
        for path, entry in self._saved.items():
            present = read_entry(path, _MOST_BYTES)
            if present is None or present["content"] is not None:
                put_back(path, entry)
            if present is not None and present["content"] is not None:
                self._later.setdefault(path, present["content"])

    def put_forward(self) -> None:
        """Restore the files to the moment at which the trial was stopped in this fit."""
        for path, content in self._later.items():
            put_back(path, {"content": content, "size": len(content), "appended": True})
        self._later.clear()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Note the files that this thread opens for writing meanwhile."""
        original, io_original = builtins.open, io.open
        opened = self._noting(original, threading.get_ident())
        builtins.open = io.open = opened
        try:
            yield
        finally:
            builtins.open, io.open = original, io_original

    def _noting(self, original: Callable[..., Any], thread: int) -> Callable[..., Any]:
        def noting(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            writes = set(mode) & set("wax+") and isinstance(file, (str, os.PathLike))
            if writes and threading.get_ident() == thread:
                self._note(_relative(os.fspath(file)), "a" in mode)
            return original(file, mode, *args, **kwargs)

        return noting

    def _note(self, path: str, appended: bool) -> None:
        self._written.add(path)
        self._writes[path] = self._writes.get(path, 0) + 1
        if appended:
            self._appended.add(path)

    # -- at a checkpoint ---------------------------------------------------------------------------

    def read(self) -> dict[str, Any]:
        """Return what the files hold now, by path.

        The content is left out for large files, and for files that are written only once, such as
        those with an epoch's number in their name.
        """
        for path in self._recorded_paths():
            self._written.add(path)
            self._appended.add(path)
        models = set(self._best_models())
        entries = {}
        for path in sorted(self._written | models):
            appended, writes = path in self._appended, self._writes.get(path, 0)
            most_bytes = _MOST_BYTES if appended or writes > 1 else 0
            entry = read_entry(path, _MOST_MODEL_BYTES if path in models else most_bytes)
            if entry is not None:
                entries[path] = {**entry, "appended": appended, "writes": writes}
        return entries

    def _recorded_paths(self) -> Iterator[str]:
        """Yield the growing files of Keras' own callbacks, flushed."""
        for callback in self._callbacks:
            if _name(callback) == "CSVLogger":
                _flush(getattr(callback, "csv_file", None))
                yield _relative(str(callback.filename))
            elif _name(callback) == "TensorBoard":
                for writer in dict(getattr(callback, "_writers", {})).values():
                    _flush(writer)
        yield from self._own_events()

    def _best_models(self) -> Iterator[str]:
        for callback in self._callbacks:
            if _name(callback) == "ModelCheckpoint" and "{" not in str(callback.filepath):
                yield _relative(str(callback.filepath))

    # -- TensorBoard -------------------------------------------------------------------------------

    def _begin_events(self) -> None:
        """Remove what an earlier process wrote after its checkpoint, and note that this one writes.

        TensorFlow puts the host and the number of the process into the names of event files.
        """
        is_used = any(_name(callback) == "TensorBoard" for callback in self._callbacks)
        if self._is_reader or not is_used:
            return
        for line in _lines(self._journal):
            if line["fit"] == self._fit:
                for path in set(self._events_of(line["mark"])) - {*line["before"], *self._saved}:
                    with contextlib.suppress(OSError):
                        os.unlink(path)
        self._events_before = set(self._events_of(self._mark))
        line = {"fit": self._fit, "mark": self._mark, "before": sorted(self._events_before)}
        append_lines(self._journal, [line])

    def _own_events(self) -> set[str]:
        return set(self._events_of(self._mark)) - self._events_before

    def _events_of(self, mark: str) -> Iterator[str]:
        """Yield the event files of a process; `mark` is its part of their names."""
        for callback in self._callbacks:
            if _name(callback) == "TensorBoard":
                for parent, _, names in os.walk(str(callback.log_dir)):
                    for name in names:
                        if ".tfevents." in name and mark in name:
                            yield _relative(os.path.join(parent, name))


def counters(callback: Any) -> dict[str, Any]:
    """Return what TensorBoard's callback has counted."""
    return {name: vars(callback)[name] for name in _COUNTERS if name in vars(callback)}


def _name(callback: Any) -> str:
    return type(callback).__name__


def _relative(path: str) -> str:
    """Return the path as the working directory sees it: another segment may have another one."""
    path = os.path.abspath(path)
    return os.path.relpath(path) if path.startswith(os.path.join(os.getcwd(), "")) else path


def _lines(path: Path) -> list[dict[str, Any]]:
    documents = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                documents.append(json.loads(line))
    return documents


def _flush(stream: Any) -> None:
    with contextlib.suppress(Exception):  # closed, or of a kind that needs no flushing
        stream.flush()


def read_entry(path: str, most_bytes: int = _MOST_BYTES) -> dict[str, Any] | None:
    """Return a file's length, and its content unless it is longer; None if there is no file."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return None
        content = Path(path).read_bytes() if status.st_size <= most_bytes else None
    except OSError:
        return None
    size = status.st_size if content is None else len(content)
    return {"size": size, "content": content, "appended": True}


def put_back(path: str, entry: Mapping[str, Any]) -> None:
    """Make a file what it was; in place, as someone may have it open."""
    content, size = entry["content"], int(entry["size"])
    present = read_entry(path, len(content) if content is not None else 0)
    with contextlib.suppress(OSError):
        if content is None:
            if entry["appended"] and present is not None and present["size"] > size:
                os.truncate(path, size)
        elif present is None or present["content"] != content:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            with open(path, "ab") as stream:
                stream.truncate(0)
                stream.write(content)


# -- callbacks whose files trials share -----------------------------------------------------------
# Backups are left out of the callbacks, the others are named in the output.

_BACKUP = "BackupAndRestore"
_PACKAGES = ("keras", "tf_keras", "tensorflow")
_PATH_ATTRIBUTES = ("filepath", "filename")  # of ModelCheckpoint and CSVLogger


def take_out_backups(arguments: MutableMapping[str, Any]) -> str | None:
    """Remove each `BackupAndRestore` from the callbacks of a `fit`; return the line that says so.

    Its folder is usually relative, so that a trial would begin at the epoch of another one.
    """
    callbacks: Any = arguments.get("callbacks")
    backups = [member for member in _members(callbacks) if _is_backup(member)]
    if not backups:
        return None
    if hasattr(callbacks, "callbacks"):  # a CallbackList that the script has made
        callbacks.callbacks[:] = [c for c in callbacks.callbacks if not _is_backup(c)]
    else:
        arguments["callbacks"] = [c for c in _members(callbacks) if not _is_backup(c)]
    folders = ", ".join(sorted({str(getattr(c, "backup_dir", "its folder")) for c in backups}))
    return (
        f"{_BACKUP} is left out: Hermes resumes this fit itself, and another trial "
        f"might have left its epoch in {folders}"
    )


def shared_files(arguments: Mapping[str, Any], trial_folder: Path) -> str | None:
    """Return the line that names files which callbacks write where other trials write theirs."""
    if not shares_directory(trial_folder):
        return None
    files = {
        f"{type(callback).__name__} ({name})"
        for callback in _members(arguments.get("callbacks"))
        for name in (str(getattr(callback, key, "") or "") for key in _PATH_ATTRIBUTES)
        if name and "://" not in name and not os.path.isabs(name)
    }
    if not files:
        return None
    return (
        f"files in the working directory, which all trials of the sweep share: "
        f"{', '.join(sorted(files))}; unless their names differ from trial to trial, put them into "
        "$HERMES_TRIAL_DIR or write trial.directory: copy"
    )


def shares_directory(trial_folder: Path) -> bool:
    """Tell whether other trials run in the working directory too: it is no copy of the trial's."""
    try:
        return not Path.cwd().is_relative_to(trial_folder)
    except OSError:  # it is there no more
        return False


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
        kind.__name__ == _BACKUP and kind.__module__.split(".")[0] in _PACKAGES
        for kind in type(callback).__mro__
    )


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

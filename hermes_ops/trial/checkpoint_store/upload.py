"""Upload new checkpoints to the store while the script trains, and the last one at its end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from hermes_ops.trial.checkpoint_store.store import (
    AbandonedError,
    ChangedError,
    CheckpointEntry,
    CheckpointStore,
    ManifestName,
    Snapshot,
    StoredFile,
    StoreError,
    StoreMark,
    connect,
    digest,
    file_key,
    snapshot,
)
from hermes_ops.trial.files import Folder, is_first_time, read_json
from hermes_ops.trial.output.relay import say

MOMENT_S = 0.5
"""A checkpoint that has not changed for this long is complete."""
_STORE_FAILS = "checkpoints are not copied"
_RETRY_S = 60.0
_LAST_RETRY_S = 0.5


class _NoticedCheckpoint(NamedTuple):
    """The state when a checkpoint was noticed: its time, its step, the output's steps."""

    written_s: float
    step: int | None
    step_offset: int


class CheckpointUploader:
    """Upload one segment's checkpoints in a background thread, one file at a time.

    A store that fails is reported once and tried again, after at most a minute.
    """

    def __init__(
        self,
        url: str,
        folder: Folder,
        epoch: int,
        token: str,
        open_store: Callable[[str], CheckpointStore] = connect,
    ) -> None:
        self._url, self._folder, self._epoch, self._token = url, folder, epoch, token
        self._open_store = open_store
        self._copies: CheckpointStore | None = None
        self._serial = self._count = 0
        self._uploaded: dict[StoredFile, tuple[str, str]] = {}  # file: its key and checksum
        self._looks: dict[
            str, tuple[CheckpointEntry, float]
        ] = {}  # entry: since when it has been so
        self._seen: deque[_NoticedCheckpoint] = deque(maxlen=64)
        self._names: set[str] = set()  # the entries that were copied last
        self._copied = StoreMark.read(folder).copied
        self._failures = 0
        self._has_reported = False
        self._wake, self._quit, self._done = (threading.Event() for _ in range(3))
        self._final = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start uploading in the background, first what is there already."""
        self._thread = threading.Thread(target=self._run, name="hermes-copies", daemon=True)
        self._thread.start()
        self._wake.set()

    def offer(self, written_s: float, step: int | None, step_offset: int) -> None:
        """Queue a new checkpoint, of that time and step, for upload."""
        self._seen.append(_NoticedCheckpoint(written_s, step, step_offset))
        self._wake.set()

    def finish(self, wait_s: float, hurried: Callable[[], bool]) -> bool:
        """Upload the newest checkpoint after the script's end, within `wait_s`; False if it failed.

        `hurried` ends the wait at once.
        """
        if self._thread is None:
            return False
        deadline_s = time.monotonic() + wait_s
        self._final = True
        self._wake.set()
        while not self._done.wait(0.05) and time.monotonic() < deadline_s and not hurried():
            pass
        self._quit.set()
        self._wake.set()
        left = snapshot(self._folder.checkpoints)
        return not left or (self._done.is_set() and self._copied == digest(left))

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        delay_s: float | None = None
        while not self._quit.is_set():
            self._wake.wait(delay_s)
            self._wake.clear()
            final = self._final
            delay_s = self.upload_complete(time.monotonic(), final)
            if delay_s is None and final:
                break
            if final and delay_s is not None:
                delay_s = min(delay_s, _LAST_RETRY_S)
        self._done.set()

    def upload_complete(self, now_s: float, final: bool) -> float | None:
        """Copy what is complete; in how many seconds to look again, None: at the next offer."""
        complete, waiting = self._complete(now_s, final)
        try:
            if complete and digest(complete) != self._copied:
                self._copy(complete)
            self._failures = 0
        except ChangedError:
            waiting = True
        except AbandonedError:
            return None
        except StoreError as error:
            self._say(str(error))
            self._failures += 1
            return float(min(_RETRY_S, 2.0**self._failures))
        return MOMENT_S if waiting else None

    def _complete(self, now_s: float, final: bool) -> tuple[Snapshot, bool]:
        """Return the checkpoints to copy now, and whether others are still being written.

        While one changes that the last copy had, nothing is copied: its old form is gone and its
        new one is not there yet.
        """
        entries = snapshot(self._folder.checkpoints)
        before, self._looks = self._looks, {}
        for name, entry in entries.items():
            earlier = before.get(name)
            self._looks[name] = earlier if earlier and earlier[0] == entry else (entry, now_s)
        if final:
            return entries, False
        fresh = {n for n, (_, since_s) in self._looks.items() if now_s - since_s < MOMENT_S}
        if fresh & self._names:
            return {}, True
        return {n: e for n, e in entries.items() if n not in fresh}, bool(fresh)

    def _copy(self, entries: Snapshot) -> None:
        copies = self._store()
        self._check(copies)
        files = [f for name in sorted(entries) for f in entries[name].files]
        books = self._state_of(files)
        listed = [self._upload(copies, file) for file in files]
        self._serial += 1
        name = ManifestName(self._epoch, self._serial, self._token)
        document: dict[str, Any] = {
            "format": 1,
            **name._asdict(),
            "files": listed,
            "folders": [f for n in sorted(entries) for f in entries[n].folders],
            "links": [link for n in sorted(entries) for link in entries[n].links],
            "books": books,
        }
        copies.commit(name, document)
        self._note(entries)
        try:
            copies.tidy(name, document)
        except StoreError as error:
            self._say(f"older copies could not be deleted ({error})")
        self._uploaded = {f: done for f, done in self._uploaded.items() if f in set(files)}

    def _store(self) -> CheckpointStore:
        """Connect once, and continue the serial numbers of an earlier segment of this lease."""
        if self._copies is None:
            copies = self._open_store(self._url)
            serials = [n.serial for n in copies.names() if n.epoch == self._epoch]
            self._serial = max(serials, default=0)
            self._copies = copies
        return self._copies

    def _check(self, copies: CheckpointStore) -> None:
        """Stop for good where a later lease has its own copies."""
        if any(name.epoch > self._epoch for name in copies.names()):
            self._say("another segment of the trial, of a later lease, copies there now")
            self._quit.set()
            raise AbandonedError

    def _upload(self, copies: CheckpointStore, file: StoredFile) -> list[Any]:
        if file not in self._uploaded:
            self._count += 1
            key = file_key(self._epoch, self._token, self._count)
            self._uploaded[file] = (
                key,
                copies.upload(self._folder.checkpoints, file, key, self._go_on),
            )
        key, checksum = self._uploaded[file]
        return [file.path, file.size_bytes, file.mtime_ns, key, checksum]

    def _go_on(self) -> None:
        if self._quit.is_set():
            raise AbandonedError

    def _state_of(self, files: list[StoredFile]) -> dict[str, Any]:
        """Return the status and retention data of these files, for a resume on another machine."""
        newest_s = max((f.mtime_ns for f in files), default=0) / 1e9
        near = min(tuple(self._seen), key=lambda s: abs(s.written_s - newest_s), default=None)
        if near is None:
            status = read_json(self._folder.status) or {}
            recorded = {n: status.get(n) for n in ("checkpoint_step", "step_offset")}
        else:
            recorded = {"checkpoint_step": near.step, "step_offset": near.step_offset}
        return {**recorded, "kept": read_json(self._folder.root / "kept.json")}

    def _note(self, entries: Snapshot) -> None:
        """Remember that this is in the store, for this segment and the next."""
        self._names, self._copied = set(entries), digest(entries)
        with contextlib.suppress(OSError):
            StoreMark.read(self._folder)._replace(copied=self._copied).write(self._folder)

    def _say(self, trouble: str) -> None:
        if not self._has_reported:
            self._has_reported = True
            if not is_first_time(self._folder.root, _STORE_FAILS):
                return
            say(
                f"checkpoints are not copied to {self._url}: {trouble}: the trial goes on, and it "
                "is tried again"
            )

"""Checkpoints: how long they stay after a sweep's end, and how much room they may take on disk.

At a sweep's end those of trials that cannot go on are deleted. The others, and the working
directories that trials have for themselves, stay until the time in `keep.json` beside them;
whichever controller runs then deletes them. While a sweep runs its size limit is kept at the cost
of trials that have ended, never of one that may go on. What a sweep's store holds of a trial goes
with what is on disk.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_ops.airflow.control.books import Book
from hermes_ops.airflow.control.stores import clear_sweep, clear_trials
from hermes_ops.airflow.folders import TrialFolder, home, sweep_folder

log = logging.getLogger(__name__)

PERIOD_S = 20.0
KEEP_FILE = "keep.json"
RESUMABLE = ("cancelled", "failed")
"""Final states from which `hermes sweep resume` lets a trial go on."""


@dataclass(frozen=True, slots=True)
class Room:
    """A running sweep's limit; `spare` are its ended trials, those to lose checkpoints first."""

    sweep: str
    most_bytes: float
    spare: tuple[int, ...]
    store: str | None = None

    @classmethod
    def of(cls, book: Book) -> Room | None:
        """What the sweep's limit asks for now; None where it has no limit."""
        rules = book.plan.config.checkpoints
        most = rules.max_bytes
        if most is None:
            return None
        best = book.best_trial()
        ended = [t for t in book.trials if t.ended and t.number != best]
        hopeless = [t.number for t in ended if _final(t) not in RESUMABLE]
        others = [t.number for t in ended if _final(t) in RESUMABLE]
        return cls(book.sweep, most, (*hopeless, *others), rules.store)


def _final(trial: Any) -> str | None:  # noqa: ANN401 - a Trial, or what a test has in its place
    return trial.segment.final if trial.segment is not None else None


def free_ended(
    sweep: str,
    states: Mapping[int, str],
    keep_s: float,
    now_s: float,
    store: str | None = None,
) -> None:
    """After a sweep's end: delete the checkpoints of trials that cannot go on, date the others.

    What the store does not delete now is deleted with the others.

    :param states: the final state of each trial by number
    """
    able = [n for n, state in states.items() if keep_s > 0 and state in RESUMABLE]
    kept = [n for n in able if store or TrialFolder.of(sweep, n).checkpoints.exists()]
    gone = set(states) - set(kept)
    copies = [n for n in states if keep_s > 0 and TrialFolder.of(sweep, n).workspace.exists()]
    for number in gone:
        _delete(TrialFolder.of(sweep, number).checkpoints)
    for number in set(states) - set(copies):
        _delete(TrialFolder.of(sweep, number).workspace)
    obeyed = clear_trials(store, sweep, gone) if kept else clear_sweep(store, sweep)
    note = sweep_folder(sweep) / KEEP_FILE
    if kept or copies or not obeyed:
        fresh = note.with_suffix(".new")
        until_s = now_s + (keep_s if kept or copies else 0.0)
        fresh.write_text(json.dumps({"until_s": until_s, "sweep": sweep, "store": store}))
        os.replace(fresh, note)
    else:
        note.unlink(missing_ok=True)


def free_expired(running: Collection[str], now_s: float) -> list[Path]:
    """Delete the checkpoints of ended sweeps whose time is over; the folders of those sweeps.

    A sweep whose store does not obey stays due.
    """
    awake = {sweep_folder(sweep) for sweep in running}
    due = {
        note: known
        for note in (home() / "sweeps").glob(f"*/{KEEP_FILE}")
        if note.parent not in awake and _until_s(known := _read(note)) <= now_s
    }
    expired = []
    for note, known in due.items():
        for folder in _kept_folders(note.parent):
            _delete(folder)
        if clear_sweep(known.get("store"), str(known.get("sweep"))):
            note.unlink(missing_ok=True)
            expired.append(note.parent)
            log.info("The checkpoints of %s have been kept long enough", note.parent.name)
    return expired


def make_room(room: Room) -> float:
    """Delete checkpoints of ended trials until the limit is kept; the bytes that are left."""
    sizes: Counter[int] = Counter()
    for folder in _kept_folders(sweep_folder(room.sweep)):
        if folder.parent.name.isdigit():
            sizes[int(folder.parent.name)] += size_bytes(folder)
    used = float(sum(sizes.values()))
    for number in room.spare:
        if used <= room.most_bytes:
            break
        if sizes.get(number) and clear_trials(room.store, room.sweep, [number]):
            _delete(TrialFolder.of(room.sweep, number).checkpoints)
            _delete(TrialFolder.of(room.sweep, number).workspace)
            used -= sizes[number]
    return used


def _kept_folders(sweep: Path) -> list[Path]:
    """Return the checkpoints of a sweep's trials, and the working directories of their own."""
    return [*sweep.glob("trials/*/checkpoints"), *sweep.glob("trials/*/workspace")]


def size_bytes(folder: Path) -> int:
    """What the files below a folder hold; one that vanishes meanwhile counts nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


class Janitor:
    """Looks after the disk in the background, so that no decision waits for it."""

    def __init__(self) -> None:
        self._due_s = 0.0
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()

    def look(self, books: Iterable[Book], now_s: float) -> None:
        """Clean up in the background, if it is time and the last time is over."""
        if now_s < self._due_s or (self._thread is not None and self._thread.is_alive()):
            return
        self._due_s = now_s + PERIOD_S
        books = tuple(books)
        rooms = tuple(room for book in books if (room := Room.of(book)) is not None)
        running = tuple(book.sweep for book in books)
        self._thread = threading.Thread(
            target=self.clean, args=(running, rooms, now_s), daemon=True
        )
        self._thread.start()

    def clean(self, running: Sequence[str], rooms: Sequence[Room], now_s: float) -> None:
        """One round: what has expired, then each sweep that has a limit."""
        self._try(lambda: free_expired(running, now_s))
        for room in rooms:
            self._try(lambda own=room: self._warn(own, make_room(own)))  # type: ignore[misc]

    @staticmethod
    def _try(clean: Callable[[], object]) -> None:
        try:
            clean()
        except Exception:  # whatever it is: the other sweeps are cleaned up
            log.exception("Checkpoints could not be cleaned up; it is tried again")

    def _warn(self, room: Room, left_bytes: float) -> None:
        if left_bytes <= room.most_bytes:
            self._warned.discard(room.sweep)
        elif room.sweep not in self._warned:
            self._warned.add(room.sweep)
            log.warning(
                "The checkpoints of open trials of %s take %.3f GB, more than "
                "checkpoints.max_gigabytes: they stay, as their trials need them.",
                room.sweep, left_bytes / 1e9,
            )  # fmt: skip


def _read(note: Path) -> dict[str, Any]:
    try:
        known = json.loads(note.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _until_s(known: Mapping[str, Any]) -> float:
    try:
        return float(known["until_s"])
    except (ValueError, KeyError, TypeError):
        return 0.0


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)

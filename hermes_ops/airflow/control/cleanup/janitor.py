"""Checkpoints: how long they stay after a sweep's end, and how much room they may take on disk.

At a sweep's end the checkpoints of trials that cannot be continued are deleted. The others, and the
trials' own working directories, stay until the time in `keep.json` in the sweep's folder; the
controller that runs then deletes them. While a sweep runs, its size limit is kept by deleting
checkpoints of ended trials, never of one that may be continued. Copies of a trial in the sweep's
object store are deleted together with its files on disk.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path
from typing import Any

from hermes_ops.airflow.clock_steps import is_due
from hermes_ops.airflow.control.sweep_state import SweepState
from hermes_ops.airflow.control.trial_state import TrialState
from hermes_ops.airflow.folders import TrialFolder, home, sweep_folder
from hermes_ops.config.sections import WEEK_S
from hermes_ops.errors import HermesError
from hermes_ops.trial.checkpoint_store.store import (
    CheckpointStore,
    NotInstalledError,
    StoreError,
    connect,
    place,
)
from hermes_ops.trial.files import write_json

log = logging.getLogger(__name__)

PERIOD_S = 20.0
KEEP_FILE = "keep.json"
RESUMABLE = ("cancelled", "failed")
"""Final states from which `hermes sweep resume` continues a trial."""


@dataclass(frozen=True, slots=True)
class CheckpointQuota:
    """A running sweep's limit; `spare` are its ended trials, those to lose checkpoints first."""

    sweep: str
    most_bytes: float
    spare: tuple[int, ...]
    store: str | None = None

    @classmethod
    def from_sweep(cls, sweep: SweepState) -> CheckpointQuota | None:
        """Return the checkpoint quota of a sweep as it is now; None if the sweep sets no limit.

        It is None too until the curves have been read from MLflow: the best trial, whose
        checkpoints are kept, is not known before. A trial that a person has cleared is no spare
        one: it continues from its checkpoint, once MLflow answers.
        """
        rules = sweep.spec.config.checkpoints
        most = rules.max_bytes
        if most is None or not sweep.curves_read:
            return None
        best = sweep.best_trial()
        over = (t for t in sweep.trials if t.has_ended and t.state is not TrialState.CLEARED)
        ended = [t for t in over if t.number != best]
        hopeless = [t.number for t in ended if t.final not in RESUMABLE]
        others = [t.number for t in ended if t.final in RESUMABLE]
        return cls(sweep.id, most, (*hopeless, *others), rules.store)


def free_ended(
    sweep: str,
    states: Mapping[int, str],
    keep_s: float,
    now_s: float,
    store: str | None = None,
) -> None:
    """Delete an ended sweep's checkpoints of trials that cannot be continued; date the others.

    What the store fails to delete now is deleted together with the others.

    :param states: the final state of each trial by number
    """
    able = [n for n, state in states.items() if keep_s > 0 and state in RESUMABLE]
    kept = [n for n in able if store or TrialFolder.from_sweep(sweep, n).checkpoints.exists()]
    gone = set(states) - set(kept)
    copies = [
        n for n in states if keep_s > 0 and TrialFolder.from_sweep(sweep, n).workspace.exists()
    ]
    for number in gone:
        _delete(TrialFolder.from_sweep(sweep, number).checkpoints)
    for number in set(states) - set(copies):
        _delete(TrialFolder.from_sweep(sweep, number).workspace)
    obeyed = clear_trials(store, sweep, gone) if kept else clear_sweep(store, sweep)
    note = sweep_folder(sweep) / KEEP_FILE
    if kept or copies or not obeyed:
        until_s = now_s + (keep_s if kept or copies else 0.0)
        write_json(note, {"until_s": until_s, "sweep": sweep, "store": store}, durable=True)
    else:
        note.unlink(missing_ok=True)


def free_expired(is_unfinished: Callable[[str], bool], now_s: float) -> list[Path]:
    """Delete the checkpoints of ended sweeps whose retention is over; return these sweeps' folders.

    A sweep stays due if its store refuses the deletion, or if it has been continued: its note is
    from an earlier end, and its next end replaces it. A damaged note keeps checkpoints for a week.

    :param is_unfinished: whether the sweep with an id runs, or is about to
    """
    expired = []
    for note in (home() / "sweeps").glob(f"*/{KEEP_FILE}"):
        folder, content = note.parent, keep_note(note.parent)
        sweep = str(content.get("sweep") or folder.name)
        until_s = kept_until_s(content)
        if (_week_after(note) if until_s is None else until_s) > now_s or is_unfinished(sweep):
            continue
        for kept in _kept_folders(folder):
            _delete(kept)
        if clear_sweep(content.get("store"), sweep):
            note.unlink(missing_ok=True)
            expired.append(folder)
            log.info("The checkpoints of %s have been kept long enough", folder.name)
    return expired


def make_room(quota: CheckpointQuota) -> float:
    """Delete checkpoints of ended trials until the limit is kept; return the bytes in use."""
    sizes: Counter[int] = Counter()
    for folder in _kept_folders(sweep_folder(quota.sweep)):
        if folder.parent.name.isdigit():
            sizes[int(folder.parent.name)] += size_bytes(folder)
    used = float(sum(sizes.values()))
    for number in quota.spare:
        if used <= quota.most_bytes:
            break
        if sizes.get(number) and clear_trials(quota.store, quota.sweep, [number]):
            _delete(TrialFolder.from_sweep(quota.sweep, number).checkpoints)
            _delete(TrialFolder.from_sweep(quota.sweep, number).workspace)
            used -= sizes[number]
    return used


def _kept_folders(sweep: Path) -> list[Path]:
    """Return the checkpoints of a sweep's trials, and the working directories of their own."""
    return [*sweep.glob("trials/*/checkpoints"), *sweep.glob("trials/*/workspace")]


def size_bytes(folder: Path) -> int:
    """Return the bytes of the files below a folder; one that vanishes meanwhile counts nothing.

    A link in its place counts nothing either: a script may have made it, to the root for instance,
    and a deletion would not follow it.
    """
    total = 0
    if folder.is_symlink():
        return total
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


class Janitor:
    """Cleans up checkpoints on disk in a background thread, so that no decision waits for it.

    `is_unfinished` returns whether a sweep of this state folder, of any pool, has not ended.
    """

    def __init__(self, is_unfinished: Callable[[str], bool]) -> None:
        self._is_unfinished = is_unfinished
        self._due_s = 0.0
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()

    def run_if_due(self, sweeps: Iterable[SweepState], now_s: float) -> None:
        """Clean up in the background, if it is time and the last time is over."""
        if self._thread is not None and self._thread.is_alive():
            return
        if not is_due(now_s, self._due_s, PERIOD_S):
            return
        self._due_s = now_s + PERIOD_S
        sweeps = tuple(sweeps)
        quotas = tuple(
            quota for sweep in sweeps if (quota := CheckpointQuota.from_sweep(sweep)) is not None
        )
        self._thread = threading.Thread(target=self.clean, args=(quotas, now_s), daemon=True)
        self._thread.start()

    def clean(self, quotas: Sequence[CheckpointQuota], now_s: float) -> None:
        """Delete what has expired, then keep the limit of each sweep that has one."""
        self._try(lambda: free_expired(self._is_unfinished, now_s))
        for quota in quotas:
            self._try(lambda limit=quota: self._warn(limit, make_room(limit)))  # type: ignore[misc]

    @staticmethod
    def _try(clean: Callable[[], object]) -> None:
        try:
            clean()
        except Exception:  # whatever it is: the other sweeps are cleaned up
            log.exception("Checkpoints could not be cleaned up; it is tried again")

    def _warn(self, quota: CheckpointQuota, left_bytes: float) -> None:
        if left_bytes <= quota.most_bytes:
            self._warned.discard(quota.sweep)
        elif quota.sweep not in self._warned:
            self._warned.add(quota.sweep)
            log.warning(
                "The checkpoints of open trials of %s take %.3f GB, more than "
                "checkpoints.max_gigabytes: they stay, as their trials need them.",
                quota.sweep, left_bytes / 1e9,
            )  # fmt: skip


def keep_note(sweep: Path) -> dict[str, Any]:
    """Return the content of `keep.json` in a sweep's folder; empty if it is missing or damaged."""
    try:
        content = json.loads((sweep / KEEP_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def kept_until_s(note: Mapping[str, Any]) -> float | None:
    """Return the Unix time up to which a sweep keeps its checkpoints; None if the note has none."""
    try:
        until_s = float(note["until_s"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    return None if isnan(until_s) else until_s


def _week_after(note: Path) -> float:
    """Return the Unix time a week after a note was written; inf while it cannot be read."""
    try:
        note.read_bytes()
        return note.stat().st_mtime + WEEK_S
    except OSError:
        return inf


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


Opener = Callable[[str], CheckpointStore]
_warned: set[str] = set()  # the places of which the log has said so


def check_store(store: str | None) -> None:
    """Raise HermesError if the store's package, which is needed here too, is not installed."""
    if store is None:
        return
    try:
        connect(store)
    except NotInstalledError as error:
        raise HermesError(str(error)) from error
    except StoreError as error:  # trials may still reach it, with credentials of their own
        log.warning("checkpoints.store %s does not open here: %s", store, error)


def clear_trials(
    store: str | None, sweep: str, numbers: Iterable[int], open_store: Opener = connect
) -> bool:
    """Delete the copies of these trials; False, said once in the log, if the store did not obey."""
    if store is None:
        return True
    places = [place(store, sweep, number) for number in sorted(numbers)]
    return _clear(places, lambda url: open_store(url).clear())


def clear_sweep(store: str | None, sweep: str, open_store: Opener = connect) -> bool:
    """Delete all copies of a sweep; False, said once in the log, if the store did not obey."""
    if store is None:
        return True
    return _clear([place(store, sweep)], lambda url: open_store(url).clear_sweep())


def _clear(places: list[str], clear: Callable[[str], None]) -> bool:
    for url in places:
        try:
            clear(url)
        except StoreError as error:
            if url not in _warned:
                _warned.add(url)
                log.warning("Checkpoints at %s could not be deleted: %s", url, error)
            return False
    return True

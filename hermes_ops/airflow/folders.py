"""Where a trial's files lie under HERMES_HOME: its records, and what its accounts say."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

from hermes_ops.airflow.accounts import SEEN_S, Accounts, as_observed
from hermes_ops.airflow.records import (
    CorrectedStart,
    Ending,
    Lease,
    Notice,
    RecordedUse,
    SegmentRecord,
    StopFlag,
    decode,
    encode,
)
from hermes_ops.confined_folder import (
    DOCUMENT_BYTES,
    ConfinedFolder,
    NotConfinedError,
    confined,
)
from hermes_ops.errors import HermesError
from hermes_ops.trial.checkpoint_store.store import safe_name
from hermes_ops.trial.files import Folder, PathBelow, parse_object, replace_file
from hermes_ops.trial.locks import BusyError, lock_file
from hermes_ops.trial.outcome import SegmentOutcome
from hermes_ops.trial.segment_records import close_segment

log = logging.getLogger(__name__)

# A lease and a stop flag lie next to the trial's folder, where its pod sees neither. A task on the
# same machine or volume reads them before Airflow's store has answered. The triggerer, which may
# hold the trial's pod, cannot reach that store at all. A lease from here prestarts a process, no
# more: the script begins once Airflow's record says the same.
R = TypeVar("R", Lease, StopFlag, Notice, CorrectedStart, RecordedUse, Ending)


def home() -> Path:
    """Return the state folder: the environment variable HERMES_HOME, else ~/.hermes."""
    return Path(os.environ.get("HERMES_HOME") or Path.home() / ".hermes").absolute()


def pod_file() -> Path:
    """Return the installation's defaults for pods: HERMES_POD_DEFAULTS, else pod.yaml."""
    return Path(os.environ.get("HERMES_POD_DEFAULTS") or home() / "pod.yaml")


def sweep_folder(run_id: str) -> Path:
    """Return the folder of a sweep."""
    return home() / "sweeps" / safe_name(run_id)


_ASIDE = ".before-scratch."
"""What the names of folders begin with that are no longer the trial's, and cannot be deleted."""
WAKE_POLL_S = 0.05
"""Seconds between two checks of a wake file."""


@dataclass(slots=True)
class WakeFile:
    """A file that is touched to wake another process, which would check a little later anyway.

    It only saves time on one machine: the records are in Airflow's state store.
    """

    path: Path
    _seen_ns: int = 0

    def wake(self) -> None:
        """Touch the file."""
        with contextlib.suppress(OSError, NotConfinedError):
            folder, name = confined(self.path)
            folder.touch(name)

    def woken(self) -> bool:
        """Return whether the file was touched since the last call."""
        try:
            at_ns = self.path.lstat().st_mtime_ns
        except OSError:
            return False
        fresh, self._seen_ns = at_ns != self._seen_ns, at_ns
        return fresh


def controller_wake_file() -> WakeFile:
    """Return the file that tells the controllers of this home: a trial has left its slot."""
    return WakeFile(home() / "nudge")


def metrics_wake_file() -> WakeFile:
    """Return the file that tells the controllers: a trial's metrics have been sent to MLflow."""
    return WakeFile(home() / "metrics")


@dataclass(frozen=True, slots=True)
class _PathBeside:
    """A path next to a trial's folder, where its pod does not see it."""

    suffix: str

    def __get__(self, folder: TrialFolder, _: type | None = None) -> Path:
        return folder.path.with_name(f"{folder.path.name}.{self.suffix}")


@dataclass(frozen=True, slots=True)
class TrialFolder:
    """A trial's folder: hermes-trial writes it, all others read it."""

    path: Path

    @classmethod
    def from_sweep(cls, run_id: str, number: int) -> TrialFolder:
        """Return the folder of trial `number` of the sweep `run_id`."""
        return cls(sweep_folder(run_id) / "trials" / str(number))

    metrics = PathBelow("metrics.jsonl", "path")
    """Every metric that the trial reported, in order."""
    sent = PathBelow("sent.json", "path")
    """The file with the position in `metrics` up to which MLflow has it."""

    def wake_file(self) -> WakeFile:
        """Return the file that tells the trial's task: its stop flag was written."""
        return WakeFile(self.path / "nudge")

    stop_flag = _PathBeside("stop.json")
    """The local record of its stop flag."""
    notice = _PathBeside("notice.json")
    """The notice that it loses its GPUs."""
    lease = _PathBeside("lease.json")
    """The local record of its newest lease."""
    start = _PathBeside("start.json")
    """When the segment began that the triggerer holds."""
    ending = _PathBeside("ending.json")
    """How it has ended, for the case that MLflow does not know it yet."""
    use = _PathBeside("use.json")
    """The use of GPUs on record of a trial in pods."""
    batches = _PathBeside("batches.jsonl")
    """The samples of a step, a line for each lease."""
    checkpoints = PathBelow("checkpoints", "path")
    """The trial's checkpoints."""
    workspace = PathBelow("workspace", "path")
    """The trial's own copy of the script's folder, where the sweep asks for one."""
    model = PathBelow("model", "path")
    """The best model of the trial, where its framework is known."""

    def empty(self) -> bool:
        """Remove the folder; return False, and remove nothing, while a process uses it.

        Where its pods have another user, whose folders this one cannot delete, only the files in it
        are removed, and the folders get other names: then hermes-trial deletes those under its
        lock. That of an earlier version leaves them, and does not find them.
        """
        try:
            lock = lock_file(self.path / "lock", 0.0, "the trial's folder")
        except BusyError:
            return False
        except PermissionError:
            self._set_content_aside()
            self._forget_use()
            return True
        self._forget_use()
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(lock)
        return True

    def _forget_use(self) -> None:
        self.use.unlink(missing_ok=True)
        self.start.unlink(missing_ok=True)

    def _set_content_aside(self) -> None:
        """Remove the files in the folder, not those that fence it, and rename what is a folder."""
        for path in list(self.path.iterdir()):
            if not stat.S_ISDIR(path.lstat().st_mode):
                if path.name not in ("lock", "epoch"):
                    path.unlink()
            elif not path.name.startswith(_ASIDE):
                path.rename(path.with_name(f"{_ASIDE}{path.name}.{time.time_ns()}"))

    def status(self) -> dict[str, Any]:
        """Return the running trial's status file; empty before it is written."""
        return _read(self.path / "status.json")

    def result(self) -> dict[str, Any]:
        """Return the result of the newest segment; empty when none has ended.

        The script can write it too: fields of another type are left out, and a result without a
        known outcome is none.
        """
        document = _read(self.path / "result.json")
        sound = {name: value for name, value in document.items() if _is_of_result(name, value)}
        if wrong := sorted(document.keys() - sound.keys()):
            _warn_once(f"{self.path / 'result.json'}: left out as malformed: {', '.join(wrong)}.")
        return sound if "outcome" in sound else {}

    def last_sign_s(self) -> float:
        """Return when a process of the trial last wrote its status or a metric, in Unix seconds."""
        signs_s = [0.0]
        for path in (self.path / "status.json", self.metrics):
            with contextlib.suppress(OSError):
                signs_s.append(path.lstat().st_mtime)
        return max(signs_s)

    def segments(self) -> tuple[dict[str, Any], ...]:
        """Return all segments in order: epoch, gpus, start_s, first_step, batch if it is known and,
        once ended, end_s, last_step, outcome."""
        batches = {line.get("epoch"): line.get("batch") for line in _lines(self.batches)}
        merged: list[dict[str, Any]] = []
        for line in filter(_is_sound, _lines(self.path / "segments.jsonl")):
            if "start_s" in line:
                batch = batches.get(line.get("epoch"))
                merged.append({**line, "batch": batch} if isinstance(batch, int) else dict(line))
            elif merged:
                merged[-1].update(line)
        return tuple(merged)

    def end_killed(self, epoch: int, step: int, end_s: float) -> tuple[dict[str, Any], ...]:
        """Return all segments, that of the epoch with an end at the latest at `end_s`.

        A killed process has not written its end: it is written here. On a full disk only what is
        returned has it.
        """
        segments = self.segments()
        if not segments or segments[-1].get("epoch") != epoch or "end_s" in segments[-1]:
            return segments
        end: dict[str, Any] = {"end_s": end_s, "outcome": "killed"}
        result = self.result()  # of a full disk, which took the result alone
        reached = result.get("step", 0) if result.get("epoch") == epoch else 0
        with contextlib.suppress(OSError):
            last_step = max(step, reached)
            close_segment(Folder(self.path), epoch, last_step, end["outcome"], end_s=end_s)
            return self.segments()
        return (*segments[:-1], {**segments[-1], **end})

    def record_batch(self, epoch: int, samples: int) -> None:
        """Record the samples of a step in the segment of a lease, before it begins; may raise
        OSError."""
        line = json.dumps({"epoch": epoch, "batch": samples})
        self.batches.parent.mkdir(parents=True, exist_ok=True)
        with self.batches.open("a") as file:
            file.write(f"\n{line}\n")  # whatever a full disk has left of the line before


_KINDS: Mapping[str, type | UnionType] = {
    "epoch": int,
    "gpus": list,
    "outcome": str,
    **dict.fromkeys(("first_step", "last_step", "batch"), int | None),
    **dict.fromkeys(("start_s", "end_s"), int | float),
    **dict.fromkeys(("startup_s", "restore_s", "checkpoint_s", "repeat_s"), int | float | None),
}
"""The fields of a line of segments.jsonl. The script can write that file too."""
_RESULT_KINDS: Mapping[str, type | UnionType] = {
    **dict.fromkeys(("epoch", "exit_code", "step"), int),
    **dict.fromkeys(("reason", "cause"), str),
    "retryable": bool,
    "tail": list,
}
_OUTCOMES = tuple(outcome.value for outcome in SegmentOutcome)
_MOST = 1e15
"""No time in Unix seconds, and no step, is beyond it."""


def _is_sound(line: Mapping[str, Any]) -> bool:
    """Tell whether each field of a segment's line is of its type, and no number beyond reason."""
    fields = [(line[name], kind) for name, kind in _KINDS.items() if name in line]
    if not all(isinstance(value, kind) for value, kind in fields):
        return False
    numbers = [value for value, _ in fields if isinstance(value, int | float)]
    are_gpus = all(isinstance(g, int | str) and str(g).isdecimal() for g in line.get("gpus") or ())
    return are_gpus and all(-_MOST <= number <= _MOST for number in numbers)


def _is_of_result(name: str, value: object) -> bool:
    """Tell whether a field of a result has its type; those that nobody reads have any."""
    if name == "outcome":
        return value in _OUTCOMES
    if name == "tail" and isinstance(value, list):
        return all(isinstance(line, str) for line in value)
    return isinstance(value, _RESULT_KINDS.get(name, object))


@functools.lru_cache(maxsize=1024)
def _warn_once(message: str) -> None:
    log.warning(message)


@dataclass(slots=True)
class StatusFile:
    """Reads a running trial's status file repeatedly, and parses it only when it has changed."""

    _folder: ConfinedFolder
    _name: str
    _stamp: tuple[int, int, int] = (0, 0, 0)
    _status: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: TrialFolder) -> StatusFile:
        """Return the status file of a trial's folder."""
        return cls(ConfinedFolder(folder.path), "status.json")

    def read(self) -> Mapping[str, Any]:
        """Return `TrialFolder.status`; the same object as before while the file is unchanged."""
        try:
            # It is opened each time: a network volume shows changes only to a process that opens.
            with self._folder.open(self._name) as file:
                status = os.fstat(file.fileno())
                stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
                if stamp != self._stamp:
                    self._status, self._stamp = _object(file.read(DOCUMENT_BYTES)), stamp
        except FileNotFoundError:
            return {}
        except OSError as error:
            path = self._folder.root / self._name
            raise HermesError(f"{path} cannot be read: {error.strerror}") from error
        return self._status


def _read(path: Path) -> dict[str, Any]:
    try:
        folder, name = confined(path)
        return _object(folder.read(name))
    except FileNotFoundError:
        return {}
    except NotConfinedError as error:  # its script made it: no later reading succeeds
        _warn_once(str(error))
        return {}
    except OSError as error:
        raise HermesError(f"{path} cannot be read: {error.strerror}") from error


def _object(text: bytes) -> dict[str, Any]:
    """Return the JSON object; empty for any other text."""
    return parse_object(text) or {}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        folder, name = confined(path)
        text = folder.read(name)
    except FileNotFoundError:
        return
    except NotConfinedError as error:
        _warn_once(str(error))
        return
    for line in text.splitlines():
        value = parse_object(line)
        if value is not None:  # the torn last line of a process that was killed is none
            yield value


def write_stop_flag(folder: TrialFolder, flag: StopFlag, *, needed: bool) -> bool:
    """Write the stop flag, return whether it was written; HermesError if not, where `needed`."""
    try:
        _write_record(folder.stop_flag, flag, mode=0o644)
    except OSError as error:
        if needed:
            raise HermesError(f"{folder.stop_flag} cannot be written: {error.strerror}") from error
        return False
    return True


def read_stop_flag(folder: TrialFolder, epoch: int) -> StopFlag | None:
    """Return the stop flag of the lease with that epoch; None without one."""
    flag = _read_record(StopFlag, folder.stop_flag)
    return flag if flag is not None and flag.epoch == epoch else None


def write_notice(folder: TrialFolder, notice: Notice | None) -> None:
    """Try to write the notice, or to withdraw it, and tell the trial's task."""
    with contextlib.suppress(OSError):
        if notice is None:
            folder.notice.unlink(missing_ok=True)
        else:
            _write_record(folder.notice, notice, mode=0o644)
        folder.wake_file().wake()


def notice_text(folder: TrialFolder, epoch: int) -> str:
    """Return why and until when the trial keeps its GPUs; empty where that lease has no notice."""
    notice = _read_record(Notice, folder.notice)
    return f"Notice: it {notice.reason}" if notice is not None and notice.epoch == epoch else ""


def write_lease(folder: TrialFolder, lease: Lease) -> None:
    """Try to write the lease; only the owner may read it, as it holds variables."""
    with contextlib.suppress(OSError):
        _write_record(folder.lease, lease, mode=0o600)


def read_lease(folder: TrialFolder) -> Lease | None:
    """Return the trial's newest lease; it may have been revoked or used up since."""
    return _read_record(Lease, folder.lease)


def write_start(folder: TrialFolder, start: CorrectedStart) -> bool:
    """Try to write when a segment began; return whether it was written."""
    try:
        _write_record(folder.start, start, mode=0o644)
    except OSError:
        return False
    return True


def read_start(folder: TrialFolder, epoch: int) -> CorrectedStart | None:
    """Return when the segment of that lease began, if the triggerer has held it; else None."""
    start = _read_record(CorrectedStart, folder.start)
    return start if start is not None and start.epoch == epoch else None


def write_ending(folder: TrialFolder, ending: Ending) -> None:
    """Try to write how a trial ends, before anything is told: the report task reads it."""
    with contextlib.suppress(OSError):
        _write_record(folder.ending, ending, mode=0o644)


def read_ending(folder: TrialFolder) -> Ending | None:
    """Return how the trial ended last; None where that is not known here."""
    return _read_record(Ending, folder.ending)


def write_use(folder: TrialFolder, record: SegmentRecord) -> None:
    """Try to write the use of GPUs that is on record of a trial whose pods can write its folder."""
    use = RecordedUse(record.epoch, record.held_spans, record.sizes)
    with contextlib.suppress(OSError):
        _write_record(folder.use, use, mode=0o644)


def counted_segments(folder: TrialFolder) -> tuple[Mapping[str, Any], ...]:
    """Return the trial's segments; where its script has changed ended ones, those on record.

    Which GPUs those held is known only as far as the changed ones say it. A segment whose container
    has ended, and which is not on record yet, has lasted as long as that ran.
    """
    use, start = _read_record(RecordedUse, folder.use), _read_record(CorrectedStart, folder.start)
    segments = folder.segments()
    if start is not None and start.epoch > (0 if use is None else use.epoch):
        segments = _with_run(segments, start)
    if use is None:
        return segments
    ended = tuple(s for s in segments if s.get("end_s") is not None)
    accounts = Accounts.from_segments(ended[: len(use.held)])
    if (accounts.held, accounts.sizes) == (use.held, use.sizes):
        return segments
    counted: list[Mapping[str, Any]] = []
    for number, ((start_s, end_s), size) in enumerate(zip(use.held, use.sizes, strict=False)):
        segment = segments[number] if number < len(segments) else {}
        gpus = segment.get("gpus") or ()
        is_known = len(gpus) == size
        held = {"start_s": start_s, "end_s": end_s, "gpus": gpus if is_known else range(size)}
        counted.append({"epoch": number, **segment, **held})
    return (*counted, *(s for s in segments if (s.get("epoch") or 0) > use.epoch))


def _with_run(
    segments: tuple[dict[str, Any], ...], start: CorrectedStart
) -> tuple[dict[str, Any], ...]:
    """Return the segments with the observed run of a container where they tell a shorter one."""
    if start.ran_s is None or start.began_s is None:
        return segments
    end_s = start.began_s + start.ran_s
    run = {"epoch": start.epoch, "start_s": start.began_s, "end_s": end_s, "gpus": start.gpus}
    newest = [s for s in segments if s.get("epoch") == start.epoch]
    others = (s for s in segments if s.get("epoch") != start.epoch)
    return (*others, *as_observed(newest, run, SEEN_S))


def with_start(record: SegmentRecord, start: CorrectedStart | None) -> SegmentRecord:
    """Return the record with its segment's start by the clock as it is set now.

    A start that was recorded since is right: the task has corrected it.
    """
    if start is None or (start.epoch, start.recorded_s) != (record.epoch, record.started_s):
        return record
    return with_began(replace(record, started_s=start.started_s), start.began_s)


def with_began(record: SegmentRecord, seen_s: float | None) -> SegmentRecord:
    """Return the record of a segment whose container has been observed to run since `seen_s`.

    Its status, which the script can write too, may say that it began a little later.
    """
    if seen_s is None or record.waited_s == 0.0:
        return record
    waited_s = max(0.0, seen_s - record.started_s)
    if record.waited_s is not None and record.waited_s <= waited_s + SEEN_S:
        return record
    return replace(record, waited_s=waited_s)


def _write_record(
    path: Path,
    record: Lease | StopFlag | Notice | CorrectedStart | RecordedUse | Ending,
    *,
    mode: int,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(encode(record)).encode(), mode=mode)


def _read_record(kind: type[R], path: Path) -> R | None:
    try:
        return decode(kind, json.loads(path.read_text()))
    except (OSError, ValueError):
        return None

"""Where a trial's files lie under HERMES_HOME, and what its accounts say."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_ops.confined_folder import (
    DOCUMENT_BYTES,
    ConfinedFolder,
    NotConfinedError,
    confined,
)
from hermes_ops.errors import HermesError
from hermes_ops.trial.copies import safe_name
from hermes_ops.trial.locks import BusyError, take


def home() -> Path:
    """The one state folder: the environment variable HERMES_HOME, else ~/.hermes."""
    return Path(os.environ.get("HERMES_HOME") or Path.home() / ".hermes").absolute()


def pod_file() -> Path:
    """The installation's defaults for pods: HERMES_POD_DEFAULTS, else pod.yaml in the home."""
    return Path(os.environ.get("HERMES_POD_DEFAULTS") or home() / "pod.yaml")


def sweep_folder(run_id: str) -> Path:
    """The folder of a sweep."""
    return home() / "sweeps" / safe_name(run_id)


NUDGE_PERIOD_S = 0.05
"""How often those who are nudged look."""


@dataclass(slots=True)
class Nudge:
    """A file that is touched to say "look now"; whoever looks would do so a little later anyway.

    It only saves time on one machine: what is to be done stands in Airflow's state store.
    """

    path: Path
    _seen_ns: int = 0

    def give(self) -> None:
        """Say it."""
        with contextlib.suppress(OSError, NotConfinedError):
            folder, name = confined(self.path)
            folder.touch(name)

    def taken(self) -> bool:
        """True when it was said since the last call."""
        try:
            at_ns = self.path.lstat().st_mtime_ns
        except OSError:
            return False
        fresh, self._seen_ns = at_ns != self._seen_ns, at_ns
        return fresh


def controller_nudge() -> Nudge:
    """For the controllers of this home: a trial has left its slot."""
    return Nudge(home() / "nudge")


def metrics_nudge() -> Nudge:
    """For the same: a trial's metrics have been sent to MLflow."""
    return Nudge(home() / "metrics")


@dataclass(frozen=True, slots=True)
class TrialFolder:
    """A trial's folder; the process beside the user's script writes it, everyone else reads."""

    path: Path

    @classmethod
    def of(cls, run_id: str, number: int) -> TrialFolder:
        """The folder of trial `number` of the sweep `run_id`."""
        return cls(sweep_folder(run_id) / "trials" / str(number))

    @property
    def metrics(self) -> Path:
        """Every metric that the trial reported, in order."""
        return self.path / "metrics.jsonl"

    @property
    def sent(self) -> Path:
        """How much of `metrics` has reached MLflow."""
        return self.path / "sent.json"

    def nudge(self) -> Nudge:
        """For the trial's task: its stop flag was written."""
        return Nudge(self.path / "nudge")

    @property
    def stop_flag(self) -> Path:
        """Its stop flag as a file; beside the folder, where its pod does not see it."""
        return self.path.with_name(f"{self.path.name}.stop.json")

    @property
    def lease(self) -> Path:
        """Its newest lease as a file; beside the folder, where its pod does not see it."""
        return self.path.with_name(f"{self.path.name}.lease.json")

    @property
    def checkpoints(self) -> Path:
        """The trial's checkpoints."""
        return self.path / "checkpoints"

    @property
    def workspace(self) -> Path:
        """The trial's own copy of the script's folder, where the sweep asks for one."""
        return self.path / "workspace"

    @property
    def model(self) -> Path:
        """The best model of the trial, where its framework is known."""
        return self.path / "model"

    def empty(self) -> bool:
        """Remove all that the trial left; False, and nothing removed, while a process uses it."""
        try:
            lock = take(self.path / "lock", 0.0, "the trial's folder")
        except BusyError:
            return False
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(lock)
        return True

    def status(self) -> dict[str, Any]:
        """What the running trial says of itself; empty when it has not yet."""
        return _read(self.path / "status.json")

    def result(self) -> dict[str, Any]:
        """How the newest segment ended; empty when none has."""
        return _read(self.path / "result.json")

    def segments(self) -> tuple[dict[str, Any], ...]:
        """All segments in order: epoch, gpus, start_s, first_step and, once ended, end_s,
        last_step, outcome."""
        found: list[dict[str, Any]] = []
        for line in _lines(self.path / "segments.jsonl"):
            if "start_s" in line:
                found.append(dict(line))
            elif found:
                found[-1].update(line)
        return tuple(found)


@dataclass(slots=True)
class StatusFile:
    """What a running trial says of itself, for who asks again and again."""

    _folder: ConfinedFolder
    _name: str
    _stamp: tuple[int, int, int] = (0, 0, 0)
    _said: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: TrialFolder) -> StatusFile:
        """That of the trial whose folder it is."""
        return cls(ConfinedFolder(folder.path), "status.json")

    def read(self) -> Mapping[str, Any]:
        """As `TrialFolder.status`; the same object as before while the file is the same one."""
        try:
            # It is opened each time: a volume in a network tells what is new to who opens.
            with self._folder.open(self._name) as file:
                found = os.fstat(file.fileno())
                stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
                if stamp != self._stamp:
                    self._said, self._stamp = _object(file.read(DOCUMENT_BYTES)), stamp
        except FileNotFoundError:
            return {}
        except OSError as error:
            path = self._folder.root / self._name
            raise HermesError(f"{path} cannot be read: {error.strerror}") from error
        return self._said


@dataclass(frozen=True, slots=True)
class Accounts:
    """Sums over a trial's segments: (start, end) Unix seconds of training, GPU-seconds, counts.

    Its training starts when the start-up and the restore that a segment has measured are over.
    """

    spans: tuple[tuple[float, float], ...]
    service_gpu_s: float
    segments: int
    preemptions: int

    @classmethod
    def of(cls, segments: tuple[Mapping[str, Any], ...]) -> Accounts:
        """The accounts of these segments; one that has not ended counts as a segment only."""
        ended = [s for s in segments if s.get("end_s") is not None]
        held = [(float(s["start_s"]), float(s["end_s"])) for s in ended]
        leads = (float(s.get("startup_s") or 0.0) + float(s.get("restore_s") or 0.0) for s in ended)
        spans = tuple(
            (min(start + lead, end), end) for (start, end), lead in zip(held, leads, strict=True)
        )
        service = sum(
            (end - start) * max(1, len(s.get("gpus") or ()))
            for s, (start, end) in zip(ended, held, strict=True)
        )
        preemptions = sum(s.get("outcome") in ("preempted", "interrupted") for s in ended)
        return cls(spans, service, len(segments), preemptions)


def _read(path: Path) -> dict[str, Any]:
    try:
        folder, name = confined(path)
        return _object(folder.read(name))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise HermesError(f"{path} cannot be read: {error.strerror}") from error


def _object(text: bytes) -> dict[str, Any]:
    """The JSON object, empty where it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        folder, name = confined(path)
        text = folder.read(name)
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:  # the torn last line of a process that was killed
            continue
        if isinstance(value, dict):
            yield value

"""Every decision with its reason: on disk at once, in MLflow a few seconds later.

A decision is appended to `HERMES_HOME/sweeps/<sweep>/decisions.jsonl` before it is applied and
goes to MLflow in numbered chunks. Artifacts cannot be appended to: the newest chunk is written
anew until it is full, so that a sweep of weeks has hundreds of them and not a hundred thousand. The
file is a spool: what a killed controller had not sent, the next one sends.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from hermes_ops.airflow.folders import sweep_folder
from hermes_ops.core.model import JobId, Reason
from hermes_ops.core.plan import Action, Start, Stop
from hermes_ops.errors import HermesError
from hermes_ops.tracking.artifacts import json_objects
from hermes_ops.trial.files import read_json, write_json

if TYPE_CHECKING:
    from hermes_ops.tracking import Tracker

log = logging.getLogger(__name__)

CHUNK_PERIOD_S = 5.0
CHUNK_LINES = 250  # some 100 kB, which each upload may send again
TAIL_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice about one trial: `action` is start, stop, end, resize, notice or wait."""

    time_s: float
    sweep: str
    trial: int
    action: str
    gpus: tuple[int, ...]
    policy: str
    options: dict[str, Any]
    reason: str
    terms: dict[str, float | str] = field(default_factory=dict)
    runner_up: str | None = None
    would_change: str = ""
    curve_age_s: float | None = None

    def line(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"), default=str)


def action_name(action: Action) -> str:
    """Return the name of an action in its record: start, stop, end or resize."""
    if isinstance(action, Stop):
        return "end" if action.final else "stop"
    return "start" if isinstance(action, Start) else "resize"


def decision(
    job: JobId,
    action: str,
    gpus: tuple[int, ...],
    reason: Reason,
    *,
    time_s: float,
    policy: str,
    options: Mapping[str, Any],
    curve_age_s: float | None,
) -> Decision:
    """Return the record of one choice."""
    sweep, _, number = job.rpartition("/")
    return Decision(
        time_s=time_s,
        sweep=sweep,
        trial=int(number),
        action=action,
        gpus=gpus,
        policy=policy,
        options=dict(options),
        reason=reason.text,
        terms={t.name: t.value if isfinite(t.value) else str(t.value) for t in reason.terms},
        runner_up=reason.runner_up,
        would_change=reason.would_change,
        curve_age_s=curve_age_s,
    )


@dataclass(slots=True)
class DecisionLog:
    """Appends decisions and sends them; one a controller."""

    tracker: Tracker
    _last_upload: dict[str, float] = field(default_factory=dict)

    def append(self, decisions: Iterable[Decision]) -> None:
        """Write decisions to their sweeps' files; they survive this process from now on."""
        by_sweep: dict[str, list[str]] = {}
        for entry in decisions:
            by_sweep.setdefault(entry.sweep, []).append(entry.line() + "\n")
        for sweep, lines in by_sweep.items():
            path = _path(sweep)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b", buffering=0) as file:
                torn = "\n" if _is_torn(file) else ""
                _append_whole(file, (torn + "".join(lines)).encode())

    def upload(self, sweep: str, parent_run_id: str, *, force: bool = False) -> None:
        """Send what has not been sent, at most every few seconds."""
        now = time.monotonic()
        if not force and now - self._last_upload.get(sweep, 0.0) < CHUNK_PERIOD_S:
            return
        self._last_upload[sweep] = now
        try:
            while _send_chunk(self.tracker, sweep, parent_run_id):
                pass
        except (HermesError, OSError) as error:  # MLflow is away, or the volume is full
            log.warning("Decisions of %s stay on disk for now: %s", sweep, error)


def _send_chunk(tracker: Tracker, sweep: str, parent_run_id: str) -> bool:
    path, state_path = _path(sweep), _path(sweep).with_suffix(".sent.json")
    if not path.exists():
        return False
    sent = _SentDecisions.read(state_path)
    with path.open("rb") as file:
        file.seek(sent.begin)
        lines = [line for line, _ in zip(file, range(CHUNK_LINES), strict=False)]
    complete = [line for line in lines if line.endswith(b"\n")]
    end = sent.begin + sum(map(len, complete))
    if end <= sent.bytes:
        return False
    texts = [line.decode(errors="replace").rstrip("\n") for line in complete]
    tracker.record_decisions(parent_run_id, sent.open_chunk, texts)
    is_full = len(complete) == CHUNK_LINES
    begin = end if is_full else sent.begin
    write_json(state_path, _SentDecisions(end, sent.open_chunk, begin)._asdict())
    return is_full


class _SentDecisions(NamedTuple):
    """What MLflow has: bytes of the file, chunks, and where the next upload begins to read.

    That is at `bytes` where the last chunk is full, else at the beginning of that chunk.
    """

    bytes: int = 0
    chunk: int = 0
    begin: int = 0

    @property
    def open_chunk(self) -> int:
        """The number of the chunk that the next upload writes."""
        return self.chunk if self.begin < self.bytes else self.chunk + 1

    @classmethod
    def read(cls, path: Path) -> _SentDecisions:
        """Return what the file of the last upload says; that nothing was sent if it is damaged.

        In that case all decisions are sent again, so MLflow may have some of them twice.
        """
        state = read_json(path) or {}
        # No beginning was noted while each upload was a chunk of its own.
        noted = (state.get("bytes"), state.get("chunk"), state.get("begin", state.get("bytes")))
        numbers = [number for number in noted if isinstance(number, int) and number >= 0]
        sent = cls(*numbers) if len(numbers) == len(noted) else cls()
        return sent if sent.begin <= sent.bytes else cls()


def read_of_trial(sweep: str, number: int) -> list[dict[str, Any]] | None:
    """Return the decisions about a trial, oldest first; None where this machine has no log.

    Of the decisions about all other trials, which may be a hundred thousand, none is parsed.
    """
    path, named = _path(sweep), re.compile(rb'"trial": ?%d\b' % number)
    if not path.exists() or not path.stat().st_size:
        return None
    with path.open("rb") as file:
        lines = b"".join(line for line in file if named.search(line))
    return [decision for decision in json_objects(lines) if decision.get("trial") == number]


def read_tail(sweep: str) -> list[dict[str, Any]]:
    """Return the newest decisions that lie on this machine, up to 64 kB, oldest first."""
    return read_before(sweep)[0]


def read_before(sweep: str, end: int | None = None) -> tuple[list[dict[str, Any]], int]:
    """Return the newest decisions before byte `end` of the file, up to 64 kB, oldest first.

    Also returns the byte at which they begin, 0 where there are none before them.
    """
    path = _path(sweep)
    if not path.exists():
        return [], 0
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        stop = size if end is None else max(0, min(end, size))
        begin = max(0, stop - TAIL_BYTES)
        file.seek(begin)
        if begin:
            begin += len(file.readline())  # the rest of a line
        return json_objects(file.read(max(0, stop - begin))), min(begin, stop)


def _append_whole(file: IO[bytes], data: bytes) -> None:
    """Append all of it; an OSError leaves nothing of it."""
    end = file.seek(0, os.SEEK_END)
    try:
        _write_all(file, data)
    except OSError:
        file.truncate(end)
        raise


def _write_all(file: IO[bytes], data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _is_torn(file: IO[bytes]) -> bool:
    """Return whether a kill has left a line without its end: it must not swallow the next one."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _path(sweep: str) -> Path:
    return sweep_folder(sweep) / "decisions.jsonl"

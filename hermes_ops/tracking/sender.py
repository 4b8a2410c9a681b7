"""Sends a trial's metrics file to its MLflow run: in order, in batches, each step once.

The file is the spool: whole lines in order, each (name, step) once, in bounded memory.
"""

from __future__ import annotations

import json
import logging
import math
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_ops.confined_folder import NotConfinedError, confined
from hermes_ops.errors import HermesError, Refused
from hermes_ops.tracking.rest import legal_name
from hermes_ops.tracking.tracker import Tracker

_log = logging.getLogger(__name__)
_BATCH_METRICS = 1_000  # MLflow's limits of one request: 1,000 metrics, 1 MB
_BATCH_BYTES = 900_000
_METRIC_BYTES = 130  # the JSON of a metric without its name, at the most
_PUMP_BATCHES = 10  # at most in one pump, so that its caller gets to its other work
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class MetricSender:
    """Follow `metrics_file` and send each new metric to the run, with its recorded time.

    The file itself is the spool: while MLflow is away nothing is held in memory, and `state_file`
    holds the offset of the last acknowledged metric. Losing that file, or an acknowledgement, sends
    points again, of which MLflow keeps one. A run has one sender, used from one thread.

    Names that MLflow does not allow are changed by `legal_name`. NaN is kept; an infinity is stored
    as the largest double, as MLflow does. A metric that MLflow refuses is logged and skipped, and
    so are all metrics of a deleted run.
    """

    def __init__(
        self,
        run_id: str,
        metrics_file: Path,
        state_file: Path,
        tracker: Tracker,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run_id = run_id
        self._file = metrics_file
        self._state = state_file
        self._tracker = tracker
        self._clock = clock
        self._sleep = sleep
        self._offset = load_offset(state_file)
        self._seen: SeenSteps | None = None  # rebuilt from the file when first needed
        self._pause_s = 0.0
        self._not_before_s = -math.inf

    @property
    def behind_bytes(self) -> int:
        """Bytes of the file that MLflow has not acknowledged; a torn last line counts."""
        return max(0, self._size() - self._offset)

    def pump(self) -> int:
        """Send at most 10,000 new metrics; return how many were sent.

        While MLflow is away return 0 without an error; a later call tries again, after a pause that
        doubles from 0.5 s to 30 s.
        """
        if self._clock() < self._not_before_s:
            return 0
        sent = 0
        try:
            for _ in range(_PUMP_BATCHES):
                count = self._send_next()
                if count is None:
                    break
                sent += count
        except HermesError:
            self._back_off()
        return sent

    def drain(self, timeout_s: float) -> bool:
        """Send all metrics; return False when `timeout_s` seconds were not enough."""
        deadline_s = self._clock() + timeout_s
        while True:
            before = self._offset
            self.pump()
            if self._is_drained():
                return True
            now_s = self._clock()
            if now_s >= deadline_s:
                return False
            if self._offset == before:
                wait_s = max(0.05, self._not_before_s - now_s)
                self._sleep(min(wait_s, 0.5, deadline_s - now_s))
                self._not_before_s = -math.inf  # the caller waits: try more often

    def _is_drained(self) -> bool:
        if self.behind_bytes == 0:
            return True
        return next(read_lines(self._file, self._offset), None) is None

    def _send_next(self) -> int | None:
        """Send one batch and note the offset; None when there is nothing to send."""
        if not self._refreshed():
            return None
        batch, end = self._next_batch()
        if end == self._offset:
            return None
        if batch:
            try:
                self._send([_entry(line) for line in batch])
            except HermesError:
                self._seen = None  # it contains the batch, which was not sent
                raise
            self._pause_s = 0.0
        save_offset(self._state, end)
        self._offset = end
        return len(batch)

    def _refreshed(self) -> bool:
        """Prepare to read on; return False when there is nothing beyond the offset."""
        size = self._size()
        if size < self._offset:  # the file was replaced
            self._offset, self._seen = 0, None
        if size == self._offset:
            return False
        if self._seen is None:
            self._seen = SeenSteps()
            for line, _ in read_lines(self._file, 0, self._offset):
                if line is not None:
                    self._seen.add(line.name, line.step)
        return True

    def _next_batch(self) -> tuple[list[SpoolEntry], int]:
        """Return the next metrics to send and the offset behind them."""
        seen = self._seen
        assert seen is not None
        batch: list[SpoolEntry] = []
        size, end = 0, self._offset
        for line, offset in read_lines(self._file, self._offset):
            end = offset
            if line is None or not seen.add(line.name, line.step):
                continue
            batch.append(line)
            size += len(line.name.encode(errors="replace")) + _METRIC_BYTES
            if len(batch) >= _BATCH_METRICS or size >= _BATCH_BYTES:
                break
        return batch, end

    def _send(self, metrics: list[dict[str, Any]]) -> None:
        """Send metrics; bisect a refused batch down to the refused metrics and skip those."""
        try:
            self._tracker.log_metrics(self._run_id, metrics)
        except Refused as error:
            if error.code == "PERMISSION_DENIED":
                raise
            if not self._tracker.accepts(self._run_id):
                _log.warning("Run %s is gone: %d metrics left out.", self._run_id, len(metrics))
            elif len(metrics) == 1:
                _log.warning("MLflow refused the metric %s: %s", metrics[0], error)
            else:
                half = len(metrics) // 2
                self._send(metrics[:half])
                self._send(metrics[half:])

    def _back_off(self) -> None:
        self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
        self._not_before_s = self._clock() + self._pause_s

    def _size(self) -> int:
        try:
            status = self._file.lstat()
        except FileNotFoundError:
            return 0
        return status.st_size if stat.S_ISREG(status.st_mode) else 0  # a link is never followed


def _entry(line: SpoolEntry) -> dict[str, Any]:
    value: float | str = line.value
    if not math.isfinite(line.value):
        value = "NaN" if math.isnan(line.value) else ("Infinity" if line.value > 0 else "-Infinity")
    return {
        "key": legal_name(line.name),
        "value": value,
        "timestamp": line.time_ms,
        "step": line.step,
    }


_BLOCK_BYTES = 1 << 20
_TOO_GREAT = 1 << 63
_MAX_RANGES = 100_000  # of all names, about 10 MB
_MAX_RANGES_OF_NAME = 1_000  # each new step is looked for in all of them


@dataclass(frozen=True, slots=True)
class SpoolEntry:
    """A metric of the file; `time_ms` is Unix time."""

    name: str
    value: float
    step: int
    time_ms: int


def read_lines(
    path: Path, start: int, stop: int | None = None
) -> Iterator[tuple[SpoolEntry | None, int]]:
    """Yield (metric, offset behind it) for each complete line from byte `start` to `stop`.

    The metric is None for a line that cannot be parsed (torn by a crash, or damaged). A last line
    without its newline is left for the next call.
    """
    folder, name = confined(path)
    with folder.open(name) as stream:
        stream.seek(start)
        offset = start
        while stop is None or offset < stop:
            line = stream.readline(_BLOCK_BYTES)
            if not line.endswith(b"\n") and len(line) < _BLOCK_BYTES:
                return
            offset += len(line)
            yield _parsed(line), offset


def _parsed(text: bytes) -> SpoolEntry | None:
    try:
        entry = json.loads(text)
        name, step, time_ms = entry["name"], entry["step"], entry["time_ms"]
        line = SpoolEntry(name, float(entry["value"]), int(step), int(time_ms))
        # MLflow does not refuse a number too great for it: it would store step 0.
        is_storable = abs(line.step) < _TOO_GREAT and 0 <= line.time_ms < _TOO_GREAT
        return line if is_storable and isinstance(name, str) else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


class SeenSteps:
    """The set of (name, step) pairs that were read, in bounded memory.

    Equidistant steps, the usual case, are stored as one range. Past 1,000 ranges of a name, or
    100,000 in all, the oldest are forgotten; a pair that is read again after that is sent again,
    and MLflow keeps equal points once.
    """

    def __init__(self) -> None:
        self._ranges: dict[str, list[range]] = {}
        self._count = 0

    def add(self, name: str, step: int) -> bool:
        """Add a pair; return False if it was there."""
        ranges = self._ranges.setdefault(name, [])
        if any(step in r for r in reversed(ranges)):
            return False
        if ranges and (longer := _extended(ranges[-1], step)) is not None:
            ranges[-1] = longer
            return True
        ranges.append(range(step, step + 1))
        self._count += 1
        if len(ranges) > _MAX_RANGES_OF_NAME:
            del ranges[: _MAX_RANGES_OF_NAME // 2]
            self._count -= _MAX_RANGES_OF_NAME // 2
        if self._count > _MAX_RANGES:
            self._forget()
        return True

    def _forget(self) -> None:
        for name, ranges in list(self._ranges.items()):
            self._ranges[name] = ranges[len(ranges) // 2 :]
        self._count = sum(map(len, self._ranges.values()))
        if self._count > _MAX_RANGES // 2:  # too many names: forget all
            self._ranges, self._count = {}, 0


def _extended(last: range, step: int) -> range | None:
    """Return `last` with `step` as its next member; None when it does not continue it."""
    if len(last) == 1:
        distance = step - last.start
        return range(last.start, step + 1, distance) if distance > 0 else None
    return range(last.start, step + 1, last.step) if step == last[-1] + last.step else None


def load_offset(path: Path) -> int:
    """Return the offset that `save_offset` stored; 0 when it cannot be read."""
    try:
        folder, name = confined(path)
        return max(0, int(json.loads(folder.read(name))["offset"]))
    except (OSError, NotConfinedError, ValueError, TypeError, KeyError, RecursionError):
        return 0


def save_offset(path: Path, offset: int) -> None:
    """Replace the stored offset atomically."""
    folder, name = confined(path)
    folder.replace(name, json.dumps({"offset": offset}).encode())

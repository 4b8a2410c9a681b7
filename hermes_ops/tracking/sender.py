"""Sends a trial's metrics file to its MLflow run: in order, in batches, no step twice."""

from __future__ import annotations

import logging
import math
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hermes_ops.errors import HermesError, Refused
from hermes_ops.tracking.names import legal_name
from hermes_ops.tracking.spool import Line, Seen, load_offset, read_lines, save_offset
from hermes_ops.tracking.tracker import Tracker

_log = logging.getLogger(__name__)
_BATCH_METRICS = 1_000  # MLflow's limits of one request: 1,000 metrics, 1 MB
_BATCH_BYTES = 900_000
_METRIC_BYTES = 130  # the JSON of a metric without its name, at the most
_PUMP_BATCHES = 10  # at most in one pump, so that its caller gets to its other work
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class MetricSender:
    """Follows `metrics_file` and sends each new metric to the run, with the time it recorded.

    The file itself is the spool: while MLflow is away nothing is held in memory, and the offset
    of what MLflow has acknowledged stands in `state_file`. Losing that file, or an
    acknowledgement, sends points again that MLflow keeps once. The sender is the only one for its
    run; use it from one thread.

    Names that MLflow does not allow are changed by `legal_name`. NaN is kept; an infinity is kept
    as the largest double, as MLflow does. A metric that MLflow refuses is logged and left out, and
    so are all of a run that was deleted.
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
        self._seen: Seen | None = None  # rebuilt from the file, the one truth, when first needed
        self._pause_s = 0.0
        self._not_before_s = -math.inf
        self.last_error: HermesError | None = None  # why nothing goes out now, None when it does

    @property
    def behind_bytes(self) -> int:
        """Bytes of the file that MLflow has not acknowledged; a torn last line counts."""
        return max(0, self._size() - self._offset)

    def pump(self) -> int:
        """Send what is there, at most 10,000 metrics; return how many were sent.

        Never raises for an MLflow that is away: it returns 0 and tries again in a later call,
        after a pause that doubles from 0.5 s to 30 s.
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
        except HermesError as error:
            self._back_off(error)
        return sent

    def drain(self, timeout_s: float) -> bool:
        """Send until nothing is left; False when `timeout_s` seconds were not enough."""
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
                self._not_before_s = -math.inf  # here somebody waits: ask more often

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
                self._seen = None  # the batch is noted there, and was not sent
                raise
            self._pause_s, self.last_error = 0.0, None
        save_offset(self._state, end)
        self._offset = end
        return len(batch)

    def _refreshed(self) -> bool:
        """Make ready for reading on; False when there is nothing beyond the offset."""
        size = self._size()
        if size < self._offset:  # another file than the one that we know
            self._offset, self._seen = 0, None
        if size == self._offset:
            return False
        if self._seen is None:
            self._seen = Seen()
            for line, _ in read_lines(self._file, 0, self._offset):
                if line is not None:
                    self._seen.add(line.name, line.step)
        return True

    def _next_batch(self) -> tuple[list[Line], int]:
        """Return the next metrics to send and the offset behind them."""
        seen = self._seen
        assert seen is not None
        batch: list[Line] = []
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
        """Send; what MLflow refuses is narrowed down to the single metrics and left out."""
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

    def _back_off(self, error: HermesError) -> None:
        self.last_error = error
        self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
        self._not_before_s = self._clock() + self._pause_s

    def _size(self) -> int:
        try:
            found = self._file.lstat()
        except FileNotFoundError:
            return 0
        return found.st_size if stat.S_ISREG(found.st_mode) else 0  # a link is nothing to send


def _entry(line: Line) -> dict[str, Any]:
    value: float | str = line.value
    if not math.isfinite(line.value):
        value = "NaN" if math.isnan(line.value) else ("Infinity" if line.value > 0 else "-Infinity")
    return {
        "key": legal_name(line.name),
        "value": value,
        "timestamp": line.time_ms,
        "step": line.step,
    }

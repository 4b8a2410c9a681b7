"""Pass a script's output on, secrets masked, without ever waiting for a slow reader."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from hermes_ops.trial.disk_space import format_bytes
from hermes_ops.trial.output.pattern_matcher import PatternMatcher
from hermes_ops.trial.output.rank_log import WorkerLog
from hermes_ops.trial.redaction import Mask

_BLOCK_BYTES = 65_536
_ATOMIC_BYTES = 4096  # a pipe that is ready takes so many bytes without blocking (PIPE_BUF)
_BACKLOG_BYTES = 1_048_576
_PIPE_BYTES = 1_048_576  # the most that a pipe holds, for an ordinary user
_LAST_BYTES = 65_536  # of the output, for a reader that is too slow for all that waits for it


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line of hermes-trial's own at once; do nothing if its reader is gone.

    It goes to standard output unless another `stream` is given.
    """
    with contextlib.suppress(OSError):
        print(f"hermes-trial: {text}", file=stream, flush=True)


class Relay:
    """From the script's output to our own, showing each block to `listen` on the way.

    The script's output is passed on byte for byte, except for secrets, which are masked, and for
    what `log` leaves out of a long one.
    At most a MiB waits for a slow reader; then the script waits, as it does while `matcher` is
    full. If our reader has gone, the output is still read, so that the script does not die of it.
    `logs`: the output of further workers, which is not passed on.
    """

    def __init__(
        self,
        source: int,
        listen: Callable[[bytes], None],
        target: int = 1,
        mask: Mask | None = None,
        matcher: PatternMatcher | None = None,
        *,
        logs: Sequence[WorkerLog] = (),
        log: LimitedLog | None = None,
    ) -> None:
        self._matcher = matcher
        self._logs = logs
        self._source: int | None = source
        self._target: int | None = target
        self._listen = listen
        self._masked = (mask or Mask()).stream()
        self._log = log or LimitedLog()
        self._backlog = bytearray()
        self._words = bytearray()  # our own lines, for the next end of a line
        self._output = target
        self._is_line_ended = True
        self._is_line_sent = True
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)

    def pump(self, timeout_s: float) -> None:
        """Move what can be moved, for at most `timeout_s` or until a signal arrives."""
        sources, targets = ([], []) if self._matcher is None else self._matcher.handles()
        if self._source is not None and self._takes_more():
            sources.append(self._source)
        if self._backlog and self._target is not None:
            targets.append(self._target)
        sources += [self._wake, *(log.source for log in self._logs if log.source is not None)]
        readable, writable, _ = select.select(sources, targets, [], timeout_s)
        if self._wake in readable:
            os.read(self._wake, 4096)
        if self._source is not None and self._source in readable:
            self._read()
        if self._target in writable:
            self._write()
        self._read_logs(readable)
        if self._matcher is not None:
            self._matcher.exchange()

    def drain(self, timeout_s: float) -> None:
        """Pass on what is still in the pipes after the script's end, for at most `timeout_s`.

        A reader that is too slow for that has as long again for the last part, which says how the
        script has ended.
        """
        self._pump_while(self._is_open, timeout_s)
        for _ in range(_PIPE_BYTES // _BLOCK_BYTES):
            if self._source is None or not select.select([self._source], [], [], 0)[0]:
                break
            self._read()
        if len(self._backlog) > _LAST_BYTES:
            end = last_part(bytes(self._backlog), _LAST_BYTES)
            self._backlog[:] = end if self._is_line_sent else b"\n" + end
        self._pump_while(lambda: bool(self._backlog), timeout_s)
        self._target = None
        self._backlog.clear()
        for log in self._logs:
            log.drain()
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        os.close(self._wake)
        os.close(self._waker)

    def _pump_while(self, is_needed: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while is_needed() and time.monotonic() < deadline_s:
            self.pump(min(0.05, timeout_s))

    def say(self, line: str) -> None:
        """Put a line of our own between the script's, at the next end of a line."""
        self._words += line.encode(errors="replace") + b"\n"

    def end(self) -> None:
        """Write our own lines that are still held after `drain`, unless our reader is slow."""
        words = (b"" if self._is_line_ended else b"\n") + self._words
        with contextlib.suppress(OSError):
            if self._words and select.select([], [self._output], [], 0)[1]:
                os.write(self._output, words[:_ATOMIC_BYTES])
        self._words.clear()

    def _is_open(self) -> bool:
        is_logged = any(log.source is not None for log in self._logs)
        return self._source is not None or bool(self._backlog) or is_logged

    def _takes_more(self) -> bool:
        is_full = self._matcher is not None and self._matcher.is_full
        return len(self._backlog) < _BACKLOG_BYTES and not is_full

    def _read(self) -> None:
        assert self._source is not None
        data = os.read(self._source, _BLOCK_BYTES)
        if data:
            self._listen(data)
        else:
            self._source = None
        if self._target is not None:
            shown = self._masked.feed(data) if data else self._masked.close()
            self._pass_on(self._log.feed(shown))
            if not data:
                self._pass_on(self._log.close())

    def _read_logs(self, readable: Sequence[object]) -> None:
        for log in self._logs:
            if log.source in readable:
                log.read()

    def _pass_on(self, piece: bytes) -> None:
        end = piece.rfind(b"\n") + 1
        if piece:
            self._is_line_ended = end == len(piece)
        if self._words and (end or (self._log.is_full and self._is_line_ended)):
            piece = piece[:end] + self._words + piece[end:]
            self._words.clear()
        self._backlog += piece

    def _write(self) -> None:
        assert self._target is not None
        try:
            sent = os.write(self._target, self._backlog[:_ATOMIC_BYTES])
            self._is_line_sent = self._backlog[sent - 1 : sent] == b"\n"
            del self._backlog[:sent]
        except BlockingIOError:
            return
        except OSError:  # our reader has gone
            self._target = None
            self._backlog.clear()


FIRST_BYTES = 16 << 20
LAST_BYTES = 1 << 18  # a slow reader of the log has two seconds for it


class LimitedLog:
    """Pass output on up to `first_bytes`, and at its end the last `last_bytes` of the rest.

    Both are cut at ends of lines where there are any. A line of our own is at each cut.
    """

    def __init__(self, first_bytes: int = FIRST_BYTES, last_bytes: int = LAST_BYTES) -> None:
        self._left_bytes = first_bytes
        self._last_bytes = last_bytes
        self._first_bytes = first_bytes
        self._rest = bytearray()
        self._dropped_bytes = 0
        self._is_line_ended = True
        self.is_full = False

    def feed(self, data: bytes) -> bytes:
        """Return what of `data` is to be passed on now."""
        if self.is_full:
            self._keep(data)
            return b""
        if len(data) <= self._left_bytes:
            self._left_bytes -= len(data)
            self._is_line_ended = data.endswith(b"\n") if data else self._is_line_ended
            return data
        self.is_full = True
        end = data.rfind(b"\n", 0, self._left_bytes) + 1 or self._left_bytes
        self._keep(data[end:])
        first_size, last_size = map(format_bytes, (self._first_bytes, self._last_bytes))
        notice = (
            f"hermes-trial: the output of this segment is longer than {first_size}: the rest is "
            f"read for values, and its last {last_size} will be shown at the end\n"
        )
        first = data[:end]
        is_line_ended = first.endswith(b"\n") if first else self._is_line_ended
        return first + (b"" if is_line_ended else b"\n") + notice.encode()

    def close(self) -> bytes:
        """Return the last part of the output, once nothing more comes."""
        rest = last_part(bytes(self._rest), self._last_bytes, self._dropped_bytes)
        self._rest.clear()
        return rest

    def _keep(self, data: bytes) -> None:
        self._rest += data
        if len(self._rest) > 2 * self._last_bytes:
            self._drop(self._last_bytes)

    def _drop(self, kept_bytes: int) -> None:
        surplus = max(0, len(self._rest) - kept_bytes)
        del self._rest[:surplus]
        self._dropped_bytes += surplus


def last_part(data: bytes, kept_bytes: int, dropped_bytes: int = 0) -> bytes:
    """Return the end of `data`, from a line's beginning, below a line that says what is missing.

    `dropped_bytes` before `data` are missing already. If there are none, up to `kept_bytes` are
    returned as they are.
    """
    surplus = max(0, len(data) - kept_bytes)
    if not surplus + dropped_bytes:
        return data
    begin = data.find(b"\n", surplus) + 1 or surplus
    notice = f"hermes-trial: {format_bytes(dropped_bytes + begin)} of output are left out here\n"
    return notice.encode() + data[begin:]

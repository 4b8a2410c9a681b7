"""Limit what a segment adds to the log of its task: the first part of the output, and its end."""

from __future__ import annotations

from hermes_ops.trial.disk_space import format_bytes

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

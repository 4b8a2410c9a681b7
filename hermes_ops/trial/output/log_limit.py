"""Limit what a segment adds to the log of its task: the first part of the output, and its end."""

from __future__ import annotations

FIRST_BYTES = 16 << 20
LAST_BYTES = 1 << 18  # a slow reader of the log has two seconds for it

_UNITS = ("bytes", "KiB", "MiB", "GiB")


class LimitedLog:
    """Pass output on up to `first_bytes`, and at its end the last `last_bytes` of the rest.

    Both are cut at ends of lines where there are any. A line of our own is at each cut.
    """

    def __init__(self, first_bytes: int = FIRST_BYTES, last_bytes: int = LAST_BYTES) -> None:
        self._left_bytes = first_bytes
        self._last_bytes = last_bytes
        self._first = _size(first_bytes)
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
        notice = (
            f"hermes-trial: the output of this segment is longer than {self._first}: the rest is "
            f"read for values, and its last {_size(self._last_bytes)} will be shown at the end\n"
        )
        first = data[:end]
        is_line_ended = first.endswith(b"\n") if first else self._is_line_ended
        return first + (b"" if is_line_ended else b"\n") + notice.encode()

    def close(self) -> bytes:
        """Return the last part of the output, once nothing more comes."""
        self._drop(self._last_bytes)
        rest = bytes(self._rest)
        self._rest.clear()
        if not self._dropped_bytes:
            return rest
        begin = rest.find(b"\n") + 1
        self._dropped_bytes += begin
        notice = f"hermes-trial: {_size(self._dropped_bytes)} of output are left out here\n"
        return notice.encode() + rest[begin:]

    def _keep(self, data: bytes) -> None:
        self._rest += data
        if len(self._rest) > 2 * self._last_bytes:
            self._drop(self._last_bytes)

    def _drop(self, kept_bytes: int) -> None:
        surplus = max(0, len(self._rest) - kept_bytes)
        del self._rest[:surplus]
        self._dropped_bytes += surplus


def _size(count: int) -> str:
    amount, unit = float(count), 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.3g} {_UNITS[unit]}"

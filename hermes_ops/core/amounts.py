"""Numbers and times for people: no exponent where a plain number can stand."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from math import floor, isfinite, log10

_LEAST, _MOST = 1e-4, 1e15  # outside of these a power of ten is easier to read


def duration(seconds: float) -> str:
    """Return a time for people: `42 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3_600} h {whole % 3_600 // 60:02d} min"


def short_duration(seconds: float) -> str:
    """Return a time for people, below ten seconds with tenths: `0.4 s`."""
    if not isfinite(seconds):
        return "an unknown time"
    return f"{seconds:.1f} s" if 0 <= seconds < 9.95 else duration(seconds)


def utc_text(time_s: float) -> str:
    """Return a Unix time for people: `2026-11-29 08:15:00 UTC`. OverflowError beyond year 9999."""
    whole = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=round(time_s))
    return whole.strftime("%Y-%m-%d %H:%M:%S UTC")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 trial`, `2 trials`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shortened(text: str, most: int) -> str:
    """Return the first `most` characters of a text, and `…` if there are more."""
    return text if len(text) <= most else f"{text[:most]}…"


def first_lines(lines: Sequence[str], most: int, rest: str) -> list[str]:
    """Return at most `most` lines and, if there are more, `rest` with their number for its `{}`."""
    left = len(lines) - most
    return [*lines[:most], rest.format(left)] if left > 0 else list(lines)


def on_gpus(gpus: Sequence[int]) -> str:
    """Return ` on GPU 0, 1`; empty without any."""
    return f" on GPU {', '.join(map(str, gpus))}" if gpus else ""


def figure(value: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits, as `0.0312`, `12.5`, `1,234`, `3.2e-05`.

    Digits before the point are never cut; infinities and NaN are `inf`, `-inf` and `nan`.
    """
    if value == 0 or not isfinite(value):
        return f"{value:g}"
    if not _LEAST <= abs(value) < _MOST:
        return f"{value:.{digits}g}"
    places = digits - 1 - floor(log10(abs(value)))
    text = f"{value:,.{max(0, places)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text

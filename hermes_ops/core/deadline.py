"""The deadline of a sweep: a time, or a duration from its start."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from hermes_ops.core.amounts import utc_text

MOST_S = 1e9
REPORT_S = 300.0
"""Seconds after the end of the last trial within which a sweep has its report."""
_UNITS = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile("".join(rf"(?:(?P<{unit}>\d+(?:\.\d+)?){unit}\s*)?" for unit in _UNITS))
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?\s?([+-]\d\d:\d\d|Z)")

MISSED = "its deadline has passed"
"""The beginning of the reason for which a sweep ends at its deadline."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A deadline as a sweep file has it: `time_s` in Unix seconds, else `duration_s`."""

    time_s: float | None = None
    duration_s: float | None = None

    @classmethod
    def from_text(cls, text: str) -> Deadline:
        """Read `2026-12-01T08:00:00+01:00`, or a duration such as `8h` or `1d 12h 30m`.

        Raise ValueError with the fact.
        """
        text = text.strip()
        if (match := _DURATION.fullmatch(text)) and text:
            parts = {unit: float(number) for unit, number in match.groupdict("0").items()}
            seconds = sum(number * _UNITS[unit] for unit, number in parts.items())
            if not 0 < seconds <= MOST_S:
                raise ValueError(f"{seconds:g} seconds, not above 0 and up to {MOST_S:g}")
            return cls(duration_s=seconds)
        if not _TIME.fullmatch(text):
            raise ValueError("neither a time with its offset from UTC nor a duration")
        try:
            at = datetime.fromisoformat(text[:11] + text[11:].replace(" ", ""))
            time_s = (at - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
            utc_text(time_s)  # raises if it is beyond the calendar in UTC
            return cls(time_s=time_s)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"no time of a calendar: {error}") from None

    def at_s(self, start_s: float) -> float:
        """Return when it is, in Unix seconds, for a sweep that begins at `start_s`."""
        if self.time_s is not None:
            return self.time_s
        return start_s + (self.duration_s or 0.0)


def missed(at_s: float, trials: Iterable[tuple[bool, bool]]) -> str:
    """Return why a sweep ends at its deadline, with the number of trials that are not complete.

    `trials`: for each trial whether it has begun, and whether it has ended.
    """
    listed = list(trials)
    ended = sum(has_ended for _, has_ended in listed)
    cut = sum(has_begun and not has_ended for has_begun, has_ended in listed)
    unbegun = len(listed) - ended - cut
    return (
        f"{MISSED} ({utc_text(at_s)}): of {len(listed)} trials {ended} had ended, {cut} were "
        f"stopped before their end, {unbegun} had not begun"
    )


@dataclass(frozen=True, slots=True)
class DeadlineResult:
    """Whether a sweep has kept its deadline, `at_s` in Unix seconds; None while it runs."""

    at_s: float
    kept: bool | None

    @classmethod
    def from_end(
        cls, at_s: float, *, has_ended: bool, reason: str, ended_s: float | None = None
    ) -> DeadlineResult:
        """Return the result of a sweep from the reason of its end; empty if all trials ended.

        It is not kept either by trials that end long after it by themselves, as they do while no
        controller runs: `ended_s` is when its report was written, if that is known.
        """
        if not has_ended:
            return cls(at_s, None)
        is_late = ended_s is not None and ended_s > at_s + REPORT_S
        return cls(at_s, not (is_late or reason.startswith(MISSED)))

    @property
    def words(self) -> str:
        """Return it as `2026-12-01 07:00:00 UTC: kept`."""
        result = {None: "", True: ": kept", False: ": not kept"}[self.kept]
        return f"{utc_text(self.at_s)}{result}"

    def to_document(self) -> dict[str, str | bool | None]:
        """Return it for a JSON document: the time in ISO 8601, and whether it was kept."""
        at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=round(self.at_s))
        return {"at": at.isoformat(), "kept": self.kept}

"""The training time of a recorded trial: without pauses between segments and start-ups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from hermes_ops.core.model import Point
from hermes_ops.core.summary import CurvePoints, Segment

STOPPED = ("preempted", "interrupted")


@dataclass(frozen=True, slots=True)
class Training:
    """The training of one trial, derived from its recorded points and segments.

    `step_s`: the typical seconds of a step, and `slowest_step_s` the longest of one, both from
    points that follow each other within a segment; None without such. `leads_s`: of each segment
    in order, the seconds before it trained (interpreter, framework, restore, first trace), None
    where that cannot be told. `tail_s`: from the last point to the end of the segment that
    finished the trial; None when none did.
    """

    curve: tuple[Point, ...]
    step_s: float | None
    slowest_step_s: float | None
    leads_s: tuple[float | None, ...]
    tail_s: float | None


def training(
    points: CurvePoints,
    segments: Sequence[Segment],
    *,
    sign: float = 1.0,
    typical_step_s: float | None = None,
    startup_s: float | None = None,
    leave_s: float = 0.0,
) -> Training:
    """Return the trial's curve over cumulative seconds of training; losses times `sign`.

    The first point of a segment comes after the start-up. What of that was training is what its
    steps take elsewhere in the trial, else `typical_step_s` a step, else what `startup_s` leaves
    (a segment whose start-up nothing tells of counts as training whole). Training past the last
    point of a stopped segment, all but the `leave_s` seconds of leaving, is credited to the next
    one's first point: it resumes there. Without any segment the clock starts at the first point.
    A point at step 0 is left out: it was measured before the training.
    """
    trained = tuple(point for point in points if point[0] > 0)
    parts = _parts(trained, sorted(segments, key=lambda s: s.start_s))
    paces_s = [rate for part in parts for rate in part.rates]
    pace_s = median(paces_s) if paces_s else typical_step_s
    clock = _TrainingClock(sign, pace_s, startup_s, leave_s)
    for part in parts:
        clock.add(part)
    return Training(
        tuple(clock.curve),
        median(paces_s) if paces_s else None,
        max(paces_s, default=None),
        tuple(clock.leads_s),
        clock.tail_s,
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment and the points that it reported; points before any segment have None."""

    segment: Segment | None
    points: CurvePoints

    @property
    def rates(self) -> list[float]:
        """Seconds a step between points that follow each other."""
        return [
            max(0.0, (later[2] - earlier[2]) / 1000.0) / (later[0] - earlier[0])
            for earlier, later in pairwise(self.points)
            if later[0] > earlier[0]
        ]


def _parts(points: CurvePoints, segments: Sequence[Segment]) -> list[_Part]:
    """Assign each point to the newest segment that had begun when it was reported."""
    ordered = sorted(points)
    early = [p for p in ordered if not segments or p[2] / 1000.0 < segments[0].start_s]
    parts = [_Part(None, tuple(early))] if early else []
    for segment, following in zip(segments, (*segments[1:], None), strict=False):
        until_s = float("inf") if following is None else following.start_s
        inside = tuple(p for p in ordered if segment.start_s <= p[2] / 1000.0 < until_s)
        parts.append(_Part(segment, inside))
    return parts


class _TrainingClock:
    """The seconds of training, accumulated over the trial's segments in order."""

    def __init__(
        self, sign: float, pace_s: float | None, startup_s: float | None, leave_s: float
    ) -> None:
        self.curve: list[Point] = []
        self.leads_s: list[float | None] = []
        self.tail_s: float | None = None
        self._sign, self._pace_s, self._startup_s = sign, pace_s, startup_s
        self._leave_s = leave_s
        self._trained_s = 0.0
        self._ahead_s: float | None = 0.0  # trained since the last point; None: not known

    def add(self, part: _Part) -> None:
        """Add the training of a segment."""
        lead_s = self._first(part) if part.points else None
        if part.segment is not None:
            self.leads_s.append(lead_s)
        for earlier, later in pairwise(part.points):
            self._trained_s += max(0.0, (later[2] - earlier[2]) / 1000.0)
            self._see(later)
        self._leave(part)

    def _first(self, part: _Part) -> float | None:
        """Add the first point of a segment; return the lead before it, if that can be told."""
        first, lead_s = part.points[0], None
        if part.segment is None:
            self._see(first)
            return None
        passed_s = max(0.0, first[2] / 1000.0 - part.segment.start_s)
        steps = max(1, first[0] - (self.curve[-1].step if self.curve else 0))
        if self._pace_s is not None:
            ahead_s = min(self._ahead_s or 0.0, steps * self._pace_s)
            if self._ahead_s is not None:
                lead_s = max(0.0, passed_s - (steps * self._pace_s - ahead_s))
            self._trained_s += steps * self._pace_s
        else:
            self._trained_s += max(0.0, passed_s - (self._startup_s or 0.0))
        self._see(first)
        return lead_s

    def _see(self, point: tuple[int, float, int]) -> None:
        step, value, _ = point
        self.curve.append(Point(step, self._sign * value, self._trained_s))

    def _leave(self, part: _Part) -> None:
        segment = part.segment
        if segment is None or segment.end_s is None or not part.points:
            self._ahead_s = None  # without a point, start-up and training cannot be told apart
        else:
            rest_s = max(0.0, segment.end_s - part.points[-1][2] / 1000.0)
            self._ahead_s = max(0.0, rest_s - self._leave_s) if segment.outcome in STOPPED else 0.0
            if segment.outcome == "finished":
                self.tail_s = rest_s

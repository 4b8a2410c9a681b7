"""What the last round made of a sweep's records and points: made again only where they changed.

Of thousands of trials few have changed since the last round, and a round is to take milliseconds.
What is kept is one state of each trial, so it does not grow with time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hermes_ops.airflow.control.pool import Trial, curve
from hermes_ops.airflow.metadata import TrialRow
from hermes_ops.core.model import Point

Points = Sequence[tuple[int, float, int]]
Spans = Sequence[tuple[float, float]]


@dataclass(slots=True)
class Recall:
    """The trials and the learning curves of one sweep as they were last made."""

    _trials: dict[int, tuple[Mapping[str, str], Trial]] = field(default_factory=dict)
    _curves: dict[int, tuple[tuple[object, ...], tuple[Point, ...]]] = field(default_factory=dict)

    def trial(self, row: TrialRow, records: Mapping[str, str]) -> Trial:
        """As `Trial.of`."""
        known = self._trials.get(row.number)
        if known is None or known[0] != records:
            made = Trial.of(row, records)
        elif known[1].row != row:
            made = replace(known[1], row=row)
        else:
            return known[1]
        self._trials[row.number] = dict(records), made
        return made

    def curve(
        self, number: int, points: Points, sign: float, spans: Spans, started_s: float | None
    ) -> tuple[Point, ...]:
        """As `pool.curve`, of that trial; the same object as before where nothing has changed."""
        asked = (points, sign, spans, started_s)
        known = self._curves.get(number)
        if known is not None and known[0] == asked:
            return known[1]
        made = curve(points, sign, spans, started_s)
        self._curves[number] = asked, made
        return made

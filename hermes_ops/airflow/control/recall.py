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
Asked = tuple[Points, float, Spans, float | None]


@dataclass(slots=True)
class Recall:
    """The trials and the learning curves of one sweep as they were last made."""

    _trials: dict[int, tuple[Mapping[str, str], Trial]] = field(default_factory=dict)
    _curves: dict[int, tuple[Asked, tuple[Point, ...]]] = field(default_factory=dict)

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

    def curve(self, trial: Trial, points: Points, sign: float) -> tuple[Point, ...]:
        """As `pool.curve`, of the trial; the same object as before where nothing has changed."""
        segment = trial.segment
        spans: Spans = () if segment is None else segment.spans
        since_s = segment.started_s if segment is not None and segment.running else None
        asked = (points, sign, spans, since_s)
        known = self._curves.get(trial.number)
        if known is None or known[0] != asked:
            self._curves[trial.number] = known = (asked, curve(*asked))
        return known[1]

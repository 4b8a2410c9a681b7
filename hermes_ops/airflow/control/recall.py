"""What the last round made of a sweep's records, points and trials: made again where they changed.

Of thousands of trials few have changed since the last round, and a round is to take milliseconds.
What is kept is one state of each trial, so it does not grow with time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hermes_ops.airflow.control.pool import SweepFacts, Trial, curve, job
from hermes_ops.airflow.metadata import TrialRow
from hermes_ops.core.model import Job, Point, Value

Points = Sequence[tuple[int, float, int]]
Spans = Sequence[tuple[float, float]]
Asked = tuple[Points, float, Spans, float | None]
Foreseen = Mapping[str, Value]
Made = tuple[Trial, tuple[Point, ...], Foreseen | None, Job]


@dataclass(slots=True)
class Recall:
    """The trials, the learning curves and the jobs of one sweep as they were last made."""

    _trials: dict[int, tuple[Mapping[str, str], Trial]] = field(default_factory=dict)
    _curves: dict[int, tuple[Asked, tuple[Point, ...]]] = field(default_factory=dict)
    _jobs: dict[int, Made] = field(default_factory=dict)

    def trial(self, row: TrialRow, records: Mapping[str, str]) -> Trial:
        """As `Trial.of`."""
        known = self._trials.get(row.number)
        if known is None or known[0] != records:
            made = Trial.of(row, records)
        elif known[1].row is not row and known[1].row != row:
            made = replace(known[1], row=row)
        else:
            return known[1]
        self._trials[row.number] = dict(records), made
        return made

    def curve(self, trial: Trial, points: Points, sign: float) -> tuple[Point, ...]:
        """As `pool.curve`, of the trial; the same object as before where nothing has changed."""
        segment = trial.segment
        spans: Spans = () if segment is None else segment.spans
        since_s = segment.trains_since_s if segment is not None and segment.running else None
        asked = (points, sign, spans, since_s)
        known = self._curves.get(trial.number)
        if known is None or known[0] != asked:
            self._curves[trial.number] = known = (asked, curve(*asked))
        return known[1]

    def job(
        self,
        trial: Trial,
        facts: SweepFacts,
        points: Points,
        now_s: float,
        foreseen: Foreseen | None = None,
    ) -> Job:
        """As `pool.job`, with the curve of these points and the facts of the one sweep.

        The service of a trial that trains grows: it is made again in each round.
        """
        shown = self.curve(trial, points, facts.sign)
        known = self._jobs.get(trial.number)
        if known and known[0] is trial and known[1] is shown and known[2] is foreseen:
            return known[3]
        made = job(trial, facts, shown, now_s, foreseen)
        if not trial.under_way:
            self._jobs[trial.number] = (trial, shown, foreseen, made)
        return made

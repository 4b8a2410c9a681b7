"""Measures from outside what a stop and a resume cost a script without the hook."""

from __future__ import annotations

from collections import deque
from math import inf

from hermes_ops.trial.segment_records import TrialStatus
from hermes_ops.trial.supervisor.checkpoint_scan import OUTPUT_LAG_S

PACE_REPORTS = 3
"""The reports after the first one whose times give the seconds of a step; it takes one at least."""

_MOST_REPORTS = 1024


class SwitchCost:
    """The switch cost of a script without the hook, by the times of its reports and checkpoints.

    Its start-up is the time before its first report, less that of the steps trained until then at
    the pace of the first reports. Its restore is the training of the steps after its checkpoint
    once more; a stop is expected to have half of the mean time between two checkpoints repeated. A
    script that saves when it is told to stop repeats nothing: its checkpoint is the time until it
    leaves.

    All times are Unix seconds. `first_step` is the step of the checkpoint that the segment resumes
    from, `reached` the highest step before the segment. What a stop is expected to cost goes into
    the status, what this segment has spent into `timings`. Reports within `OUTPUT_LAG_S` of the
    first one may have been read together: they count as one.
    """

    def __init__(
        self, status: TrialStatus, timings: dict[str, float], *, first_step: int, reached: int
    ) -> None:
        self._status = status
        self._timings = timings
        self._first_step = first_step
        self._reached = reached
        self._reports: deque[tuple[float, int]] = deque(maxlen=_MOST_REPORTS)
        self._first_report: tuple[float, int] | None = None
        self._paces = 0
        self._trains_since_s: float | None = None
        self._checkpoints = 0
        self._told_s: float | None = None
        self._saved_s: float | None = None  # its newest checkpoint when it was told

    def note_report(self, at_s: float, step: int) -> None:
        """Take in the first report of a step."""
        self._reports.append((at_s, step))
        if self._paces == PACE_REPORTS:
            return
        first_s, _ = self._first_report = self._first_report or (at_s, step)
        if at_s - first_s < OUTPUT_LAG_S:
            self._first_report = first_s, step
        else:
            self._paces += 1
            self._measure_start(*self._first_report, at_s, step)

    def step_at(self, written_s: float) -> int:
        """Return the step of a checkpoint that was written then: the last one reported before."""
        soonest_s = written_s + OUTPUT_LAG_S
        steps = (step for at_s, step in reversed(self._reports) if at_s <= soonest_s)
        return next(steps, self._reached)

    def note_checkpoint(self, written_s: float) -> None:
        """Take in a checkpoint of this segment; only checkpoints after the start are compared."""
        self._checkpoints += 1
        if self._trains_since_s is not None and not self._status.saves_on_stop:
            between_s = max(0.0, written_s - self._trains_since_s) / self._checkpoints
            self._status.timings["repeat_s"] = between_s / 2

    def note_stop(self, told_s: float, saved_s: float | None) -> None:
        """Take in that the script is told to stop, and when its newest checkpoint was written.

        What it saves then is compared with that: a file's time may be some milliseconds behind the
        clock, or that of another machine.
        """
        self._told_s, self._saved_s = told_s, saved_s

    def note_end(self, left_s: float) -> None:
        """Take in that the script has left, once its last checkpoint is in the status."""
        if self._told_s is None:
            return
        written_s = self._status.checkpointed_s
        known_s = -inf if self._saved_s is None else self._saved_s
        self._status.saves_on_stop = written_s is not None and written_s > known_s
        if self._status.saves_on_stop:
            stop_s = max(0.0, left_s - self._told_s)
            self._timings["checkpoint_s"] = stop_s
            self._status.timings.update(checkpoint_s=stop_s, repeat_s=0.0)

    def _measure_start(self, first_s: float, first: int, last_s: float, last: int) -> None:
        step_s = max(0.0, last_s - first_s) / (last - first)
        own_s = first_s - self._status.started_s - step_s * (first - self._first_step)
        startup_s = self._timings["startup_s"] = max(0.0, own_s)
        self._status.timings["startup_s"] = startup_s
        self._trains_since_s = self._status.started_s + startup_s
        self._status.timings["repeat_s"] = self._status.timings["repeat_s"] or 0.0
        if again := max(0, self._reached - self._first_step):
            self._timings["restore_s"] = step_s * again

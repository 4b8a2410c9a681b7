"""A sweep as a table: its curves, a column per depth, and its hyper-parameters.

Depths grow geometrically.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.curves import Memo, columns
from hermes_ops.core.model import Job, PastTrial, Phase, Point, Value
from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.frontrunner.configurations import Configuration, features

FACTOR = 1.6  # from one depth to the next; 1.4 costs more decisions and brought nothing
PAST = 128  # earlier trials that are learnt from, the last ones handed over
LAST_SHARE = 0.85  # a depth nearer to the end than this is left out
WARP = 0.134  # of a range of losses: below it their scale is nearly linear
CEILING = 8.0  # of that range: a loss beyond it, or none that is finite, counts as this


@dataclass(frozen=True, slots=True, eq=False)
class CurveTable:
    """N trials of the sweep, then those of earlier sweeps; K depths in steps, the last the end.

    `losses[M, K]`: the lowest finite loss so far (inf when none was finite), NaN where the trial
    has not been. `seconds[M, K]`: training seconds from the start. `reached[N]`: depths that a
    trial has passed. `over[N]`: it will not run on. `configurations`: of all M.
    Tables with the same content are equal: a sweep's changes only when a trial passes a depth.
    """

    depths: tuple[int, ...]
    losses: Floats
    seconds: Floats
    reached: NDArray[np.intp]
    over: NDArray[np.bool_]
    configurations: tuple[Configuration, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CurveTable) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())

    def _content(self) -> tuple[object, ...]:
        arrays = (self.losses, self.seconds, self.reached, self.over)
        return (self.depths, self.configurations, *(array.tobytes() for array in arrays))

    @property
    def features(self) -> Floats:
        """M x F numbers: the hyper-parameters as features."""
        return features(self.configurations)

    @property
    def trial_count(self) -> int:
        """The number of trials of this sweep."""
        return len(self.reached)

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Where `losses` has a value."""
        return ~np.isnan(self.losses)


def judging_depths(jobs: Sequence[Job]) -> tuple[int, ...]:
    """Return the depths, in steps, at which the trials of a sweep are judged.

    The first is the usual interval of reports, the last the longest trial's end; if no end is
    known, twice as deep as the sweep has been.
    """
    starts = [job.curve[0].step for job in jobs if job.curve and job.curve[0].step > 0]
    first = max(1, round(median(starts))) if starts else 1
    deepest = max((job.last_step for job in jobs), default=0)
    totals = [job.total_steps for job in jobs if job.total_steps is not None]
    end = max(max(totals, default=2 * deepest), deepest, first)
    report_counts = [1]
    reports = max(1, -(-end // first))
    while report_counts[-1] < reports * LAST_SHARE:
        report_counts.append(max(report_counts[-1] + 1, round(report_counts[-1] * FACTOR)))
    return (*(number * first for number in report_counts[:-1]), end)


def tabulate(jobs: Sequence[Job], prior: Sequence[PastTrial]) -> CurveTable:
    """Return the table of these jobs, and of earlier trials that have a complete curve.

    Earlier trials of another space (other names of hyper-parameters) are left out.
    """
    depths = judging_depths(jobs)
    spaces = {_names(job.configuration) for job in jobs if prior and job.configuration}
    complete = (trial for trial in prior if trial.curve and trial.curve[-1].step >= depths[-1])
    same_space = [t for t in complete if not spaces or _names(t.configuration) in spaces]
    earlier = same_space[-PAST:]
    curves = [job.curve for job in jobs] + [trial.curve for trial in earlier]
    rows = _ROWS.get(curves, depths)
    losses = np.array([row[0] for row in rows])
    has_value = ~np.isnan(losses[: len(jobs)])
    configurations = [tuple(job.configuration) for job in jobs]
    configurations += [trial.configuration for trial in earlier]
    return CurveTable(
        depths=depths,
        losses=losses,
        seconds=np.array([row[1] for row in rows]),
        reached=has_value.sum(axis=1),
        over=np.array([is_over(job) for job in jobs]),
        configurations=tuple(configurations),
    )


def is_over(job: Job) -> bool:
    """Return True for a job that does not train again."""
    is_trained_to_end = job.total_steps is not None and job.last_step >= job.total_steps
    return job.phase is Phase.ENDED or is_trained_to_end


def _names(configuration: Sequence[tuple[str, Value]]) -> frozenset[str]:
    return frozenset(name for name, _ in configuration)


def log_losses(losses: Floats, lowest: float, loss_range: float) -> Floats:
    """Return the losses on a logarithmic scale of that range: finest near the lowest."""
    with np.errstate(invalid="ignore", over="ignore"):
        scaled: Floats = np.log(np.minimum((losses - lowest) / loss_range, CEILING) + WARP)
    return scaled


ROWS_KEPT = 1 << 13  # those of 32 sweeps with as many earlier trials


def _rows(curves: Sequence[Sequence[Point]], depths: Sequence[int]) -> list[tuple[Floats, Floats]]:
    return [_row(curve, depths) for curve in curves]


_ROWS = Memo[Sequence[Point], tuple[Floats, Floats]](_rows, ROWS_KEPT)


def _row(curve: Sequence[Point], depths: Sequence[int]) -> tuple[Floats, Floats]:
    losses, seconds = np.full(len(depths), np.nan), np.full(len(depths), np.nan)
    if not curve:
        return losses, seconds
    curve_columns = columns(curve)
    reached = np.searchsorted(depths, curve_columns.steps[-1], side="right")
    last = np.maximum(curve_columns.steps.searchsorted(depths[:reached], side="right"), 1) - 1
    losses[:reached], seconds[:reached] = curve_columns.best[last], curve_columns.seconds[last]
    return losses, seconds

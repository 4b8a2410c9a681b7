"""A sweep's curves as a table: one row a trial, one column a depth that grows geometrically."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.curves import Memo, columns
from hermes_ops.core.history import PastTrial
from hermes_ops.core.model import Job, Phase, Point, Value
from hermes_ops.policies.frontrunner_features import Configuration, features, similarities

Floats = NDArray[np.float64]
FACTOR = 1.6  # from one depth to the next; 1.4 costs more decisions and brought nothing
PAST = 128  # earlier trials that are learnt from, the last ones handed over
LAST_SHARE = 0.85  # a depth nearer to the end than this is left out


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """N trials of the sweep, then those of earlier sweeps; K depths in steps, the last the end.

    `losses[M, K]`: the lowest finite loss so far (inf when none was finite), NaN where the trial
    has not been. `seconds[M, K]`: training seconds from the start. `reached[N]`:
    depths that a trial has passed. `over[N]`: it will not run on. `configurations`: of all M.
    Tables with the same content are equal: a sweep's changes only when a trial passes a depth.
    """

    depths: tuple[int, ...]
    losses: Floats
    seconds: Floats
    reached: NDArray[np.intp]
    over: NDArray[np.bool_]
    configurations: tuple[Configuration, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())

    def _content(self) -> tuple[object, ...]:
        arrays = (self.losses, self.seconds, self.reached, self.over)
        return (self.depths, self.configurations, *(array.tobytes() for array in arrays))

    @property
    def features(self) -> Floats:
        """M x F numbers that say what hyper-parameters have in common."""
        return features(self.configurations)

    @property
    def kernels(self) -> Floats:
        """W x M x M similarities of hyper-parameters."""
        return similarities(self.configurations)

    @property
    def trials(self) -> int:
        """How many trials belong to this sweep."""
        return len(self.reached)

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Where `losses` has a value."""
        return ~np.isnan(self.losses)


def depths(jobs: Sequence[Job]) -> tuple[int, ...]:
    """The depths, in steps, at which the trials of a sweep are judged.

    The first is the usual interval of reports, the last the longest trial's end; without any
    known, twice as deep as the sweep has been.
    """
    starts = [job.curve[0].step for job in jobs if job.curve and job.curve[0].step > 0]
    first = max(1, round(median(starts))) if starts else 1
    deepest = max((job.last_step for job in jobs), default=0)
    totals = [job.total_steps for job in jobs if job.total_steps is not None]
    end = max(max(totals, default=2 * deepest), deepest, first)
    found = [1]
    reports = max(1, -(-end // first))
    while found[-1] < reports * LAST_SHARE:
        found.append(max(found[-1] + 1, round(found[-1] * FACTOR)))
    return (*(number * first for number in found[:-1]), end)


def table(jobs: Sequence[Job], prior: Sequence[PastTrial]) -> Table:
    """The table of these jobs; earlier trials tell something if they have a whole curve.

    Those of another space (other names of hyper-parameters) are left out.
    """
    at = depths(jobs)
    spaces = {_names(job.configuration) for job in jobs if job.configuration}
    whole = (trial for trial in prior if trial.curve and trial.curve[-1].step >= at[-1])
    past = [trial for trial in whole if not spaces or _names(trial.configuration) in spaces][-PAST:]
    curves = [job.curve for job in jobs] + [trial.curve for trial in past]
    filled = _ROWS.of(curves, at)
    losses = np.array([row[0] for row in filled])
    known = ~np.isnan(losses[: len(jobs)])
    given = (*(tuple(job.configuration) for job in jobs), *(t.configuration for t in past))
    return Table(
        depths=at,
        losses=losses,
        seconds=np.array([row[1] for row in filled]),
        reached=known.sum(axis=1),
        over=np.array([is_over(job) for job in jobs]),
        configurations=given,
    )


def is_over(job: Job) -> bool:
    """True for a job that will train no more."""
    done = job.total_steps is not None and job.last_step >= job.total_steps
    return job.phase is Phase.ENDED or done


def _names(configuration: Sequence[tuple[str, Value]]) -> frozenset[str]:
    return frozenset(name for name, _ in configuration)


ROWS_KEPT = 1 << 13  # those of 32 sweeps with as many earlier trials


def _rows(curves: Sequence[tuple[Point, ...]], at: Sequence[int]) -> list[tuple[Floats, Floats]]:
    return [_row(curve, at) for curve in curves]


_ROWS = Memo[tuple[Point, ...], tuple[Floats, Floats]](_rows, ROWS_KEPT)


def _row(curve: tuple[Point, ...], at: Sequence[int]) -> tuple[Floats, Floats]:
    losses, seconds = np.full(len(at), np.nan), np.full(len(at), np.nan)
    if not curve:
        return losses, seconds
    made = columns(curve)
    passed = np.searchsorted(at, made.steps[-1], side="right")
    last = np.maximum(made.steps.searchsorted(at[:passed], side="right"), 1) - 1
    losses[:passed], seconds[:passed] = made.best[last], made.seconds[last]
    return losses, seconds

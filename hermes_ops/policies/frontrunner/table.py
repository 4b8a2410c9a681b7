"""A sweep as a table: its curves, a column per depth, and features of its hyper-parameters.

Depths grow geometrically. The features are principal components of a kernel over configurations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.curves import Memo, columns
from hermes_ops.core.model import Job, PastTrial, Phase, Point, Value

Floats = NDArray[np.float64]
FACTOR = 1.6  # from one depth to the next; 1.4 costs more decisions and brought nothing
PAST = 128  # earlier trials that are learnt from, the last ones handed over
LAST_SHARE = 0.85  # a depth nearer to the end than this is left out


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
    def kernels(self) -> Floats:
        """W x M x M similarities of hyper-parameters."""
        return similarities(self.configurations)

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
    """Return True for a job that will train no more."""
    is_trained_to_end = job.total_steps is not None and job.last_step >= job.total_steps
    return job.phase is Phase.ENDED or is_trained_to_end


def _names(configuration: Sequence[tuple[str, Value]]) -> frozenset[str]:
    return frozenset(name for name, _ in configuration)


ROWS_KEPT = 1 << 13  # those of 32 sweeps with as many earlier trials


def _rows(
    curves: Sequence[tuple[Point, ...]], depths: Sequence[int]
) -> list[tuple[Floats, Floats]]:
    return [_row(curve, depths) for curve in curves]


_ROWS = Memo[tuple[Point, ...], tuple[Floats, Floats]](_rows, ROWS_KEPT)


def _row(curve: tuple[Point, ...], depths: Sequence[int]) -> tuple[Floats, Floats]:
    losses, seconds = np.full(len(depths), np.nan), np.full(len(depths), np.nan)
    if not curve:
        return losses, seconds
    curve_columns = columns(curve)
    reached = np.searchsorted(depths, curve_columns.steps[-1], side="right")
    last = np.maximum(curve_columns.steps.searchsorted(depths[:reached], side="right"), 1) - 1
    losses[:reached], seconds[:reached] = curve_columns.best[last], curve_columns.seconds[last]
    return losses, seconds


Configuration = tuple[tuple[str, Value], ...]
DIRECTIONS = 10
WIDTH = 0.7  # of the exponent, at the median squared distance of two configurations
WIDTHS = (0.35, 1.2)  # of the similarities between which the data choose
LANDMARKS = 256  # configurations that span the directions of a larger sweep
_NUMBER = re.compile(r"\d+$")


@lru_cache(maxsize=64)
def features(configurations: tuple[Configuration, ...]) -> Floats:
    """Return N x DIRECTIONS features, mean square 1 a row; all 0 where all trials are alike.

    Numbers are replaced by their ranks, so that no scale matters; text, truth values and codes
    (whole numbers of three or more parameters that differ in a trailing number, as `op_0` ...
    `op_13`) by one column for each value. A missing value, and a trial without a configuration,
    is at the mean. Kernel: half linear, half Gaussian; Gaussian alone without any number.
    """
    standardised = np.zeros((len(configurations), DIRECTIONS))
    columns, numeric = _columns(configurations)
    if columns is None or len(configurations) < 3:
        return standardised
    landmark_rows = np.unique(np.linspace(0, len(columns) - 1, LANDMARKS).astype(int))
    landmarks = columns[landmark_rows]
    squared = _distances(landmarks, landmarks)
    median_squared = float(np.median(squared[np.triu_indices(len(landmarks), 1)]))
    if median_squared <= 0:
        return standardised
    kernel = _kernel(columns, landmarks, median_squared, numeric)
    kernel -= kernel.mean(axis=0)
    gram = kernel[landmark_rows] - kernel[landmark_rows].mean(axis=1, keepdims=True)
    values, vectors = np.linalg.eigh((gram + gram.T) / 2)
    top = np.argsort(-values)[:DIRECTIONS]
    top = top[values[top] > 1e-9 * max(float(values.max()), 1e-300)]
    projected = kernel @ (vectors[:, top] / np.sqrt(values[top]))
    root_mean_square = np.sqrt((projected**2).sum(axis=1).mean())
    standardised[:, : len(top)] = projected / root_mean_square if root_mean_square > 0 else 0.0
    return standardised


@lru_cache(maxsize=4)
def similarities(configurations: tuple[Configuration, ...]) -> Floats:
    """Return W x N x N kernels, half linear, half Gaussian; empty where all trials are alike."""
    columns, _ = _columns(configurations)
    no_kernels = np.zeros((0, len(configurations), len(configurations)))
    if columns is None or len(configurations) < 3:
        return no_kernels
    squared = _distances(columns, columns)
    median_squared = float(np.median(squared[np.triu_indices(len(columns), 1)]))
    if median_squared <= 0:
        return no_kernels
    linear = columns @ columns.T
    linear /= np.diag(linear).mean()
    return np.stack([(np.exp(-width * squared / median_squared) + linear) / 2 for width in WIDTHS])


def _kernel(columns: Floats, landmarks: Floats, median_squared: float, numeric: bool) -> Floats:
    gaussian: Floats = np.exp(-WIDTH * _distances(columns, landmarks) / median_squared)
    if not numeric:
        return gaussian
    mixed: Floats = (gaussian + columns @ landmarks.T / columns.shape[1]) / 2
    return mixed


def _distances(left: Floats, right: Floats) -> Floats:
    squared: Floats = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1) - 2 * left @ right.T
    return np.maximum(squared, 0.0)


def _columns(configurations: Sequence[Configuration]) -> tuple[Floats | None, bool]:
    """Return the standardised columns of all hyper-parameters, and whether any is numeric."""
    named_values = [dict(c) for c in configurations]
    names = sorted({name for configuration in named_values for name in configuration})
    codes = _codes(names, named_values)
    columns: list[Floats] = []
    numeric = False
    for name in names:
        values = [configuration.get(name) for configuration in named_values]
        if name in codes or not all(_is_number(v) for v in values if v is not None):
            columns += _one_hot(values)
        else:
            column = _ranks(values)
            columns += [] if column is None else [column]
            numeric = numeric or column is not None
    return (np.stack(columns, axis=1), numeric) if columns else (None, False)


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _codes(names: Sequence[str], configurations: Sequence[Mapping[str, Value]]) -> set[str]:
    """Return the names of at least three integer parameters that differ in a trailing number."""
    stems: dict[str, list[str]] = {}
    for name in names:
        if _NUMBER.search(name):
            stems.setdefault(_NUMBER.sub("", name), []).append(name)
    codes: set[str] = set()
    for group in stems.values():
        values = {
            configuration[name]
            for configuration in configurations
            for name in group
            if name in configuration
        }
        are_integers = all(_is_number(v) and float(v) == round(float(v)) for v in values)
        if len(group) >= 3 and are_integers and len(values) <= 16:
            codes.update(group)
    return codes


def _one_hot(values: Sequence[Value | None]) -> list[Floats]:
    kinds = sorted({str(v) for v in values if v is not None})
    columns = [np.array([float(str(v) == kind) for v in values]) for kind in kinds]
    return [c - c.mean() for c in columns] if len(kinds) > 1 else []


def _ranks(values: Sequence[Value | None]) -> Floats | None:
    from scipy.stats import rankdata  # takes a second; needed for numeric parameters alone

    numbers = np.array([np.nan if v is None else float(v) for v in values])
    seen = ~np.isnan(numbers)
    column = np.zeros(len(numbers))
    ranks = rankdata(numbers[seen]) if seen.any() else np.zeros(0)
    if not len(ranks) or ranks.std() == 0:
        return None
    column[seen] = (ranks - ranks.mean()) / ranks.std()
    return column

"""Hyper-parameters as numbers: standardised columns, features, similarities.

The features are principal components of a kernel over configurations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hermes_ops.core.model import Value
from hermes_ops.core.speed_model import Floats

Configuration = tuple[tuple[str, Value], ...]
DIRECTIONS = 10
WIDTH = 0.7  # of the exponent, at the median squared distance of two configurations
WIDTHS = (0.656, 1.2)  # of the similarities between which the data choose
RECENT = 8  # last configured trials that the next one of a search may resemble
LANDMARKS = 256  # configurations that span the directions of a larger sweep
_NUMBER = re.compile(r"\d+$")


@dataclass(frozen=True, slots=True, eq=False)
class KnownTrials:
    """The R of M trials that have a configuration, and each of the M as a mixture of these.

    `configurations[R]` are those of the known trials; `shares[M, R]` are the weights of the
    mixture: 1 for a known trial itself. A trial that its search has not configured yet is a mixture
    of the RECENT last configured ones in equal parts: a search improves, so its next suggestion
    resembles them more than the mean of all.
    """

    configurations: tuple[Configuration, ...]
    shares: Floats

    def values(self, of_known: Floats) -> Floats:
        """Return rows (or numbers) of all M trials from those of the R known ones."""
        if len(of_known) == len(self.shares):
            return of_known
        values: Floats = self.shares @ of_known
        return values

    def kernels(self, of_known: Floats) -> Floats:
        """Return W x M x M kernels from those of the known trials, W x R x R.

        An unknown trial has the mean variance and the mean covariances of the trials in its
        mixture.
        """
        if of_known.shape[1] == len(self.shares):
            return of_known
        kernels: Floats = self.shares @ of_known @ self.shares.T
        diagonal = np.arange(len(self.shares))
        kernels[:, diagonal, diagonal] = np.diagonal(of_known, axis1=1, axis2=2) @ self.shares.T
        return kernels


@lru_cache(maxsize=64)
def known_trials(configurations: tuple[Configuration, ...]) -> KnownTrials:
    """Return which of M trials, in order of submission, have a configuration."""
    is_known = np.array([bool(each) for each in configurations], dtype=bool)
    rows, unknown = np.flatnonzero(is_known), np.flatnonzero(~is_known)
    shares = np.zeros((len(configurations), len(rows)))
    shares[rows, np.arange(len(rows))] = 1.0
    if len(rows) and len(unknown):
        before = np.flatnonzero(rows < unknown[-1])[-RECENT:]
        recent = before if len(before) else np.arange(len(rows))
        shares[np.ix_(unknown, recent)] = 1 / len(recent)
    return KnownTrials(tuple(configurations[row] for row in rows), shares)


@lru_cache(maxsize=64)
def features(configurations: tuple[Configuration, ...]) -> Floats:
    """Return N x DIRECTIONS features, mean square 1 a row; all 0 where all trials are alike.

    Numbers are replaced by their ranks, so that no scale matters; text, truth values and codes
    (whole numbers of three or more parameters that differ in a trailing number, as `op_0` ...
    `op_13`) by one column for each value. A missing value is at the mean; a trial without a
    configuration has the mean features of the last ones (`KnownTrials`). Kernel: half linear, half
    Gaussian; Gaussian alone without any number.
    """
    distinct = known_trials(configurations)
    return distinct.values(_features(distinct.configurations))


def _features(configurations: tuple[Configuration, ...]) -> Floats:
    standardised = np.zeros((len(configurations), DIRECTIONS))
    parameters = columns_of(configurations)
    columns = parameters.values
    if not parameters.owners or len(configurations) < 3:
        return standardised
    landmark_rows = np.unique(np.linspace(0, len(columns) - 1, LANDMARKS).astype(int))
    landmarks = columns[landmark_rows]
    squared = distances(landmarks, landmarks)
    median_squared = float(np.median(squared[np.triu_indices(len(landmarks), 1)]))
    if median_squared <= 0:
        return standardised
    kernel = _kernel(columns, landmarks, median_squared, parameters.is_numeric)
    kernel -= kernel.mean(axis=0)
    gram = kernel[landmark_rows] - kernel[landmark_rows].mean(axis=1, keepdims=True)
    values, vectors = np.linalg.eigh((gram + gram.T) / 2)
    top = np.argsort(-values)[:DIRECTIONS]
    top = top[values[top] > 1e-9 * max(float(values.max()), 1e-300)]
    projected = kernel @ (vectors[:, top] / np.sqrt(values[top]))
    root_mean_square = np.sqrt((projected**2).sum(axis=1).mean())
    standardised[:, : len(top)] = projected / root_mean_square if root_mean_square > 0 else 0.0
    return standardised


@lru_cache(maxsize=16)
def similarities(
    configurations: tuple[Configuration, ...], relevance: tuple[float, ...] = ()
) -> Floats:
    """Return W x N x N kernels, half linear, half Gaussian; empty where all trials are alike.

    `relevance`: how much each hyper-parameter counts in a squared distance; empty: 1.
    """
    distinct = known_trials(configurations)
    return distinct.kernels(_similarities(distinct.configurations, relevance))


def _similarities(
    configurations: tuple[Configuration, ...], relevance: tuple[float, ...]
) -> Floats:
    parameters = columns_of(configurations)
    columns = parameters.values
    if not parameters.owners or len(configurations) < 3:
        return np.zeros((0, len(configurations), len(configurations)))
    if relevance:
        columns = columns * np.sqrt(np.array(relevance)[list(parameters.owners)])
    return mixed_kernels(distances(columns, columns), columns @ columns.T, WIDTHS)


def mixed_kernels(squared: Floats, linear: Floats, widths: Sequence[float]) -> Floats:
    """Return W x N x N kernels, half linear, half Gaussian; empty where all trials are alike.

    `squared[N, N]`: squared distances, `linear[N, N]`: products. A width is that of the exponent at
    the median squared distance.
    """
    median_squared = float(np.median(squared[np.triu_indices(len(squared), 1)]))
    if median_squared <= 0:
        return np.zeros((0, *squared.shape))
    linear = linear / np.diag(linear).mean()
    return np.stack([(np.exp(-width * squared / median_squared) + linear) / 2 for width in widths])


def _kernel(columns: Floats, landmarks: Floats, median_squared: float, numeric: bool) -> Floats:
    gaussian: Floats = np.exp(-WIDTH * distances(columns, landmarks) / median_squared)
    if not numeric:
        return gaussian
    mixed: Floats = (gaussian + columns @ landmarks.T / columns.shape[1]) / 2
    return mixed


def distances(left: Floats, right: Floats) -> Floats:
    """Return the squared distance of each row of `left[N, C]` to each of `right[M, C]`."""
    squared: Floats = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1) - 2 * left @ right.T
    return np.maximum(squared, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class ParameterColumns:
    """The hyper-parameters of N trials as C standardised columns, `values[N, C]`.

    `owners[C]`: the hyper-parameter of each column, counted from 0. Text, a truth value and a code
    have several.
    """

    values: Floats
    owners: tuple[int, ...]
    is_numeric: bool  # any of them is a number


def columns_of(configurations: Sequence[Configuration]) -> ParameterColumns:
    """Return the columns of the hyper-parameters that differ between these trials."""
    named_values = [dict(c) for c in configurations]
    names = sorted({name for configuration in named_values for name in configuration})
    codes = _codes(names, named_values)
    columns: list[Floats] = []
    owners: list[int] = []
    is_numeric = False
    for name in names:
        values = [configuration.get(name) for configuration in named_values]
        if name in codes or not all(is_number(v) for v in values if v is not None):
            encoded = _one_hot(values)
        else:
            column = _ranks(values)
            encoded = [] if column is None else [column]
            is_numeric = is_numeric or column is not None
        owners += [max(owners, default=-1) + 1] * len(encoded)
        columns += encoded
    values_of = np.stack(columns, axis=1) if columns else np.zeros((len(configurations), 0))
    return ParameterColumns(values_of, tuple(owners), is_numeric)


def is_number(value: Value) -> bool:
    """Return True for a number; a boolean is not one."""
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
        are_integers = all(is_number(v) and float(v).is_integer() for v in values)
        if len(group) >= 3 and are_integers and len(values) <= 16:
            codes.update(group)
    return codes


def _one_hot(values: Sequence[Value | None]) -> list[Floats]:
    kinds = sorted({str(v) for v in values if v is not None})
    columns = [np.array([float(str(v) == kind) for v in values]) for kind in kinds]
    return [c - c.mean() for c in columns] if len(kinds) > 1 else []


def _ranks(values: Sequence[Value | None]) -> Floats | None:
    numbers = np.array([np.nan if v is None else float(v) for v in values])
    seen = ~np.isnan(numbers)
    column = np.zeros(len(numbers))
    different, place, counts = np.unique(numbers[seen], return_inverse=True, return_counts=True)
    if len(different) < 2:
        return None
    # Equal values share their mean rank, as in scipy.stats, whose import takes 0.6 s.
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    column[seen] = (ranks - ranks.mean()) / ranks.std()
    return column

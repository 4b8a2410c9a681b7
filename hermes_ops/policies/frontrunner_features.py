"""Hyper-parameters as a few numbers a trial: the main directions of a kernel over them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.model import Value

Floats = NDArray[np.float64]
Configuration = tuple[tuple[str, Value], ...]
DIRECTIONS = 10
WIDTH = 0.7  # of the exponent, at the median squared distance of two configurations
WIDTHS = (0.35, 1.2)  # of the similarities between which the data choose
LANDMARKS = 256  # so many configurations span the directions of a larger sweep
_NUMBER = re.compile(r"\d+$")


@lru_cache(maxsize=64)
def features(configurations: tuple[Configuration, ...]) -> Floats:
    """N x DIRECTIONS numbers, mean square 1 a row; all 0 where nothing tells trials apart.

    Numbers are replaced by their ranks, so that no scale matters; text, truth values and codes
    (whole numbers of three or more parameters that differ in a trailing number, as `op_0` ...
    `op_13`) by one column for each value. A missing value, and a trial without a configuration,
    stands in the middle. Kernel: half linear, half Gaussian; Gaussian alone without any number.
    """
    made = np.zeros((len(configurations), DIRECTIONS))
    columns, numeric = _columns(configurations)
    if columns is None or len(configurations) < 3:
        return made
    chosen = np.unique(np.linspace(0, len(columns) - 1, LANDMARKS).astype(int))
    marks = columns[chosen]
    square = _distances(marks, marks)
    middle = float(np.median(square[np.triu_indices(len(marks), 1)]))
    if middle <= 0:
        return made
    kernel = _kernel(columns, marks, middle, numeric)
    kernel -= kernel.mean(axis=0)
    inner = kernel[chosen] - kernel[chosen].mean(axis=1, keepdims=True)
    values, vectors = np.linalg.eigh((inner + inner.T) / 2)
    top = np.argsort(-values)[:DIRECTIONS]
    top = top[values[top] > 1e-9 * max(float(values.max()), 1e-300)]
    found = kernel @ (vectors[:, top] / np.sqrt(values[top]))
    size = np.sqrt((found**2).sum(axis=1).mean())
    made[:, : len(top)] = found / size if size > 0 else 0.0
    return made


@lru_cache(maxsize=4)
def similarities(configurations: tuple[Configuration, ...]) -> Floats:
    """W x N x N kernels, half linear, half Gaussian of each width; none where all are alike."""
    columns, _ = _columns(configurations)
    none = np.zeros((0, len(configurations), len(configurations)))
    if columns is None or len(configurations) < 3:
        return none
    square = _distances(columns, columns)
    middle = float(np.median(square[np.triu_indices(len(columns), 1)]))
    if middle <= 0:
        return none
    linear = columns @ columns.T
    linear /= np.diag(linear).mean()
    return np.stack([(np.exp(-width * square / middle) + linear) / 2 for width in WIDTHS])


def _kernel(columns: Floats, marks: Floats, middle: float, numeric: bool) -> Floats:
    near: Floats = np.exp(-WIDTH * _distances(columns, marks) / middle)
    if not numeric:
        return near
    mixed: Floats = (near + columns @ marks.T / columns.shape[1]) / 2
    return mixed


def _distances(left: Floats, right: Floats) -> Floats:
    square: Floats = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1) - 2 * left @ right.T
    return np.maximum(square, 0.0)


def _columns(configurations: Sequence[Configuration]) -> tuple[Floats | None, bool]:
    """The standardised columns of all hyper-parameters; whether any of them is a number."""
    given = [dict(c) for c in configurations]
    names = sorted({name for known in given for name in known})
    codes = _codes(names, given)
    made: list[Floats] = []
    numeric = False
    for name in names:
        values = [known.get(name) for known in given]
        if name in codes or not all(_is_number(v) for v in values if v is not None):
            made += _one_hot(values)
        else:
            column = _ranks(values)
            made += [] if column is None else [column]
            numeric = numeric or column is not None
    return (np.stack(made, axis=1), numeric) if made else (None, False)


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _codes(names: Sequence[str], given: Sequence[Mapping[str, Value]]) -> set[str]:
    """Names of at least three parameters alike but for a trailing number, all whole numbers."""
    alike: dict[str, list[str]] = {}
    for name in names:
        if _NUMBER.search(name):
            alike.setdefault(_NUMBER.sub("", name), []).append(name)
    found: set[str] = set()
    for group in alike.values():
        values = {known[name] for known in given for name in group if name in known}
        whole = all(_is_number(v) and float(v) == round(float(v)) for v in values)
        if len(group) >= 3 and whole and len(values) <= 16:
            found.update(group)
    return found


def _one_hot(values: Sequence[Value | None]) -> list[Floats]:
    kinds = sorted({str(v) for v in values if v is not None})
    columns = [np.array([float(str(v) == kind) for v in values]) for kind in kinds]
    return [c - c.mean() for c in columns] if len(kinds) > 1 else []


def _ranks(values: Sequence[Value | None]) -> Floats | None:
    from scipy.stats import rankdata  # a second to import: only who learns from settings pays it

    numbers = np.array([np.nan if v is None else float(v) for v in values])
    seen = ~np.isnan(numbers)
    column = np.zeros(len(numbers))
    ranks = rankdata(numbers[seen]) if seen.any() else np.zeros(0)
    if not len(ranks) or ranks.std() == 0:
        return None
    column[seen] = (ranks - ranks.mean()) / ranks.std()
    return column

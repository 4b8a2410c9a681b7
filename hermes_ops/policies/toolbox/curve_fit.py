"""Fit falling curves to losses, many jobs at once.

The forms, with all of a, b, c, A, r at least 0 and an asymptote d at or below the lowest loss:

* l(k) = 1 / (a k² + b k + c) + d      SLAQ (SoCC 2017); with a = 0 that of Optimus (EuroSys 2018)
* l(k) = A exp(-r k) + d               SLAQ's m^(k-b) + c, as m = exp(-r)

The losses may have any scale and sign, so d has no bound from below (a choice: Optimus keeps it at
or above 0); a and the others then follow the scale: the fit of s x l + t is s x the fit + t. Newer
points weigh more: each is worth 1/decay of the one before it.

Each form has one parameter that is not linear: the gap g between the lowest loss and d, or the rate
r. It is searched on a grid, then between the neighbours of the best, again and again. For each
value the others follow by least squares with bounds: of 1/(l - d) with weights (l - d)^4, which
makes its residuals those of l to first order, or of l itself. What has the smallest weighted
squared error of l is kept. All of this is ours; the papers name the forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, inf
from typing import ClassVar, Protocol

import numpy as np

from hermes_ops.core.curves import columns
from hermes_ops.core.model import Point
from hermes_ops.core.speed_model import Floats

MIN_POINTS = 3
DECAY = 0.9
GAPS = np.geomspace(1e-3, 1e2, 16)  # from the lowest loss to the asymptote, in ranges of the loss
RATES = np.geomspace(0.1, 100.0, 16)  # of an exponential, over the whole curve
ROUNDS = 6
ZOOM = np.linspace(0, 1, 16)  # tried between the neighbours of the best in each later round
AT_ONCE = 64  # curves side by side: more of them leave the processor's cache
TINY = 1e-12
SUMS = np.array([[4, 3, 2], [3, 2, 1], [2, 1, 0]])  # of the powers 2, 1 and 0
RIDGE = TINY * np.eye(3)
# Three numbers in two blocks, or in one; each set of them that need not be 0 is a block of one.
SPLITS = np.array([[0, 1, 1], [1, 0, 1], [1, 1, 0], [1, 1, 1]])
BLOCKS = (SPLITS[:, :, None] == SPLITS[:, None, :]).astype(float)
USED = np.array([[1.0, 0, 0, 1, 1, 0, 1], [0, 1, 0, 1, 0, 1, 1], [0, 0, 1, 0, 1, 1, 1]])[..., None]
SPLIT = np.array([0, 1, 2, 2, 1, 0, 3])  # where each set of USED is a block


@dataclass(frozen=True, slots=True)
class Fitted:
    """One fitted curve, 1/(a k² + b k + c) + amplitude x exp(-rate k) + floor.

    One of the first two terms is 0 (c is inf, or amplitude 0). `error` is the weighted root mean
    square of the residuals, in units of the loss.
    """

    a: float
    b: float
    c: float
    amplitude: float
    rate: float
    floor: float
    error: float

    def loss(self, step: float) -> float:
        """Return the fitted loss after `step` steps; never rises with the step. At inf: `floor`."""
        if step == inf:
            falls = self.a > 0 or self.b > 0
            rest = 0.0 if falls or self.c == 0 else 1 / self.c
            return self.floor + rest + (self.amplitude if self.rate == 0 else 0.0)
        below = (self.a * step + self.b) * step + self.c
        rest = 1 / below if below > 0 else inf
        return rest + self.amplitude * exp(-self.rate * step) + self.floor


_CONSTANT = Fitted(0.0, 0.0, inf, 0.0, 0.0, inf, 0.0)


def fit(
    steps: Sequence[Floats],
    losses: Sequence[Floats],
    decay: float = DECAY,
    *,
    exponential: bool = True,
    squared: bool = True,
) -> list[Fitted]:
    """Fit each curve, given by its steps (at least 0, rising) and its losses.

    Losses that are not finite are left out. A curve with fewer than three finite losses, or with
    equal ones, is fitted by the constant of its newest. Without `exponential` and `squared` the
    form is 1/(b k + c) + d. ValueError for a decay outside (0, 1].
    """
    if not 0 < decay <= 1:
        raise ValueError("decay is over 0, at most 1")
    rows = [n for n, one in enumerate(losses) if _has_shape(one)]
    shaped = set(rows)
    fits = [_flat(one) if n not in shaped else _CONSTANT for n, one in enumerate(losses)]
    forms: list[_Form] = [_Reciprocal(2 if squared else 1)]
    if exponential:
        forms.append(_Exponential())
    for some in (rows[start : start + AT_ONCE] for start in range(0, len(rows), AT_ONCE)):
        table = _Table.from_curves([steps[n] for n in some], [losses[n] for n in some], decay)
        for row, one in zip(some, _searched(forms, table), strict=True):
            fits[row] = one
    return fits


def lowest_fits(curves: Sequence[Sequence[Point]]) -> list[Fitted]:
    """Fit each curve's lowest losses so far, by its steps."""
    arrays = [columns(curve) for curve in curves]
    return fit([one.steps for one in arrays], [one.best for one in arrays])


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Curves side by side, padded with weight 0: steps to (0, 1], losses to [0, 1].

    By [curve, 1, point]; `powers` by [curve, point, power], `last`, `low` and `range` by [curve].
    """

    x: Floats
    y: Floats
    weight: Floats  # sums to 1 in each row
    powers: Floats  # of x, from 0 to 4
    mean: Floats  # of y, by [curve, 1]
    last: Floats
    low: Floats
    range: Floats

    @classmethod
    def from_curves(cls, steps: Sequence[Floats], losses: Sequence[Floats], decay: float) -> _Table:
        shape = (len(losses), 1, max(map(len, losses)))
        x, y, weight = np.ones(shape), np.zeros(shape), np.zeros(shape)
        last, low, span = (np.ones(len(losses)) for _ in range(3))
        for row, (step, loss) in enumerate(zip(steps, losses, strict=True)):
            good = np.isfinite(loss)
            kept, count = loss[good], int(good.sum())
            low[row], last[row] = kept.min(), max(float(step[good][-1]), 1.0)
            span[row] = kept.max() - low[row]
            x[row, 0, :count] = step[good] / last[row]
            y[row, 0, :count] = (kept - low[row]) / span[row]
            weight[row, 0, :count] = decay ** np.arange(count - 1, -1, -1)
        weight /= weight.sum(axis=2, keepdims=True)
        powers = np.stack([x[:, 0] ** n for n in range(5)], axis=2)
        return cls(x, y, weight, powers, (weight * y).sum(-1), last, low, span)

    def unscaled(self, row: int, fitted: Fitted) -> Fitted:
        """Return the fit in steps and losses as they were reported."""
        last, low, span = float(self.last[row]), float(self.low[row]), float(self.range[row])
        values = (
            fitted.a / last**2 / span,
            fitted.b / last / span,
            fitted.c / span,
            fitted.amplitude * span,
            fitted.rate / last,
            low + fitted.floor * span,
            span * fitted.error**0.5,
        )
        return Fitted(*map(_rounded, values))


def _rounded(value: float) -> float:
    """Round to ten digits: a curve gives the same fit, whichever others are in its batch."""
    return float(f"{value:.10g}")


def _has_shape(losses: Floats) -> bool:
    kept = losses[np.isfinite(losses)]
    if len(kept) < MIN_POINTS:
        return False
    low, high = float(kept.min()), float(kept.max())
    return TINY * max(1e-300, abs(low), abs(high)) < high - low < inf


def _flat(losses: Floats) -> Fitted:
    kept = losses[np.isfinite(losses)]
    return replace(_CONSTANT, floor=float(kept[-1])) if len(kept) else _CONSTANT


class _Form(Protocol):
    """One value is tried, three others are solved for: by [curve, value] in all arrays.

    What `pose` returns is handed to `values`.
    """

    @property
    def grid(self) -> Floats:
        """The values that are tried first."""
        ...

    def pose(self, table: _Table, tried: Floats, gram: Floats, side: Floats) -> Floats:
        """Write the least-squares problems, over zeros."""
        ...

    def values(self, table: _Table, posed: Floats, solved: Floats) -> Floats:
        """Return the values at the points."""
        ...

    def fitted(self, tried: float, solved: Sequence[float], error: float) -> Fitted:
        """Fit losses from 0 to 1 by steps up to 1; return the fit and its squared error."""
        ...


def _searched(forms: Sequence[_Form], table: _Table) -> list[Fitted]:
    """Return the best fit of each curve; all forms are searched side by side."""
    rows, each = np.arange(len(table.x))[:, None], np.arange(len(forms))
    grids = np.log([form.grid for form in forms])
    logs = np.broadcast_to(grids, (len(rows), *grids.shape))
    for left in range(ROUNDS - 1, -1, -1):
        tried = np.exp(logs)
        solved, errors = _tried(forms, table, tried)
        best = errors.argmin(axis=2)
        if left:
            low = logs[rows, each, np.maximum(best - 1, 0)]
            high = logs[rows, each, np.minimum(best + 1, logs.shape[2] - 1)]
            logs = low[..., None] + (high - low)[..., None] * ZOOM
    least = errors[rows, each, best].argmin(axis=1)
    chosen = rows[:, 0], least, best[rows[:, 0], least]
    facts = zip(
        tried[chosen].tolist(), solved[chosen].tolist(), errors[chosen].tolist(), strict=True
    )
    fits = (forms[n].fitted(*one) for n, one in zip(least.tolist(), facts, strict=True))
    return [table.unscaled(row, fitted) for row, fitted in enumerate(fits)]


def _tried(forms: Sequence[_Form], table: _Table, tried: Floats) -> tuple[Floats, Floats]:
    """Solutions by [curve, form, value], and their weighted squared errors."""
    gram, side = np.zeros((*tried.shape, 3, 3)), np.zeros((*tried.shape, 3))
    posed = [form.pose(table, tried[:, n], gram[:, n], side[:, n]) for n, form in enumerate(forms)]
    solved = _not_negative(gram, side)
    off = np.empty((*tried.shape, table.x.shape[2]))
    for n, form in enumerate(forms):
        np.subtract(form.values(table, posed[n], solved[:, n]), table.y, out=off[:, n])
    off *= off
    off *= table.weight[:, None]
    return solved, off.sum(-1)


@dataclass(frozen=True, slots=True)
class _Reciprocal:
    """For a gap: a, b and c; without a where `power` is 1."""

    power: int
    grid: ClassVar[Floats] = GAPS

    def pose(self, table: _Table, tried: Floats, gram: Floats, side: Floats) -> Floats:
        gap = tried[:, :, None]
        z = table.y + gap
        weight = table.weight * z**3
        powers, left = table.powers[..., : 2 * self.power + 1], 2 - self.power
        gram[..., left:, left:] = np.matmul(weight * z, powers).take(SUMS[left:, left:], axis=2)
        side[..., left:] = np.matmul(weight, powers)[..., self.power :: -1]
        return gap

    def values(self, table: _Table, posed: Floats, solved: Floats) -> Floats:
        below = np.matmul(solved, table.powers[..., 2::-1].transpose(0, 2, 1))
        values: Floats = 1 / np.maximum(below, TINY) - posed
        return values

    def fitted(self, tried: float, solved: Sequence[float], error: float) -> Fitted:
        a, b, c = solved
        return Fitted(a, b, c, 0.0, 0.0, -tried, error)


@dataclass(frozen=True, slots=True)
class _Exponential:
    """For a rate: amplitude and gap, and a 0."""

    grid: ClassVar[Floats] = RATES

    def pose(self, table: _Table, tried: Floats, gram: Floats, side: Floats) -> Floats:
        falls = np.exp(-tried[:, :, None] * table.x)
        weighted = table.weight * falls
        gram[..., 0, 0] = (table.weight * falls**2).sum(-1)
        gram[..., 0, 1] = gram[..., 1, 0] = -weighted.sum(-1)
        gram[..., 1, 1] = 1.0
        side[..., 0] = (weighted * table.y).sum(-1)
        side[..., 1] = -table.mean
        return falls

    def values(
        self,
        table: _Table,  # noqa: ARG002  (the basis is `posed`)
        posed: Floats,
        solved: Floats,
    ) -> Floats:
        return solved[..., :1] * posed - solved[..., 1:2]

    def fitted(self, tried: float, solved: Sequence[float], error: float) -> Fitted:
        amplitude, gap, _ = solved
        return Fitted(0.0, 0.0, inf, amplitude, tried, -gap, error)


def _not_negative(gram: Floats, side: Floats) -> Floats:
    """Minimise ½ xᵀ gram x - side·x over x ≥ 0: the best feasible one over all sets of zeros.

    All sets are tried; one and what it leaves out are solved as one system of two blocks.
    """
    scale = np.sqrt(np.maximum(gram.diagonal(0, -2, -1), 1e-300))
    flat = (side / scale).reshape(-1, 1, 3)
    scaled = gram / scale[..., :, None] / scale[..., None, :] + RIDGE
    systems = scaled.reshape(-1, 1, 3, 3) * BLOCKS
    sides = flat.repeat(len(BLOCKS), 1)
    solved = np.ascontiguousarray(np.linalg.solve(systems, sides[..., None])[..., 0].T)
    tried = solved.take(SPLIT, axis=1) * USED
    gains = np.where((tried >= 0).all(0), (flat.T * tried).sum(0), 0.0)
    best, each = gains.argmax(0), np.arange(len(flat))
    solution = np.where(gains[best, each] > 0, tried[:, best, each], 0.0)
    unscaled: Floats = solution.T.reshape(side.shape) / scale
    return unscaled

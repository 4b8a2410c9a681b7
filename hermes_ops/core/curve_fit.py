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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, inf

import numpy as np

from hermes_ops.core.curves import Floats, columns
from hermes_ops.core.model import Point

MIN_POINTS = 3
DECAY = 0.9
MEMO_SIZE = 1 << 15
GAPS = np.geomspace(1e-3, 1e2, 16)  # from the lowest loss to the asymptote, in ranges of the loss
RATES = np.geomspace(0.1, 100.0, 16)  # of an exponential, over the whole curve
ROUNDS = 6
ZOOM = 16  # values between the neighbours of the best in each round after the first
TINY = 1e-12


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
        """The fitted loss after `step` steps; never rises with the step. At inf: `floor`."""
        if step == inf:
            falls = self.a > 0 or self.b > 0
            rest = 0.0 if falls or self.c == 0 else 1 / self.c
            return self.floor + rest + (self.amplitude if self.rate == 0 else 0.0)
        below = (self.a * step + self.b) * step + self.c
        rest = 1 / below if below > 0 else inf
        return rest + self.amplitude * exp(-self.rate * step) + self.floor


def fit(
    steps: Sequence[Floats],
    losses: Sequence[Floats],
    decay: float = DECAY,
    *,
    exponential: bool = True,
    squared: bool = True,
) -> list[Fitted]:
    """The fit of each curve, given by its steps (at least 0, rising) and its losses.

    Losses that are not finite are left out. A curve with fewer than three finite losses, or with
    equal ones, is fitted by the constant of its newest. Without `exponential` and `squared` the
    form is 1/(b k + c) + d. ValueError for a decay outside (0, 1].
    """
    if not 0 < decay <= 1:
        raise ValueError("decay is over 0, at most 1")
    found = [_flat(loss) for loss in losses]
    rows = [n for n, one in enumerate(losses) if _has_shape(one)]
    if not rows:
        return found
    table = _Table.of([steps[n] for n in rows], [losses[n] for n in rows], decay)
    fits = [_searched(_squared if squared else _linear, GAPS, table)]
    if exponential:
        fits.append(_searched(_exponential, RATES, table))
    best = np.argmin(np.array([error for _, error in fits]), axis=0)
    for place, row in enumerate(rows):
        parameters, errors = fits[int(best[place])]
        found[row] = table.unscaled(place, parameters[place], float(errors[place]))
    return found


class Memo:
    """Fits that are kept as long as the same curve comes again; only new curves are fitted.

    It changes no result, only its price: a curve is known by its identity, and never changes.
    """

    def __init__(self, size: int = MEMO_SIZE) -> None:
        self._kept: dict[int, tuple[tuple[Point, ...], Fitted]] = {}
        self._size = size

    def fits(self, curves: Iterable[tuple[Point, ...]]) -> list[Fitted]:
        """The fit of each curve's lowest losses so far, by its steps."""
        wanted = list(curves)
        new = {id(curve): curve for curve in wanted if id(curve) not in self._kept}
        found = [columns(curve) for curve in new.values()]
        fresh = fit([one.steps for one in found], [one.best for one in found])
        answers = {key: one for key, one in zip(new, fresh, strict=True)}
        result = [answers[id(c)] if id(c) in answers else self._kept[id(c)][1] for c in wanted]
        self._kept |= {key: (new[key], one) for key, one in answers.items()}
        for key in list(self._kept)[: max(0, len(self._kept) - self._size)]:
            del self._kept[key]
        return result


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Curves side by side, padded with weight 0: steps to (0, 1], losses to [0, 1]."""

    x: Floats
    y: Floats
    weight: Floats  # sums to 1 in each row
    last: Floats
    low: Floats
    range: Floats

    @classmethod
    def of(cls, steps: Sequence[Floats], losses: Sequence[Floats], decay: float) -> _Table:
        shape = (len(losses), max(map(len, losses)))
        x, y, weight = np.ones(shape), np.zeros(shape), np.zeros(shape)
        last, low, span = (np.ones(len(losses)) for _ in range(3))
        for row, (step, loss) in enumerate(zip(steps, losses, strict=True)):
            good = np.isfinite(loss)
            kept, count = loss[good], int(good.sum())
            low[row], last[row] = kept.min(), max(float(step[good][-1]), 1.0)
            span[row] = kept.max() - low[row]
            x[row, :count] = step[good] / last[row]
            y[row, :count] = (kept - low[row]) / span[row]
            weight[row, :count] = decay ** np.arange(count - 1, -1, -1)
        weight /= weight.sum(axis=1, keepdims=True)
        return cls(x, y, weight, last, low, span)

    def unscaled(self, row: int, parameters: Floats, error: float) -> Fitted:
        """The fit in steps and losses as they came."""
        last, low, span = float(self.last[row]), float(self.low[row]), float(self.range[row])
        *shape, gap = parameters.tolist()
        if len(shape) == 2:
            values = [0.0, 0.0, inf, shape[0] * span, shape[1] / last]
        else:
            a, b, c = shape
            values = [a / last**2 / span, b / last / span, c / span, 0.0, 0.0]
        return Fitted(*map(_rounded, (*values, low - gap * span, span * error**0.5)))


def _rounded(value: float) -> float:
    """To ten digits: the same curve gives the same fit, whatever others were fitted beside it."""
    return float(f"{value:.10g}")


Form = Callable[[_Table, Floats], tuple[Floats, Floats]]


def _has_shape(losses: Floats) -> bool:
    kept = losses[np.isfinite(losses)]
    if len(kept) < MIN_POINTS:
        return False
    with np.errstate(over="ignore"):
        span = float(kept.max() - kept.min())
    return TINY * max(1e-300, float(np.abs(kept).max())) < span < inf


def _flat(losses: Floats) -> Fitted:
    kept = losses[np.isfinite(losses)]
    level = float(kept[-1]) if len(kept) else inf
    return Fitted(0.0, 0.0, inf, 0.0, 0.0, level, 0.0)


def _searched(form: Form, grid: Floats, table: _Table) -> tuple[Floats, Floats]:
    """The best parameters [rows, parameters] of a form, and their weighted squared errors."""
    rows = np.arange(len(table.x))
    tried = np.broadcast_to(np.log(grid), (len(rows), len(grid)))
    for _ in range(ROUNDS):
        parameters, values = form(table, np.exp(tried))
        errors = (table.weight[:, None, :] * (values - table.y[:, None, :]) ** 2).sum(-1)
        best = np.argmin(errors, axis=1)
        low = tried[rows, np.maximum(best - 1, 0)]
        high = tried[rows, np.minimum(best + 1, tried.shape[1] - 1)]
        found = parameters[rows, best], errors[rows, best]
        tried = low[:, None] + (high - low)[:, None] * np.linspace(0, 1, ZOOM)
    return found


def _squared(table: _Table, gaps: Floats) -> tuple[Floats, Floats]:
    """For [rows, gaps]: a, b, c and the gap in the last axis; the values at the points."""
    return _reciprocal(table, gaps, (2, 1, 0))


def _linear(table: _Table, gaps: Floats) -> tuple[Floats, Floats]:
    """As `_squared`, with a = 0."""
    return _reciprocal(table, gaps, (1, 0))


def _reciprocal(table: _Table, gaps: Floats, powers: tuple[int, ...]) -> tuple[Floats, Floats]:
    z = table.y[:, None, :] + gaps[:, :, None]
    weight = table.weight[:, None, :] * z**3
    columns = np.stack([table.x**n for n in range(2 * powers[0] + 1)], axis=2)
    moments = np.matmul(weight * z, columns)
    sides = np.matmul(weight, columns)
    gram = np.stack([np.stack([moments[..., i + j] for j in powers], -1) for i in powers], -2)
    solved = _not_negative(gram, sides[..., list(powers)])
    below = np.matmul(solved, columns[:, :, list(powers)].transpose(0, 2, 1))
    absent = np.zeros((*gaps.shape, 3 - len(powers)))
    parameters = np.concatenate((absent, solved, gaps[..., None]), axis=-1)
    return parameters, 1 / np.maximum(below, TINY) - gaps[:, :, None]


def _exponential(table: _Table, rates: Floats) -> tuple[Floats, Floats]:
    """For [rows, rates]: amplitude, rate and gap in the last axis; the values at the points."""
    falls = np.exp(-rates[:, :, None] * table.x[:, None, :])
    weight = table.weight[:, None, :]
    cross = -(weight * falls).sum(-1)
    ones = np.ones_like(cross)
    gram = np.stack(
        [np.stack([(weight * falls**2).sum(-1), cross], -1), np.stack([cross, ones], -1)], -2
    )
    y = table.y[:, None, :]
    sides = np.stack([(weight * falls * y).sum(-1), -(weight * y).sum(-1) * ones], -1)
    solved = _not_negative(gram, sides)
    amplitude, gap = solved[..., 0], solved[..., 1]
    values = amplitude[..., None] * falls - gap[..., None]
    return np.stack([amplitude, rates, gap], -1), values


def _not_negative(gram: Floats, side: Floats) -> Floats:
    """Minimise ½ xᵀ gram x - side·x over x ≥ 0: the best feasible one over all sets of zeros."""
    size = side.shape[-1]
    best = np.zeros_like(side)
    value = np.zeros(side.shape[:-1])
    scale = np.sqrt(np.maximum(np.einsum("...pp->...p", gram), 1e-300))
    gram = gram / scale[..., :, None] / scale[..., None, :] + TINY * np.eye(size)
    side = side / scale
    for count in range(1, size + 1):
        for chosen in combinations(range(size), count):
            part = gram[..., chosen, :][..., :, chosen]
            solved = np.linalg.solve(part, side[..., chosen, None])[..., 0]
            gain = (side[..., chosen] * solved).sum(-1)
            better = (solved >= 0).all(-1) & (gain > value)
            value = np.where(better, gain, value)
            full = np.zeros_like(side)
            full[..., chosen] = solved
            best = np.where(better[..., None], full, best)
    unscaled: Floats = best / scale
    return unscaled

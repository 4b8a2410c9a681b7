"""Fit falling curves to losses, many jobs at once.

The forms, with all of a, b, c, A, r at least 0 and an asymptote d at or below the lowest loss:

* l(k) = 1 / (a k² + b k + c) + d      SLAQ (SoCC 2017); with a = 0 that of Optimus (EuroSys 2018)
* l(k) = A exp(-r k) + d               SLAQ's m^(k-b) + c, as m = exp(-r)

The losses may have any scale and sign, so d has no bound from below (a choice: Optimus keeps it at
or above 0); a and the others then follow the scale: the fit of s x l + t is s x the fit + t. Newer
points weigh more: each is worth 1/decay of the one before it.

Each form is started from a grid over its one parameter that is not linear, then polished by a
damped Gauss-Newton method (Levenberg-Marquardt) that keeps to the bounds; of the forms the one
with the smaller weighted squared error is kept. All of this is ours; the papers name the forms.
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
ITERATIONS = 20
MEMO_SIZE = 1 << 15
GAPS = np.geomspace(1e-3, 1e2, 12)  # from the lowest loss to the asymptote, in ranges of the loss
RATES = np.geomspace(0.1, 100.0, 12)  # of an exponential, over the whole curve
TINY = 1e-12
Model = Callable[[Floats, Floats], tuple[Floats, Floats]]


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
    fits = [_polished(_reciprocal, _first_reciprocal(table, squared=False), table, fixed=True)]
    if squared:
        fits.append(_polished(_reciprocal, _first_reciprocal(table, squared=True), table))
    if exponential:
        fits.append(_polished(_exponential, _first_exponential(table), table))
    errors = np.array([error for _, error in fits])
    best = np.argmin(errors, axis=0)
    for place, row in enumerate(rows):
        form = int(best[place])
        found[row] = table.unscaled(place, fits[form][0][place], float(errors[form, place]))
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
        floor, rms = low - gap * span, span * error**0.5
        if len(shape) == 2:
            return Fitted(0.0, 0.0, inf, shape[0] * span, shape[1] / last, floor, rms)
        a, b, c = shape
        return Fitted(a / last**2 / span, b / last / span, c / span, 0.0, 0.0, floor, rms)


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


def _first_reciprocal(table: _Table, *, squared: bool) -> Floats:
    """[rows, 4]: a, b, c and the gap, the best over a grid of gaps.

    For a given gap 1/(y + gap) is linear in a, b, c; weights of (y + gap)^4 make its residuals
    those of y, to first order.
    """
    z = table.y[:, None, :] + GAPS[None, :, None]
    weight = table.weight[:, None, :] * z**3
    powers = np.stack([table.x**n for n in range(5)], axis=2)
    moments = np.matmul(weight * z, powers)
    sides = np.matmul(weight, powers[:, :, :3])
    order = [2, 1, 0] if squared else [1, 0]
    gram = np.stack([np.stack([moments[..., i + j] for j in order], -1) for i in order], -2)
    solved = _not_negative(gram, np.stack([sides[..., i] for i in order], -1))
    full = np.zeros((*solved.shape[:2], 4))
    full[..., 3 - len(order) : 3] = solved
    full[..., 3] = GAPS
    return _best_start(_reciprocal, full, table)


def _first_exponential(table: _Table) -> Floats:
    """[rows, 3]: amplitude, rate and the gap, the best over a grid of rates."""
    falls = np.exp(-RATES[None, :, None] * table.x[:, None, :])
    weight = table.weight[:, None, :]
    cross = -(weight * falls).sum(-1)
    one = np.ones_like(cross)
    gram = np.stack(
        [np.stack([(weight * falls**2).sum(-1), cross], -1), np.stack([cross, one], -1)], -2
    )
    y = table.y[:, None, :]
    side = np.stack([(weight * falls * y).sum(-1), -(weight * y).sum(-1) * one], -1)
    solved = _not_negative(gram, side)
    full = np.stack([solved[..., 0], np.broadcast_to(RATES, cross.shape), solved[..., 1]], -1)
    return _best_start(_exponential, full, table)


def _best_start(model: Model, starts: Floats, table: _Table) -> Floats:
    """Of [rows, starts, parameters] the best start of each row."""
    x, y, weight = (part[:, None, :] for part in (table.x, table.y, table.weight))
    errors = (weight * (model(starts, x)[0] - y) ** 2).sum(-1)
    best: Floats = starts[np.arange(len(starts)), np.argmin(errors, axis=1)]
    return best


def _not_negative(gram: Floats, side: Floats) -> Floats:
    """Minimise ½ xᵀ gram x - side·x over x ≥ 0: the best feasible one over all sets of zeros."""
    size = side.shape[-1]
    best = np.zeros_like(side)
    value = np.zeros(side.shape[:-1])
    ridge = TINY * np.trace(gram, axis1=-2, axis2=-1)[..., None, None] * np.eye(size)
    gram = gram + ridge
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
    return best


def _polished(
    model: Model, start: Floats, table: _Table, *, fixed: bool = False
) -> tuple[Floats, Floats]:
    """Parameters ≥ 0 and weighted squared errors after damped Gauss-Newton steps.

    `fixed` keeps the first parameter where it is. A step that does not lower the error is undone.
    """
    now = start
    values, slopes = model(now, table.x)
    errors = (table.weight * (values - table.y) ** 2).sum(-1)
    damping = np.full(len(now), 1e-3)
    for _ in range(ITERATIONS):
        down = slopes * table.weight[..., None]
        gradient = np.matmul(down.transpose(0, 2, 1), (values - table.y)[..., None])[..., 0]
        square = np.matmul(down.transpose(0, 2, 1), slopes)
        held = (now <= 0) & (gradient > 0)
        held[:, 0] |= fixed
        tried = np.maximum(0.0, now - _step(square, gradient, held, damping))
        new_values, new_slopes = model(tried, table.x)
        new_errors = (table.weight * (new_values - table.y) ** 2).sum(-1)
        better = new_errors < errors
        gained = np.where(better, errors - new_errors, 0.0)
        damping = np.where(better, damping / 10, np.minimum(damping * 10, 1e12))
        now = np.where(better[:, None], tried, now)
        values = np.where(better[:, None], new_values, values)
        slopes = np.where(better[:, None, None], new_slopes, slopes)
        settled = (gained <= 1e-9 * errors) & (better | (damping > 1e3))
        errors = np.where(better, new_errors, errors)
        if settled.all():
            break
    return now, errors


def _step(square: Floats, gradient: Floats, held: np.ndarray, damping: Floats) -> Floats:
    free = ~held
    square = square * free[:, :, None] * free[:, None, :]
    diagonal = np.einsum("npp->np", square)
    scale = np.maximum(diagonal, TINY * diagonal.max(axis=1, keepdims=True) + 1e-300)
    extra = scale * damping[:, None] + np.where(held, 1.0, 0.0)
    matrix = square + np.eye(square.shape[1]) * extra[:, :, None]
    step: Floats = np.linalg.solve(matrix, (gradient * free)[..., None])[..., 0]
    return step


def _reciprocal(parameters: Floats, x: Floats) -> tuple[Floats, Floats]:
    """1/(a x² + b x + c) - gap, and its slopes in the last axis."""
    a, b, c, gap = (parameters[..., n, None] for n in range(4))
    value = 1 / np.maximum((a * x + b) * x + c, 1e-9)
    slope = -(value**2)
    return value - gap, np.stack([slope * x * x, slope * x, slope, -np.ones_like(value)], -1)


def _exponential(parameters: Floats, x: Floats) -> tuple[Floats, Floats]:
    """amplitude x exp(-rate x) - gap, and its slopes in the last axis."""
    amplitude, rate, gap = (parameters[..., n, None] for n in range(3))
    falls = np.exp(-rate * x)
    value = amplitude * falls
    return value - gap, np.stack([falls, -x * value, -np.ones_like(value)], -1)

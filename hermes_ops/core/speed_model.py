"""The speed of data-parallel training by its number of GPUs: two models, fitted to measured steps.

`SpeedModel` is Pollux': the seconds of a step, by GPUs, nodes and samples a GPU. `AllReduceSpeed`
knows the number of GPUs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import exp, log, log2, sqrt
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.sizes import StepTime

Floats = NDArray[np.float64]
Complexes = NDArray[np.complex128]
Numbers = TypeVar("Numbers", Floats, Complexes)
LEAST = 1e-8
"""Seconds: the least of each parameter, and its value while nothing measured tells it."""

MOST = 1e3
"""The greatest of each parameter, as a multiple of the longest measured step."""

STEP = 1e-30
"""The imaginary step by which the fit differentiates: so small that the gradient is exact."""

SMOOTHING = 1e-6
"""Our choice: errors below a thousandth count as squares."""

SLOWER_BETWEEN_NODES = 1.1
"""While no step on several nodes has been measured, they are taken for this much slower."""


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """The seconds of a pass, of computing and all-reduce, which overlap in part.

    Computing takes `alpha_c + beta_c x samples a GPU`. The all-reduce of g > 1 GPUs takes
    `alpha_r + beta_r x (g - 2)` on one node and `alpha_n + beta_n x (g - 2)` on several. A pass
    takes `(computing^gamma + all-reduce^gamma)^(1/gamma)`, gamma in [1, 10]: 1 is no overlap.

    Source: Qiao et al., "Pollux", OSDI 2021, section 4.2.
    """

    alpha_c: float
    beta_c: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float

    def compute_s(self, local_batch: Floats) -> Floats:
        """Return the seconds of computing for that many samples on each GPU."""
        return np.asarray(self.alpha_c + self.beta_c * local_batch)

    def pass_s(self, gpus: Floats, nodes: Floats, local_batch: Floats) -> Floats:
        """Return the seconds of a pass with its all-reduce; the three arrays have one shape."""
        return _pass_s(np.array(self._values()), gpus, nodes, local_batch)

    def _values(self) -> tuple[float, ...]:
        network = (self.alpha_n, self.beta_n, self.alpha_r, self.beta_r)
        return (self.alpha_c, self.beta_c, *network, self.gamma)


@dataclass(frozen=True, slots=True)
class SpeedFit:
    """A fitted model; `error` is the root mean square of the logarithm of fitted / measured."""

    model: SpeedModel
    error: float


def fit_speed_model(times: Sequence[StepTime], start: SpeedModel | None = None) -> SpeedFit:
    """Fit the model to measured steps that know their samples a GPU; `start` is an earlier fit.

    What was not measured is not guessed from the data but set, so that larger sizes are tried:
    with one number of samples a GPU half of the computing is taken to be independent of it; the
    all-reduce is free until several GPUs of one node (of several nodes) have been measured, and
    does not grow with the GPUs until more than two have been. Between nodes it is taken to be 1.1
    times as slow as within one, until steps there have been measured. Raise ValueError without a
    usable step.

    Source: the public artefact of Pollux (petuum/adaptdl, commit c793c70): the sum of the root mean
    squared logarithmic errors of computing and of a whole step, with priors on gamma (1e-3) and on
    the growth of the all-reduce (1e-2), minimised by L-BFGS. Our choice: first over the logarithms
    of the parameters, which differ by orders of magnitude. A search without them, or with a
    gradient by differences, stops at a place that depends on the processor.
    """
    from scipy.optimize import minimize

    usable = [time for time in times if time.local_batch and time.seconds > 0]
    if not usable:
        raise ValueError("no measured step tells its samples a GPU")
    facts = _Facts.from_times(usable)
    low, high = _bounds(facts)
    first = np.array([0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001] if start is None else start._values())
    best = np.clip(first, low, high)
    free = np.flatnonzero(low < high)
    objective, limits = _Objective(facts, best, free), (low[free], high[free])
    search = partial(minimize, jac=True, method="L-BFGS-B")
    bounds = list(zip(*np.log(limits), strict=True))
    near = np.exp(search(objective.of_logarithms, np.log(best[free]), bounds=bounds).x)
    bounds = list(zip(*limits, strict=True))
    result = search(objective, np.clip(near, *limits), bounds=bounds)
    best[free] = np.clip(result.x, *limits)
    fitted = _pass_s(best, facts.gpus, facts.nodes, facts.local_batch)
    error = float(np.sqrt(np.mean(np.log(fitted / facts.seconds) ** 2)))
    alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma = map(float, best)
    if not (facts.nodes > 1).any():
        alpha_n, beta_n = SLOWER_BETWEEN_NODES * alpha_r, SLOWER_BETWEEN_NODES * beta_r
    return SpeedFit(SpeedModel(alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma), error)


@dataclass(frozen=True, slots=True)
class _Facts:
    """The measured steps as columns; `compute_s` is nan where it was not measured.

    `more` are the GPUs beyond two. `computed` are the places of the known `compute_s`, of which
    `log_compute` are the logarithms.
    """

    gpus: Floats
    nodes: Floats
    local_batch: Floats
    seconds: Floats
    compute_s: Floats
    more: Floats
    log_seconds: Floats
    computed: NDArray[np.int64]
    log_compute: Floats

    @classmethod
    def from_times(cls, times: Sequence[StepTime]) -> _Facts:
        rows = [
            (t.gpus, t.nodes, t.local_batch or 0, t.seconds, t.compute_s or np.nan) for t in times
        ]
        gpus, nodes, local_batch, seconds, compute_s = np.array(rows, dtype=np.float64).T.copy()
        computed = np.flatnonzero(~np.isnan(compute_s))
        return cls(
            gpus,
            nodes,
            local_batch,
            seconds,
            compute_s,
            more=np.maximum(gpus - 2, LEAST),
            log_seconds=np.log(seconds),
            computed=computed,
            log_compute=np.log(compute_s[computed]),
        )

    def objectives(self, values: Complexes) -> Complexes:
        """Return what the fit minimises for each of (K, 7) parameters, (K,)."""
        alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma = values.T[:, :, None]
        computing = alpha_c + beta_c * self.local_batch
        network = np.where(
            self.nodes > 1, alpha_n + beta_n * self.more, alpha_r + beta_r * self.more
        )
        network = np.where(self.gpus > 1, network, LEAST)
        total = _smooth_errors(np.log(_overlapped(computing, network, gamma)) - self.log_seconds)
        if len(self.computed):
            measured = np.take(computing, self.computed, axis=1)
            total += _smooth_errors(np.log(measured) - self.log_compute)
        growth = (beta_n / alpha_n) ** 2 + (beta_r / alpha_r) ** 2
        priors = 1e-3 * (gamma - 1) ** 2 + 1e-2 * growth
        return np.asarray(total + priors[:, 0])


@dataclass(frozen=True, slots=True)
class _Objective:
    """The objective of the parameters `free`, with its exact gradient, by complex steps.

    `values` are those of all seven parameters. All points of a gradient are evaluated at once.
    """

    facts: _Facts
    values: Floats
    free: NDArray[np.int64]

    def __call__(self, point: Floats) -> tuple[float, Floats]:
        """Return the objective and its gradient."""
        rows = np.tile(self.values.astype(np.complex128), (len(point), 1))
        rows[:, self.free] = point + STEP * 1j * np.eye(len(point))
        objectives = self.facts.objectives(rows)
        return float(objectives[0].real), objectives.imag / STEP

    def of_logarithms(self, point: Floats) -> tuple[float, Floats]:
        """Return the objective of the logarithms of the parameters, and its gradient."""
        parameters = np.exp(point)
        value, gradient = self(parameters)
        return value, gradient * parameters


def _smooth_errors(gaps: Complexes) -> Complexes:
    """Return the root mean square of each row, without the edge at 0 on which a search stops."""
    return np.asarray(np.sqrt(np.mean(gaps**2, axis=1) + SMOOTHING))


def _bounds(facts: _Facts) -> tuple[Floats, Floats]:
    """Return the least and greatest of each parameter, equal where nothing measured tells it."""
    longest_s = max(facts.seconds.max(), np.nanmax(facts.compute_s, initial=0.0))
    low, high = np.full(7, LEAST), np.full(7, MOST * longest_s)
    low[6], high[6] = 1.0, 10.0
    if len(set(facts.local_batch.tolist())) == 1:
        is_measured = ~np.isnan(facts.compute_s)
        computing = (
            facts.compute_s[is_measured] if is_measured.any() else facts.seconds[facts.gpus == 1]
        )
        if len(computing):
            low[0] = high[0] = max(LEAST, float(computing.mean()) / 2)
    if not (facts.nodes > 1).any():
        low[2] = high[2] = low[3] = high[3] = LEAST
    if not ((facts.nodes == 1) & (facts.gpus > 1)).any():
        low[4] = high[4] = low[5] = high[5] = LEAST
    if not (facts.gpus > 2).any():
        low[3] = high[3] = low[5] = high[5] = LEAST
    return low, high


def _pass_s(values: Floats, gpus: Floats, nodes: Floats, local_batch: Floats) -> Floats:
    alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma = values
    more = np.maximum(gpus - 2, LEAST)
    network = np.where(nodes > 1, alpha_n + beta_n * more, alpha_r + beta_r * more)
    network = np.where(gpus > 1, network, LEAST)
    return _overlapped(alpha_c + beta_c * local_batch, network, gamma)


def _overlapped(computing: Numbers, network: Numbers, gamma: Numbers) -> Numbers:
    """Return the seconds of a pass by those of its two parts; complex ones go by the real part."""
    larger = np.maximum(computing, network)  # so that no power overflows
    ratio = np.minimum(computing, network) / larger
    return cast(Numbers, larger * (1 + ratio**gamma) ** (1 / gamma))


@dataclass(frozen=True, slots=True)
class AllReduceSpeed:
    """Seconds of a unit of work on w GPUs: a/w + b log2(w)/w + c (w-1)/w² + d.

    `weights` are a, b, c and d, each at least 0: computing, the latency and the volume of the
    all-reduce, and what does not shrink. `error` is the root mean square of the logarithm of
    fitted over measured speed, `measured` the number of sizes that it was fitted to.

    Source: Capes et al. (arXiv 1908.08082), equations 2 to 5, fitted by non-negative least squares;
    the paper's terms are lost, these are the textbook's. Our choices: errors count relative to the
    measured value; with one measured size the speed-up is linear, with two it is a/w + d (Amdahl),
    as more terms would be arbitrary; with three or more all terms are used. Where these say that
    one GPU takes no time, because the speeds contradict each other, the speed-up is linear too.
    """

    weights: tuple[float, float, float, float]
    error: float
    measured: int

    @classmethod
    def fit(cls, speeds: tuple[tuple[int, float], ...]) -> AllReduceSpeed:
        """Fit the measured (GPUs, units of work a second); ValueError without a speed above 0."""
        if not speeds or any(gpus < 1 or not speed > 0 for gpus, speed in speeds):
            raise ValueError("speeds are above 0, on at least one GPU, and there is at least one")
        return _fitted_all_reduce(speeds)

    def speed(self, gpus: int) -> float:
        """Return the units of work a second on that number of GPUs."""
        return 1 / sum(w * x for w, x in zip(self.weights, _all_reduce_terms(gpus), strict=True))


def _all_reduce_terms(gpus: int) -> tuple[float, float, float, float]:
    return (1 / gpus, log2(gpus) / gpus, (gpus - 1) / gpus**2, 1.0)


@lru_cache(maxsize=1 << 14)
def _fitted_all_reduce(speeds: tuple[tuple[int, float], ...]) -> AllReduceSpeed:
    sizes = len({gpus for gpus, _ in speeds})
    weights = _all_reduce_weights(speeds, sizes)
    unrated = AllReduceSpeed(weights, 0.0, sizes)
    squares = [log(unrated.speed(gpus) / speed) ** 2 for gpus, speed in speeds]
    return AllReduceSpeed(weights, sqrt(sum(squares) / len(squares)), sizes)


def _all_reduce_weights(
    speeds: tuple[tuple[int, float], ...], sizes: int
) -> tuple[float, float, float, float]:
    columns = {1: (0,), 2: (0, 3)}.get(sizes, (0, 1, 2, 3))
    weights = _least_squares(speeds, columns)
    return weights if weights[0] + weights[3] > 0 else _least_squares(speeds, (0,))


def _least_squares(
    speeds: tuple[tuple[int, float], ...], columns: tuple[int, ...]
) -> tuple[float, float, float, float]:
    """Return the weights of these terms by non-negative least squares, 0 for the others."""
    from scipy.optimize import nnls

    rows = [
        [_all_reduce_terms(gpus)[column] * speed for column in columns] for gpus, speed in speeds
    ]
    solved, _ = nnls(rows, [1.0] * len(rows))
    weights = [0.0] * 4
    for column, weight in zip(columns, solved, strict=True):
        weights[column] = float(weight)
    a, b, c, d = weights
    if not a + d > 0:  # one GPU would take no time
        a, b, c = exp(sum(log(gpus / speed) for gpus, speed in speeds) / len(speeds)), 0.0, 0.0
    return (a, b, c, d)

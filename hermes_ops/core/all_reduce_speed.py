"""The speed of data-parallel training by its number of GPUs, fitted to what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, log, log2, sqrt


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
        return _fitted(speeds)

    def speed(self, gpus: int) -> float:
        """Return the units of work a second on that number of GPUs."""
        return 1 / sum(w * x for w, x in zip(self.weights, _terms(gpus), strict=True))


def _terms(gpus: int) -> tuple[float, float, float, float]:
    return (1 / gpus, log2(gpus) / gpus, (gpus - 1) / gpus**2, 1.0)


@lru_cache(maxsize=1 << 14)
def _fitted(speeds: tuple[tuple[int, float], ...]) -> AllReduceSpeed:
    sizes = len({gpus for gpus, _ in speeds})
    weights = _weights(speeds, sizes)
    unrated = AllReduceSpeed(weights, 0.0, sizes)
    squares = [log(unrated.speed(gpus) / speed) ** 2 for gpus, speed in speeds]
    return AllReduceSpeed(weights, sqrt(sum(squares) / len(squares)), sizes)


def _weights(
    speeds: tuple[tuple[int, float], ...], sizes: int
) -> tuple[float, float, float, float]:
    columns = {1: (0,), 2: (0, 3)}.get(sizes, (0, 1, 2, 3))
    weights = _solved(speeds, columns)
    return weights if weights[0] + weights[3] > 0 else _solved(speeds, (0,))


def _solved(
    speeds: tuple[tuple[int, float], ...], columns: tuple[int, ...]
) -> tuple[float, float, float, float]:
    """Return the weights of these terms by non-negative least squares, 0 for the others."""
    from scipy.optimize import nnls

    rows = [[_terms(gpus)[column] * speed for column in columns] for gpus, speed in speeds]
    solved, _ = nnls(rows, [1.0] * len(rows))
    weights = [0.0] * 4
    for column, weight in zip(columns, solved, strict=True):
        weights[column] = float(weight)
    a, b, c, d = weights
    if not a + d > 0:  # one GPU would take no time
        a, b, c = exp(sum(log(gpus / speed) for gpus, speed in speeds) / len(speeds)), 0.0, 0.0
    return (a, b, c, d)

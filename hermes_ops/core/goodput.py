"""Goodput: how fast training progresses, by GPUs and batch: speed times statistical efficiency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.sizes import BatchRange
from hermes_ops.core.speed_model import Floats, SpeedModel

BATCHES = 50
"""The batches that are compared for each number of GPUs, evenly spaced by their logarithm."""

AT_ONCE = 128
"""The noise scales that are computed at once: their table fits into the cache of a processor."""


@dataclass(frozen=True, slots=True)
class Goodputs:
    """For each of S sizes the best batch and what it gives.

    `rate`, (S,): steps of the initial batch a second, 0 for a size that no batch fits. `batch`,
    (S,): samples a step.
    """

    rate: Floats
    batch: Floats


def efficiency(batch: Floats, initial: float, noise_scale: float | Floats) -> Floats:
    """Return the progress of a sample, in (0, 1], against one in a step of the initial batch.

    Source: Pollux, OSDI 2021, equation 7, by the noise scale of McCandlish et al., 2018.
    """
    return np.asarray((noise_scale + initial) / (noise_scale + batch))


def goodputs(
    model: SpeedModel,
    batches: BatchRange,
    noise_scale: float,
    gpus: Sequence[int],
    nodes: Sequence[int],
) -> Goodputs:
    """Return the best goodput and batch of each size: `gpus[i]` on `nodes[i]` nodes.

    A batch is split evenly over the GPUs; more than fits on one is accumulated over several passes,
    the last of which alone has an all-reduce. On one GPU a batch above the initial one is always
    accumulated over two passes or more: the noise scale is measured between them.
    Source: Pollux' artefact, petuum/adaptdl, commit c793c70.
    """
    return _table(model, batches, tuple(gpus), tuple(nodes)).goodputs(noise_scale)


def best_rates(
    model: SpeedModel,
    batches: BatchRange,
    noise_scales: Floats,
    gpus: Sequence[int],
    nodes: Sequence[int],
) -> Floats:
    """Return the rates of `goodputs` by noise scale (rows) and size (columns)."""
    return _table(model, batches, tuple(gpus), tuple(nodes)).rates(noise_scales)


@dataclass(frozen=True, slots=True)
class BatchTable:
    """The BATCHES batches of each of S sizes: what their goodputs are but for the noise.

    (S, BATCHES) each: `total` samples a step, its `seconds`, and whether the size has the batch.
    """

    initial: int
    total: Floats
    seconds: Floats
    allowed: NDArray[np.bool_]

    @classmethod
    def from_model(
        cls, model: SpeedModel, batches: BatchRange, gpus: Sequence[int], nodes: Sequence[int]
    ) -> BatchTable:
        """Return the batches of each size: `gpus[i]` on `nodes[i]` nodes."""
        sizes = np.array(gpus, dtype=np.float64)[:, None]
        spread = np.array(nodes, dtype=np.float64)[:, None]
        totals = _totals(batches, sizes)
        most_local = np.inf if batches.most_local is None else float(batches.most_local)
        local = np.ceil(totals / sizes - 1e-9)
        further = np.maximum(np.ceil(local / most_local - 1e-9) - 1, 0.0)
        accumulated = (sizes == 1) & (local > batches.initial)
        further = np.where(accumulated, np.maximum(further, 1.0), further)
        local = np.ceil(local / (further + 1) - 1e-9)
        local = np.minimum(local, np.floor(batches.most / (sizes * (further + 1))))
        allowed = (local >= batches.least_local) & (local <= most_local)
        total = sizes * local * (further + 1)
        local = np.maximum(local, 1.0)
        seconds = model.pass_s(*np.broadcast_arrays(sizes, spread, local))
        seconds = seconds + further * model.compute_s(local)
        return cls(batches.initial, total, seconds, allowed)

    def goodputs(self, noise_scale: float) -> Goodputs:
        """Return the best goodput and batch of each size."""
        rates = self._rates(noise_scale)
        best = rates.argmax(axis=1)
        rows = np.arange(len(best))
        return Goodputs(rates[rows, best], self.total[rows, best])

    def rates(self, noise_scales: Floats) -> Floats:
        """Return the best goodputs by noise scale (rows) and size (columns)."""
        parts = np.array_split(noise_scales, -(-len(noise_scales) // AT_ONCE))
        return np.concatenate([self._rates(part[:, None, None]).max(axis=-1) for part in parts])

    def _rates(self, noise_scale: float | Floats) -> Floats:
        gain = self.total / self.initial * efficiency(self.total, self.initial, noise_scale)
        return np.where(self.allowed, gain / self.seconds, 0.0)


@lru_cache(maxsize=256)  # jobs of a kind differ by their noise alone
def _table(
    model: SpeedModel, batches: BatchRange, gpus: tuple[int, ...], nodes: tuple[int, ...]
) -> BatchTable:
    return BatchTable.from_model(model, batches, gpus, nodes)


def _totals(batches: BatchRange, sizes: Floats) -> Floats:
    """Return BATCHES totals for each of the (S, 1) sizes, from its least batch to the most."""
    least = np.minimum(np.maximum(batches.initial, batches.least_local * sizes), batches.most)
    steps = np.linspace(0.0, 1.0, BATCHES)
    return np.asarray(least * np.exp(steps * (log(batches.most) - np.log(least))))

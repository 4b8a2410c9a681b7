"""The learned correction of chances: what recorded sweeps say of trials in the same position.

The model of `forecast` knows one sweep. What all sweeps have in common (how much its chances are
worth early and late, how ranks at a depth become final ranks, which trials it overlooks) is learnt
from recorded ones by `bench/frontrunner_learn.py`, which writes `correction.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.frontrunner.table import CurveTable

FILE = str(Path(__file__).with_name("correction.json"))
EXTREME = 4.0  # deviations of a value over the recorded states: beyond it, it counts as this
LEAST = 1e-9  # of a chance or deviation whose logarithm is taken

EVIDENCE = (
    "log chance by the model",
    "expected end above the lowest expected end, in usual deviations",
    "log deviation of the end, over the usual one",
    "log deviation without the own curve, over the usual one",
    "slowness, in deviations",
    "rank at its depth, 0 the best to 1",
    "log rank at its depth",
    "log number of trials that have been as deep",
    "log depth over the last one",
    "whether it has begun",
    "lowest loss above the lowest of the sweep, scaled",
    "rank by lowest loss, 0 the best to 1",
    "change from the depth before",
    "change from two depths before",
    "share of the trials that have begun",
    "share of the trials that are over",
    "log deepest depth over the last one",
    "log number of trials that can still win",
    "share of earlier trials",
)
"""The inputs of the correction, a column each; the last five describe the sweep."""


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """The model's view of N trials: `chance`, `mean` and `sd` of their final losses.

    `sd_without_curve`: of the final losses by other trials alone; `slowness`: log seconds a step,
    in deviations of the sweep; `scaled[N, K]`: the losses on the model's scale, NaN where a trial
    has not been.
    """

    chance: Floats
    mean: Floats
    sd: Floats
    sd_without_curve: Floats
    slowness: Floats
    scaled: Floats


@dataclass(frozen=True, slots=True, eq=False)
class ChanceCorrection:
    """A network of F inputs and H hidden units that corrects log chances.

    `center[F]` and `spread[F]` standardise the evidence. The correction of a trial is
    `linear[F]` and `output[H]` of tanh of `hidden[F, H]` and `bias[H]`: the same function for each
    trial, so that the order of the trials does not matter.
    """

    center: Floats
    spread: Floats
    linear: Floats
    hidden: Floats
    bias: Floats
    output: Floats

    @classmethod
    def from_json(cls, document: Mapping[str, object]) -> ChanceCorrection:
        """Return the correction of a file, of which other keys say where it comes from."""
        return cls(*(np.array(document[name], dtype=float) for name in cls.__slots__))

    def to_json(self) -> dict[str, object]:
        """Return the numbers, rounded to six digits."""
        arrays = {name: getattr(self, name) for name in self.__slots__}
        return {name: rounded(array).tolist() for name, array in arrays.items()}

    def standardised(self, evidence: Floats) -> Floats:
        """Return the evidence in deviations."""
        inputs: Floats = np.clip((evidence - self.center) / self.spread, -EXTREME, EXTREME)
        return inputs

    def apply(self, chance: Floats, evidence: Floats) -> Floats:
        """Return the corrected chances, which sum to 1; where all are 0 they stay so.

        `chance[N]`: 0 for a trial that cannot win, which stays 0; `evidence[N, F]`.
        """
        can_win = chance > 0
        if not can_win.any():
            return chance
        inputs = self.standardised(evidence[can_win])
        change = inputs @ self.linear + np.tanh(inputs @ self.hidden + self.bias) @ self.output
        log_chance = np.log(chance[can_win]) + change
        weights = np.exp(log_chance - log_chance.max())
        corrected = np.zeros_like(chance)
        corrected[can_win] = weights / weights.sum()
        return corrected


def rounded(array: Floats, digits: int = 6) -> Floats:
    """Return the array rounded to `digits` significant digits."""
    flat = [float(f"{value:.{digits}g}") for value in array.ravel()]
    return np.array(flat).reshape(array.shape)


@lru_cache(maxsize=4)
def read_correction(path: str) -> ChanceCorrection:
    """Return the correction in a file."""
    return ChanceCorrection.from_json(json.loads(Path(path).read_text("utf-8")))


def corrected(table: CurveTable, positions: Positions) -> Floats:
    """Return N chances: those of the model, corrected."""
    if not positions.chance.any():
        return positions.chance
    return read_correction(FILE).apply(positions.chance, evidence(table, positions))


def evidence(table: CurveTable, positions: Positions) -> Floats:
    """Return N x F: what the correction knows of each trial, in the order of EVIDENCE.

    No value changes if all losses are scaled or moved alike. A trial that has not begun has the
    middle of the ranks.
    """
    can_win = positions.chance > 0
    usual_sd = max(float(np.sqrt((positions.sd[can_win] ** 2).mean())), LEAST)
    of_trial = (
        np.log(np.maximum(positions.chance, LEAST)),
        (positions.mean - positions.mean[can_win].min()) / usual_sd,
        np.log(np.maximum(positions.sd / usual_sd, LEAST)),
        np.log(np.maximum(positions.sd_without_curve / usual_sd, LEAST)),
        positions.slowness,
    )
    columns = np.broadcast_arrays(
        *of_trial,
        *_ranks_at_depth(table),
        *_losses_so_far(table, positions.scaled),
        *_state_of_sweep(table, can_win),
    )
    return np.stack(columns, axis=1)


def _ranks_at_depth(table: CurveTable) -> tuple[Floats, ...]:
    """Return five columns: the rank among those that have been as deep, and how deep that is.

    Losses that are equal share a rank.
    """
    has_begun, depth = table.reached > 0, np.maximum(table.reached - 1, 0)
    losses_there = table.losses[: table.trial_count, depth].T
    own_loss = np.diag(losses_there)[:, None]
    better = (losses_there < own_loss).sum(axis=1)
    not_worse = (losses_there <= own_loss).sum(axis=1)
    compared = np.maximum((~np.isnan(losses_there)).sum(axis=1), 1)
    rank = np.where(has_begun, (better + not_worse - 1) / 2 / compared, 0.5)
    log_depth = np.log(np.array(table.depths, float)[depth] / table.depths[-1])
    return (
        rank,
        np.log(rank + 0.5 / compared),
        np.log(compared),
        np.where(has_begun, log_depth, 0.0),
        has_begun.astype(float),
    )


def _losses_so_far(table: CurveTable, scaled: Floats) -> tuple[Floats, ...]:
    """Return four columns: the lowest loss, its rank, and the last changes."""
    has_begun = table.reached > 0
    if not has_begun.any():
        return tuple(np.array(value) for value in (0.0, 0.5, 0.0, 0.0))
    lowest = np.fmin.reduce(scaled[has_begun], axis=1)
    ascending = np.sort(lowest)
    better, not_worse = (ascending.searchsorted(lowest, side) for side in ("left", "right"))
    rank, above = np.full(len(scaled), 0.5), np.zeros(len(scaled))
    rank[has_begun] = (better + not_worse - 1) / 2 / len(lowest)
    above[has_begun] = lowest - ascending[0]
    return above, rank, _change(table, scaled, 1), _change(table, scaled, 2)


def _change(table: CurveTable, scaled: Floats, stages: int) -> Floats:
    """Return the change of the loss over the last stages; 0 where a trial has passed fewer."""
    rows, last = np.arange(len(scaled)), np.maximum(table.reached - 1, 0)
    change = scaled[rows, last] - scaled[rows, np.maximum(last - stages, 0)]
    return np.where(table.reached > stages, np.nan_to_num(change), 0.0)


def _state_of_sweep(table: CurveTable, can_win: NDArray[np.bool_]) -> tuple[Floats, ...]:
    """Return five values: how far the sweep is."""
    has_begun = table.reached > 0
    deepest = table.depths[max(int(table.reached.max()) - 1, 0)]
    earlier = len(table.losses) - table.trial_count
    values = (
        has_begun.mean(),
        table.over.mean(),
        np.log(deepest / table.depths[-1]),
        np.log(can_win.sum()),
        earlier / len(table.losses),
    )
    return tuple(np.array(float(value)) for value in values)

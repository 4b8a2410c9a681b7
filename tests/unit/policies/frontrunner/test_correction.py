"""The learned correction of chances: what it is given, and what it makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hermes_ops.policies.frontrunner.correction import (
    EVIDENCE,
    FILE,
    ChanceCorrection,
    Positions,
    corrected,
    evidence,
    read_correction,
)
from hermes_ops.policies.frontrunner.table import CurveTable

Floats = NDArray[np.float64]
NO = np.nan
DEPTHS = (1, 2, 3, 5, 8, 13)
RANK, BEGUN, ABOVE = (
    EVIDENCE.index(name)
    for name in (
        "rank at its depth, 0 the best to 1",
        "whether it has begun",
        "lowest loss above the lowest of the sweep, scaled",
    )
)


def table(*curves: list[float], over: tuple[int, ...] = ()) -> CurveTable:
    """A sweep with these losses at its first depths; a second a step."""
    losses = np.full((len(curves), len(DEPTHS)), NO)
    for row, curve in enumerate(curves):
        losses[row, : len(curve)] = np.minimum.accumulate(curve)
    seconds = np.where(np.isnan(losses), NO, np.array(DEPTHS, float))
    reached = np.array([len(curve) for curve in curves])
    is_over = np.isin(np.arange(len(curves)), over)
    return CurveTable(DEPTHS, losses, seconds, reached, is_over, ((),) * len(curves))


def positions(of: CurveTable, chance: list[float] | None = None) -> Positions:
    """What a model might say of them: its mean is the lowest loss so far."""
    count = of.trial_count
    lowest = np.nan_to_num(np.fmin.reduce(of.losses, axis=1), nan=0.5, posinf=2.0)
    chances = np.where(of.over, 0.0, 1 / count) if chance is None else np.array(chance)
    scaled = np.where(of.seen, np.minimum(of.losses, 2.0), NO)
    ones = np.ones(count)
    return Positions(chances, lowest, 0.3 * ones, 0.4 * ones, 0.0 * ones, scaled)


def column(of: CurveTable, number: int) -> list[float]:
    return [float(value) for value in evidence(of, positions(of))[:, number]]


def test_the_shipped_correction_has_a_weight_for_each_piece_of_evidence() -> None:
    shipped = read_correction(FILE)
    hidden = len(shipped.output)
    assert len(shipped.center) == len(shipped.spread) == len(shipped.linear) == len(EVIDENCE)
    assert shipped.hidden.shape == (len(EVIDENCE), hidden)
    assert (shipped.spread > 0).all()


def test_a_correction_is_the_same_after_it_was_written_and_read() -> None:
    shipped = read_correction(FILE)
    again = ChanceCorrection.from_json(shipped.to_json())
    for name in ChanceCorrection.__slots__:
        np.testing.assert_array_equal(getattr(again, name), getattr(shipped, name))


def test_without_weights_the_chances_stay() -> None:
    sweep = table([0.5, 0.4], [0.6], [])
    shipped = read_correction(FILE)
    nothing = replace(shipped, linear=0 * shipped.linear, output=0 * shipped.output)
    chance = np.array([0.5, 0.3, 0.2])
    found = nothing.apply(chance, evidence(sweep, positions(sweep)))
    np.testing.assert_allclose(found, chance)


def test_a_trial_is_ranked_among_all_that_have_passed_its_depth() -> None:
    """Else the last one at a depth would be its best, as the better ones have gone on."""
    ranks = column(table([0.1, 0.1], [0.2, 0.15], [0.9], []), RANK)
    assert ranks[2] == max(ranks)
    assert ranks[0] < ranks[1]
    assert ranks[3] == 0.5


def test_equal_losses_share_a_rank() -> None:
    ranks = column(table([0.4], [0.4], [np.inf]), RANK)
    assert ranks[0] == ranks[1] < ranks[2]


def test_a_trial_that_has_not_begun_is_not_above_the_lowest_loss() -> None:
    sweep = table([0.4], [0.7], [])
    assert column(sweep, BEGUN) == [1.0, 1.0, 0.0]
    assert column(sweep, ABOVE) == pytest.approx([0.0, 0.3, 0.0])


def test_the_evidence_of_a_sweep_before_any_report_is_finite() -> None:
    sweep = table([], [], [])
    assert np.isfinite(evidence(sweep, positions(sweep))).all()


def test_earlier_trials_count_as_a_share_of_the_table() -> None:
    sweep = table([0.4], [0.5], [0.3] * len(DEPTHS), [0.2] * len(DEPTHS))
    later = replace(sweep, reached=sweep.reached[:2], over=sweep.over[:2])
    known = positions(sweep)
    own = Positions(*(getattr(known, name)[:2] for name in Positions.__slots__))
    assert evidence(later, own)[:, -1].tolist() == [0.5, 0.5]


sweeps = st.lists(
    st.lists(st.sampled_from([0.1, 0.2, 0.5, 0.9, np.inf]), max_size=len(DEPTHS)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(sweeps, st.integers(0, 99))
def test_corrected_chances_are_a_distribution_over_those_that_had_one(
    curves: list[list[float]], seed: int
) -> None:
    sweep = table(*curves)
    chance = np.random.default_rng(seed).random(len(curves))
    chance[np.random.default_rng(seed + 1).random(len(curves)) < 0.3] = 0.0
    found = corrected(sweep, positions(sweep, [*map(float, chance)]))
    assert found.sum() == pytest.approx(float(chance.any()))
    assert ((found > 0) == (chance > 0)).all()


@settings(max_examples=40, deadline=None)
@given(sweeps)
def test_the_order_of_the_trials_does_not_matter(curves: list[list[float]]) -> None:
    order = np.random.default_rng(len(curves)).permutation(len(curves))
    sweep, moved = table(*curves), table(*(curves[row] for row in order))
    found, again = corrected(sweep, positions(sweep)), corrected(moved, positions(moved))
    np.testing.assert_allclose(found[order], again, rtol=1e-9)


def test_the_shipped_correction_names_its_tasks_and_their_licence() -> None:
    text = Path(FILE).read_text("utf-8")
    assert '"licence"' in text
    assert "lcbench_albert" not in text, "a task that validates"

"""What curves and similar configurations say of the final losses."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from hermes_ops.policies.frontrunner.forecast import TrialSet, pool_estimates
from hermes_ops.policies.frontrunner.regression import FinalLosses, StageRegressions
from hermes_ops.policies.frontrunner.table import CurveTable

Floats = NDArray[np.float64]
DEPTHS = (1, 2, 3, 5, 8, 13)


def stages(scaled: Floats, slowness: Floats | None = None, gain: float = 0.0) -> StageRegressions:
    """The stages of these losses, on the scale that the regressions use."""
    count = len(scaled)
    made = CurveTable(
        depths=DEPTHS,
        losses=scaled,
        seconds=np.where(np.isnan(scaled), np.nan, np.array(DEPTHS, float)),
        reached=(~np.isnan(scaled)).sum(axis=1),
        over=np.zeros(count, bool),
        configurations=((),) * count,
    )
    return StageRegressions(made, scaled, np.zeros(count) if slowness is None else slowness, gain)


def falling(levels: list[float], reached: list[int]) -> Floats:
    """Losses that fall by 0.3 a stage, seen for so many depths each."""
    full = np.array(levels)[:, None] - 0.3 * np.arange(len(DEPTHS))
    seen = np.arange(len(DEPTHS)) < np.array(reached)[:, None]
    return np.where(seen, full, np.nan)


def test_a_curve_is_extended_along_the_drops_of_those_that_are_further() -> None:
    scaled = falling([0.0, 0.4, -0.3, 0.2, 0.7], [6, 6, 6, 6, 2])
    found = stages(scaled).final_losses()
    assert found.mean[4] == pytest.approx(0.7 - 1.5, abs=0.15)
    np.testing.assert_allclose(found.mean[:4], scaled[:4, -1])


def test_the_deeper_a_curve_is_known_the_surer_its_end() -> None:
    found = stages(falling([0.0, 0.4, -0.3, 0.2], [6, 5, 3, 1])).final_losses()
    assert (np.diff(found.variance_by_depth) < 0).all()
    assert found.variance_by_depth[-1] == 0.0
    np.testing.assert_allclose(found.variance, found.variance_by_depth[[5, 4, 2, 0]])


def test_who_has_not_begun_has_no_end_of_its_own() -> None:
    found = stages(falling([0.0, 0.4, -0.3], [6, 2, 0])).final_losses()
    assert np.isnan(found.mean[2])
    assert np.isnan(found.variance[2])


def test_a_slow_trial_is_believed_to_fall_further_only_in_the_world_that_says_so() -> None:
    scaled = falling([0.0, 0.0, 0.0, 0.0], [2, 2, 2, 2])
    slowness = np.array([-1.0, -1.0, 1.0, 1.0])
    none, some = (stages(scaled, slowness, gain).final_losses().mean for gain in (0.0, 3.0))
    assert none[2] == pytest.approx(none[0])
    assert some[2] < some[0] - 0.2


def test_a_trial_without_a_curve_is_guessed_from_the_ones_like_it() -> None:
    place = np.array([0.0, 0.1, 0.2, 0.8, 0.9, 1.0, 0.05, 0.95])
    kernel = np.exp(-8 * (place[:, None] - place) ** 2)
    mean = np.where(np.arange(8) < 6, place, np.nan)
    final_losses = FinalLosses(mean, np.where(np.isnan(mean), np.nan, 0.01), np.full(6, 0.1), 0.5)
    crowd = TrialSet((kernel[None],), np.zeros(8), np.zeros(8), 8)
    (found,) = pool_estimates([final_losses], [0.0], crowd)
    assert found.mean[6] < 0.35 < 0.65 < found.mean[7]
    assert found.sd[6] > found.sd[0]
    assert (found.variance_without_curve >= found.sd**2 - 1e-9)[:6].all()


def test_a_finished_trial_is_known_exactly() -> None:
    mean = np.array([0.3, 0.5, 0.1, 0.9])
    final_losses = FinalLosses(mean, np.array([0.0, 0.0, 0.2, 0.2]), np.zeros(6), 0.5)
    (found,) = pool_estimates(
        [final_losses], [0.0], TrialSet((np.zeros((0, 4, 4)),), np.zeros(4), np.zeros(4), 4)
    )
    np.testing.assert_allclose(found.mean[:2], mean[:2], atol=1e-3)
    assert found.sd[2] > 10 * found.sd[0]
    assert 0.1 < found.mean[2] < found.mean[3] < 0.9
